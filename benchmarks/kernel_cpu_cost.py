"""What state encoding and the RSSM cost of a training step on the CPU: gpt2-small, 512 tokens, interleaved, medians.

``python benchmarks/kernel_cpu_cost.py --write results/kernel-cpu-cost.md`` runs it and writes the table.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from tabulate import tabulate

from hybridkernels.rssm_gru import rssm_rollout
from hybridtrain.data.batches import TokenBatch
from hybridtrain.engine.step import StepResult
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.forecast import rssm_cell as cell
from hybridtrain.hybrid.forecast.base import TrainingSignal
from hybridtrain.hybrid.forecast.rssm import _SAMPLES, NUM_MEMBERS, RssmForecaster
from hybridtrain.hybrid.forecast.ticks import NUM_ACTIONS, TICK_STEPS
from hybridtrain.hybrid.watch import read_moments
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.model_config import model_preset
from hybridtrain.optimizations import PredictorState
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig

_BATCH, _SEQ_LEN = 2, 256
_BLOCK_STEPS = HybridConfig().full_steps
"""Steps from one reading of the moments, and from one forecast, to the next."""
_TRAIN_EVERY = 10
"""Steps between updates of the RSSM, the forecaster's default."""
_LARGEST_SHARE = 0.01
_HEADERS = ("work", "median ms", "once in steps", "ms per step", "share of a step")

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Work:
    """Something a hybrid run does beside its training steps."""

    name: str
    call: Call
    once_in: int
    """Steps."""
    is_bounded: bool = True
    """Whether it belongs to the two kernels, whose share has a bound."""


