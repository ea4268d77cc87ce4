"""What the memory profiler costs of a training step: interleaved steps with and without it, medians."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np
import torch
from tabulate import tabulate

from hybridtrain.data.batches import TokenBatch
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.model_config import ModelConfig, model_preset
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import compose
from hybridtrain.profiler.memory_profiler import MemoryProfiler
from hybridtrain.run.environment import read_environment
from hybridtrain.run.program import program_digest
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.profiled import ProfiledCase, ProfilerRecord, append_profiled

_TINY = ModelConfig(
    family="gpt2", vocab_size=256, max_seq_len=64, num_blocks=2, width=64, num_heads=4, num_kv_heads=4, ffn_width=256
)
_HEADERS = ("model", "batch", "every", "rounds", "step ms", "snapshot ms", "snapshot / step %", "with / without")

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
    """Print a row per case, and how its figures were got; write them down if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=7, help="pairs of gpt2-small steps; the tiny model gets 100 times"
    )
    parser.add_argument("--record", type=Path, help="folder of results; adds a line to its records/profiler.jsonl")
    arguments = parser.parse_args()
    rounds, started, begin = arguments.rounds, datetime.now(UTC), time.perf_counter()
    cases = (
        _Case("tiny", _TINY, 2, 64, 1, 100 * rounds),
        _Case("tiny", _TINY, 2, 64, 20, 100 * rounds),
        _Case("gpt2-small", model_preset("gpt2-small"), 1, 256, 1, rounds),
    )
    has_cuda = torch.cuda.is_available()
    record = ProfilerRecord(
        key="profiler overhead", device=torch.cuda.get_device_name() if has_cuda else "CPU",
        evidence=Evidence.MEASURED if has_cuda else Evidence.EXECUTED, num_threads=torch.get_num_threads(),
        cases=tuple(_measure(case) for case in cases), started_at=started.isoformat(timespec="seconds"),
        duration_s=round(time.perf_counter() - begin, 3), environment=read_environment(),
        program=program_digest(),
    )  # fmt: skip
    print(tabulate([_row(case) for case in record.cases], headers=_HEADERS, disable_numparse=True))
    print(
        f"\n{record.device}, {record.num_threads} threads, torch {torch.__version__}, fp32. Step, snapshot: median "
        "wall time of a step without the profiler, and of\nrecord_step where it takes a snapshot right after a step. "
        "With / without: ratio of the medians of interleaved steps;\nnoise: that ratio between the steps without it, "
        "odd rounds to even rounds."
    )
    if arguments.record is not None:
        append_profiled(arguments.record / "records", record)


def _row(case: ProfiledCase) -> list[str]:
    return [
        case.model, f"{case.batch_size} x {case.seq_len}", str(case.every_n_steps), str(case.rounds),
        f"{1e3 * case.step_s:.2f}", f"{1e3 * case.snapshot_s:.3f}", f"{case.overhead_pct:.4f}",
        f"{case.ratio:.4f} (noise {case.noise:.4f})",
    ]  # fmt: skip


def _measure(case: _Case) -> ProfiledCase:
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
    return ProfiledCase(
        model=case.name, num_params=case.model.num_params, batch_size=case.batch_size, seq_len=case.seq_len,
        every_n_steps=case.every_n_steps, rounds=case.rounds, step_s=median(bare), snapshot_s=median(snapshots),
        ratio=median(profiled) / median(bare), noise=median(bare[1::2]) / median(bare[::2]),
    )  # fmt: skip


def _step(case: _Case) -> Step:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(case.model, compose([]), TrainerConfig(), DirectTransfer(device))
    rng = np.random.default_rng(0)
    shape = (case.batch_size, case.seq_len)
    token_ids_BT, target_ids_BT = (rng.integers(0, case.model.vocab_size, shape) for _ in range(2))
    batch = TokenBatch(token_ids_BT=token_ids_BT, target_ids_BT=target_ids_BT)

    def step() -> None:
        trainer.step([batch])  # reads the loss, so it waits for the device

    return step


if __name__ == "__main__":
    main()
