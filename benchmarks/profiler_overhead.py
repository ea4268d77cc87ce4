"""What the memory profiler costs of a training step: interleaved steps with and without it, medians."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from statistics import median

import numpy as np
import torch
from tabulate import tabulate

from hybridtrain.data.batches import TokenBatch
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.model_config import ModelConfig, model_preset
from hybridtrain.optimizations import MixedPrecision
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import compose
from hybridtrain.profiler.memory_profiler import MemoryProfiler
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig

_TINY = ModelConfig(
    family="gpt2", vocab_size=256, max_seq_len=64, num_blocks=2, width=64, num_heads=4, num_kv_heads=4, ffn_width=256
)
_HEADERS = ("step", "every", "rounds", "step ms", "snapshot ms", "snapshot / step %", "with / without")

Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    model: ModelConfig
    batch_size: int
    seq_len: int
    every_n_steps: int
    rounds: int


def main() -> None:
    """Print a row per case, and how its figures were got."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=7, help="pairs of gpt2-small steps; the tiny model gets 100 times"
    )
    rounds = parser.parse_args().rounds
    cases = (
        _Case("tiny, B2 T64, bf16", _TINY, 2, 64, 1, 100 * rounds),
        _Case("tiny, B2 T64, bf16", _TINY, 2, 64, 20, 100 * rounds),
        _Case("gpt2-small, B4 T256, bf16", model_preset("gpt2-small"), 4, 256, 1, rounds),
    )
    rows = [_measure(case) for case in cases]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(tabulate(rows, headers=_HEADERS, disable_numparse=True))
    print(
        f"\n{device}, {torch.get_num_threads()} threads, torch {torch.__version__}. Step, snapshot: median wall time "
        "of a step without the profiler, and of\nrecord_step where it takes a snapshot right after a step. With / "
        "without: ratio of the medians of interleaved steps;\nnoise: that ratio between the steps without it, "
        "odd rounds to even rounds."
    )


def _measure(case: _Case) -> list[str]:
    step = _step(case)
    profiler = MemoryProfiler(every_n_steps=case.every_n_steps)
    bare: list[float] = []
    profiled: list[float] = []
    snapshots: list[float] = []
    numbers = count(1)

    def with_profiler() -> None:
        begin = time.perf_counter()
        step()
        after_step = time.perf_counter()
        num_before = profiler.history.num_snapshots
        profiler.record_step(next(numbers), Phase.FULL)
        end = time.perf_counter()
        profiled.append(end - begin)
        if profiler.history.num_snapshots > num_before:
            snapshots.append(end - after_step)

    def without() -> None:
        begin = time.perf_counter()
        step()
        bare.append(time.perf_counter() - begin)

    step()  # warms up
    with profiler:
        for number in range(case.rounds):
            for run in (with_profiler, without) if number % 2 else (without, with_profiler):
                run()
    step_s, snapshot_s = median(bare), median(snapshots)
    noise = median(bare[1::2]) / median(bare[::2])
    return [
        case.name, str(case.every_n_steps), str(case.rounds), f"{1e3 * step_s:.2f}", f"{1e3 * snapshot_s:.3f}",
        f"{100 * snapshot_s / case.every_n_steps / step_s:.4f}",
        f"{median(profiled) / step_s:.4f} (noise {noise:.4f})",
    ]  # fmt: skip


def _step(case: _Case) -> Step:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(case.model, compose([MixedPrecision()]), TrainerConfig(), DirectTransfer(device))
    rng = np.random.default_rng(0)
    shape = (case.batch_size, case.seq_len)
    token_ids_BT, target_ids_BT = (rng.integers(0, case.model.vocab_size, shape) for _ in range(2))
    batch = TokenBatch(token_ids_BT=token_ids_BT, target_ids_BT=target_ids_BT)

    def step() -> None:
        trainer.step([batch])  # reads the loss, so it waits for the device

    return step


if __name__ == "__main__":
    main()
