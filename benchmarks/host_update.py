"""AdamW on the CPU against DeepSpeed's, in one process: interleaved, medians, nanoseconds a parameter.

Needs ``pip install deepspeed ninja`` and a C++ compiler, with which DeepSpeed builds its kernel at the first call.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from tabulate import tabulate

from hybridtrain.engine.parameter_pass import HOST_SLICE_ELEMENTS
from hybridtrain.memory.formats import (
    DynamicInt8State,
    ExactWeight,
    Float32Master,
    PlainState,
    StateFormat,
    WeightFormat,
    parts,
)
from hybridtrain.memory.slices import StateSlice, WeightSlice
from hybridtrain.optim import AdamWConfig
from hybridtrain.optim.optimizer import UpdateStep

_LR, _WEIGHT_DECAY = 1e-3, 0.1

Step = Callable[[], None]


@dataclass(slots=True)
class _Times:
    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


def main() -> None:
    """Print the time of each update, and its ratio to DeepSpeed's with the same weights and gradients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--elements", type=int, default=1 << 25)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    count = arguments.elements
    both = PlainState(), PlainState()
    eight_bits = DynamicInt8State(signed=True), DynamicInt8State(signed=False)
    steps = {
        "float32": (_deepspeed(count, torch.float32), _ours(count, ExactWeight(), torch.float32, both)),
        "bfloat16, float32 master": (
            _deepspeed(count, torch.bfloat16),
            _ours(count, Float32Master(), torch.bfloat16, both),
        ),
        "bfloat16, float32 master, 8-bit state": (
            _deepspeed(count, torch.bfloat16),
            _ours(count, Float32Master(), torch.bfloat16, eight_bits),
        ),
    }
    rows = []
    for name, pair in steps.items():
        theirs, ours = _interleave(pair, arguments.rounds)
        rows.append([
            name, *(f"{median(times.wall) / count * 1e9:.2f}" for times in (ours, theirs)),
            f"{median(theirs.wall) / median(ours.wall):.2f}",
            f"{median(theirs.processor) / median(ours.processor):.2f}",
        ])  # fmt: skip
    headers = ("weights and gradients", "ours, ns", "DeepSpeed, ns", "rate, wall", "rate, processor")
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))
    print(f"{arguments.threads} threads; rate: DeepSpeed's time over ours. DeepSpeed has no 8-bit state.")


def _interleave(steps: tuple[Step, ...], rounds: int) -> list[_Times]:
    """Run all in turn; the first round warms up."""
    found = [_Times() for _ in steps]
    for number in range(rounds + 1):
        for step, times in zip(steps, found, strict=True):
            begin, begin_cpu = time.perf_counter(), time.process_time()
            step()
            if number:
                times.wall.append(time.perf_counter() - begin)
                times.processor.append(time.process_time() - begin_cpu)
    return found


def _deepspeed(count: int, dtype: torch.dtype) -> Step:
    """Return DeepSpeed's step; in bfloat16 with the two casts that its offload makes around it."""
    master = torch.nn.Parameter(torch.randn(count))
    optimizer = DeepSpeedCPUAdam([master], lr=_LR, weight_decay=_WEIGHT_DECAY)
    master.grad = torch.randn(count)
    grad_P, weight_P = master.grad.to(dtype), master.detach().to(dtype)
    casts = dtype != torch.float32

    def step() -> None:
        if casts:
            master.grad.copy_(grad_P)
        optimizer.step()
        if casts:
            weight_P.copy_(master.data)

    return step


def _ours(count: int, storage: WeightFormat, dtype: torch.dtype, formats: tuple[StateFormat, StateFormat]) -> Step:
    """Return the update of the trainer, in the slices in which it works on the host."""
    optimizer, value_P, grad_P = AdamWConfig(), torch.randn(count), torch.randn(count).to(dtype)
    has_master = not isinstance(storage, ExactWeight)
    weight = WeightSlice(storage, (value_P.to(dtype),), value_P if has_master else None)
    state = [
        StateSlice(kind, tuple(torch.full(s.shape, s.zero, dtype=s.dtype) for s in kind.specs((count,))), count)
        for kind in formats
    ]

    def step() -> None:
        for part in parts(count, HOST_SLICE_ELEMENTS):
            piece = weight.part(part)
            settings = UpdateStep(3, _LR, _WEIGHT_DECAY, keeps_value=False)
            optimizer.update(piece, grad_P[part], [slot.part(part) for slot in state], settings)
            piece.write()

    return step


if __name__ == "__main__":
    main()