def main() -> None:
    """Print the table; exit with 1 where a kernel takes more than its share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="training steps, each followed by all of the work")
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    parser.add_argument("--threads", type=int, default=1, help="of torch; with more, shared cores distort small work")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    step, works = _prepare()
    step_s, work_s = _interleave(step, works, arguments.rounds)
    text = _report(step_s, list(zip(works, work_s, strict=True)), arguments.rounds)
    print(text)
    if arguments.write:
        arguments.write.write_text(text + "\n", encoding="utf-8")
    shares = [seconds / work.once_in / step_s for work, seconds in zip(works, work_s, strict=True) if work.is_bounded]
    raise SystemExit(sum(shares) > _LARGEST_SHARE)


def _prepare() -> tuple[Call, list[Work]]:
    """Return a training step and the work beside it."""
    config, plan = model_preset("gpt2-small"), compose([PredictorState()])
    trainer = Trainer(config, plan, TrainerConfig(), DirectTransfer(torch.device("cpu")))
    rng = np.random.default_rng(0)
    token_ids_BT, target_ids_BT = (rng.integers(0, config.vocab_size, (_BATCH, _SEQ_LEN)) for _ in range(2))
    batch = TokenBatch(token_ids_BT=token_ids_BT, target_ids_BT=target_ids_BT)
    done: list[StepResult] = []
    forecaster = _fed_forecaster()
    rollout = _rollout(forecaster, num_ticks=1)
    works = [
        Work("moment statistics", lambda: read_moments(trainer, done[-1]), _BLOCK_STEPS),
        Work("state encoding", forecaster._replay.encoder.encode, TICK_STEPS),
        Work("RSSM roll-out, 1 tick", rollout, _BLOCK_STEPS),
        Work(
            "whole RSSM forecast",
            lambda: forecaster._predict([1e-3] * _BLOCK_STEPS, _BLOCK_STEPS),
            _BLOCK_STEPS,
            is_bounded=False,
        ),
        Work("RSSM update", forecaster._train, _TRAIN_EVERY, is_bounded=False),
        Work("RSSM roll-out, 16 ticks", _rollout(forecaster, num_ticks=16), 16 * TICK_STEPS, is_bounded=False),
    ]
    return lambda: done.append(trainer.step([batch])), works


def _fed_forecaster() -> RssmForecaster:
    """Return a forecaster that has seen enough to train and forecast."""
    rng, forecaster = np.random.default_rng(0), RssmForecaster(seed=0, budget_mib=512)
    for step in range(1, 16 * TICK_STEPS + 1):
        loss = 2 + 2 * step**-0.5 + rng.normal(0, 0.05)
        forecaster.observe(TrainingSignal(step=step, loss=loss, grad_norm=1.0, lr=1e-3, phase=Phase.FULL))
    return forecaster


def _rollout(forecaster: RssmForecaster, num_ticks: int) -> Call:
    weights, rows = forecaster._ensemble.mean_weights(), (NUM_MEMBERS, _SAMPLES)
    latent = cell.initial(*rows)
    classes = torch.randint(0, cell.NUM_CLASSES, (*rows, cell.NUM_CATEGORICALS))
    actions = torch.zeros(num_ticks, 1, 1, NUM_ACTIONS).expand(-1, *rows, -1)
    uniforms = torch.rand(num_ticks, *rows, cell.NUM_CATEGORICALS)
    return lambda: rssm_rollout(weights, latent.hidden_EBH, classes, actions, uniforms)


def _interleave(step: Call, works: list[Work], rounds: int) -> tuple[float, list[float]]:
    """Return the median seconds of a step and of each work, which runs right after it, its data out of the caches."""
    steps: list[float] = []
    found: list[list[float]] = [[] for _ in works]
    for number in range(rounds + 1):
        steps.append(_seconds(step))
        for samples, work in zip(found, works, strict=True):
            samples.append(_seconds(work.call))
        if number == 0:  # warms up
            for samples in (steps, *found):
                samples.clear()
    return median(steps), [median(samples) for samples in found]


def _seconds(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _report(step_s: float, measured: list[tuple[Work, float]], rounds: int) -> str:
    def row(name: str, seconds: float, once_in: int) -> list[str]:
        per_step = seconds / once_in
        return [name, f"{1e3 * seconds:.2f}", str(once_in), f"{1e3 * per_step:.3f}", f"{100 * per_step / step_s:.4f} %"]

    rows = [row(work.name, seconds, work.once_in) for work, seconds in measured]
    bounded = sum(seconds / work.once_in for work, seconds in measured if work.is_bounded)
    names = [work.name for work, _ in measured if work.is_bounded]
    rows.append([f"the first {len(names)} together", "", "", f"{1e3 * bounded:.3f}", f"{100 * bounded / step_s:.4f} %"])
    table = tabulate(rows, headers=_HEADERS, tablefmt="github", disable_numparse=True)
    tokens, threads, cores = _BATCH * _SEQ_LEN, torch.get_num_threads(), os.cpu_count()
    return f"""\
# What state encoding and the RSSM cost on the CPU

Made by `python benchmarks/kernel_cpu_cost.py --rounds {rounds} --threads {threads} --write results/kernel-cpu-cost.md`.
Executed on a CPU with torch {torch.__version__}, on {threads} of {cores} cores that other programs used too: {rounds}
steps of gpt2-small in fp32 on {tokens} tokens, each followed by every piece of work once; medians of wall time.
A step took {step_s:.2f} s.

{table}

- The first {len(names)} are what the kernels state_encoding and rssm_gru do in a hybrid run, as often as it asks for
  them by default. Together they may take {100 * _LARGEST_SHARE:g} % of a step.
- Moment statistics are of all moments and the slow average of 124M weights; the state is encoded once a tick.
- The whole forecast holds the roll-out and three seen ticks; a roll-out of 16 ticks looks 400 steps ahead. They are in
  no sum, as is the update of the model, which is training in plain torch.
- A card's step is far shorter (gpt2-small in bf16, 4,096 tokens: estimated 78 ms), and these kernels run on it there:
  the share says nothing of a card. What stays on the processor is told of a card's step in tables/forecasts.md."""


if __name__ == "__main__":
    main()
