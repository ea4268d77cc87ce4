"""The forecasters' scores on runs of a study, made in a process of their own: nothing is seen before it happens."""

import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import torch

from hybridtrain.data.batches import BatchSampler
from hybridtrain.data.corpus import embedded_corpus
from hybridtrain.hybrid.forecast.base import TrainingSignal
from hybridtrain.hybrid.forecast.evaluate import ForecastScore, evaluate_forecasters
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.model_config import model_preset
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import compose
from hybridtrain.run.environment import read_environment
from hybridtrain.run.program import program_digest
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record
from hybridvalidation.study.protocol import StudyFile, StudyRecord

HORIZONS = (50, 100, 200, 400)
WINDOW = 25
STEP_MODEL, STEP_SEQ_LEN = "gpt2-small", 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastRecord(Record):
    """Scores of all forecasters on one run."""

    study: str
    method: str
    seed: int
    scores: tuple[ForecastScore, ...]
    step_cpu_s: float
    """Processor time of one gpt2-small step on the same machine, one thread."""
    evidence: Evidence = Evidence.EXECUTED


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastJob:
    """What a child is given."""

    study: StudyFile
    run: StudyRecord
    """To score; it has its steps' losses."""
    kinds: tuple[str, ...]
    """Of forecasters."""
    step_cpu_s: float | None
    """Of ``ForecastRecord``; None: not measured yet."""


def score_in_child(job: ForecastJob) -> ForecastRecord:
    """Score every forecaster on a run, on one thread."""
    torch.set_num_threads(1)
    run, step_cpu_s = job.run, job.step_cpu_s or _step_cpu_s()
    started, begin = datetime.now(UTC), time.perf_counter()
    scores = evaluate_forecasters(signals_of(job.study, run), job.kinds, HORIZONS, WINDOW, run.run.seed)
    return ForecastRecord(
        key=run.key, study=job.study.name, method=run.run.method, seed=run.run.seed, scores=scores,
        step_cpu_s=step_cpu_s, started_at=started.isoformat(timespec="seconds"),
        duration_s=round(time.perf_counter() - begin, 3), environment=read_environment(),
        program=program_digest(),
    )  # fmt: skip


def signals_of(study: StudyFile, record: StudyRecord) -> list[TrainingSignal]:
    """Return what a run told of its true steps."""
    schedule = replace(study.schedule, total_steps=record.run.num_steps)
    return [
        TrainingSignal(step=step, loss=loss, grad_norm=None, lr=record.run.lr * schedule.factor(step), phase=Phase.FULL)
        for step, loss in enumerate(record.step_losses, 1)
    ]


def _step_cpu_s() -> float:
    """Return the processor time of a gpt2-small step in its steady state, the least of three."""
    config = model_preset(STEP_MODEL)
    trainer = Trainer(config, compose([]), TrainerConfig(), DirectTransfer(torch.device("cpu")))
    sampler = BatchSampler(embedded_corpus().train, micro_batch_size=1, seq_len=STEP_SEQ_LEN, seed=0)
    times = []
    for step in range(4):
        begin = time.process_time()
        trainer.step([sampler.batch(step, 0)])
        times.append(time.process_time() - begin)
    return min(times[1:])
