"""Scores of loss forecasters on the recorded losses of a study's runs, without look-ahead."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch

from hybridtrain.data.batches import BatchSampler
from hybridtrain.data.corpus import embedded_corpus
from hybridtrain.hybrid.forecast.base import TrainingSignal
from hybridtrain.hybrid.forecast.catalogue import DEFAULT_FORECASTER, FORECASTERS
from hybridtrain.hybrid.forecast.evaluate import FIRST_STEP, ForecastScore, evaluate_forecasters
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.model_config import model_preset
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import compose
from hybridtrain.reports.tables import MARKDOWN, table, write_page
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridvalidation.child import Child
from hybridvalidation.experiment import answer_of, begin_header
from hybridvalidation.records.card_step import CARD_STEP_OF, card_step_s
from hybridvalidation.records.makers import made_by
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import append_line, read_lines
from hybridvalidation.study.protocol import BASELINE, Made, StudyFile, StudyRecord, record_path, study_record

_HORIZONS = (50, 100, 200, 400)
_WINDOW = 25
_STEP_MODEL, _STEP_SEQ_LEN = "gpt2-small", 512
_SHORTEST = FIRST_STEP + max(_HORIZONS)
"""Fewest steps of a run, for a forecast at every horizon."""
_SEEDS = 3
_METHODS = (BASELINE, "slow_gradient")
_HEADERS = ("forecaster", "horizon", "error", "width", "coverage %", "forecasts", "ms per step", "share %")
_HOW = (
    "Executed on the CPU: each forecaster observed a recorded run step by step. Every 50 steps from step 300 on it "
    "predicted the mean training loss of the last {_WINDOW} steps of the horizon, given the learning rates. Error: "
    "mean absolute, nats per token. Width and coverage are of the 90 % interval. Every forecaster starts untrained in "
    "each run; its settings were chosen on other runs of the same model and corpus. Share: CPU time of the forecaster "
    "per training step, over that of a {_STEP_MODEL} step of {_STEP_SEQ_LEN} tokens"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastRecord(Record):
    """Scores of all forecasters on one run."""

    study: str
    method: str
    seed: int
    scores: tuple[ForecastScore, ...]
    step_cpu_s: float
    """CPU time of one gpt2-small step on the same machine, one thread."""
    evidence: Evidence = Evidence.EXECUTED


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastJob:
    """A recorded run with step losses, to score in a child process."""

    study: StudyFile
    run: StudyRecord
    kinds: tuple[str, ...]
    """Kinds of forecasters."""
    step_cpu_s: float | None
    """Step time for ``ForecastRecord``; None: not measured yet."""


def score_study(study: StudyFile, made: Made, results: Path, say: Callable[[str], None]) -> list[ForecastRecord]:
    """Score every forecaster on unscored runs; return all records.

    Raises:
        HybridTrainError: a child ended without an answer.
    """
    known = read_forecasts(results)
    runs = [
        study_record(study, made, name, seed, study.num_steps) for name in _METHODS for seed in study.seeds[:_SEEDS]
    ]
    scored, step_cpu_s = {record.key for record in known}, None
    for run in runs:
        if run is None or run.key in scored or len(run.step_losses) < _SHORTEST:
            continue
        job = ForecastJob(study=study, run=run, kinds=tuple(FORECASTERS), step_cpu_s=step_cpu_s)
        ended = Child("hybridvalidation.study.forecast:score_in_child", job, ForecastRecord).wait()
        record = answer_of(ended, run.run, f"forecasts of {study.name}")
        append_line(record_path(results, "forecasts"), record)
        known.append(record)
        step_cpu_s = record.step_cpu_s
        say(f"forecasts of {record.method}, seed {record.seed}: scored")
    return known


def score_in_child(job: ForecastJob) -> ForecastRecord:
    """Score every forecaster on a run, on one thread."""
    torch.set_num_threads(1)
    run, step_cpu_s, header = job.run, job.step_cpu_s or _step_cpu_s(), begin_header()
    scores = evaluate_forecasters(signals_of(job.study, run), job.kinds, _HORIZONS, _WINDOW, run.run.seed)
    return ForecastRecord(
        key=run.key, study=job.study.name, method=run.run.method, seed=run.run.seed, scores=scores,
        step_cpu_s=step_cpu_s, **header(),
    )  # fmt: skip


def signals_of(study: StudyFile, record: StudyRecord) -> list[TrainingSignal]:
    """Return the losses and learning rates of a run's true steps."""
    schedule = replace(study.schedule, total_steps=record.run.num_steps)
    return [
        TrainingSignal(step=step, loss=loss, grad_norm=None, lr=record.run.lr * schedule.factor(step), phase=Phase.FULL)
        for step, loss in enumerate(record.step_losses, 1)
    ]


def _step_cpu_s() -> float:
    """Return the processor time of a gpt2-small step in its steady state, the least of three."""
    trainer = Trainer(model_preset(_STEP_MODEL), compose([]), TrainerConfig(), DirectTransfer(torch.device("cpu")))
    sampler = BatchSampler(embedded_corpus().train, micro_batch_size=1, seq_len=_STEP_SEQ_LEN, seed=0)
    times = []
    for step in range(4):
        begin = time.process_time()
        trainer.step([sampler.batch(step, 0)])
        times.append(time.process_time() - begin)
    return min(times[1:])


def read_forecasts(results: Path) -> list[ForecastRecord]:
    """Return all records, oldest first."""
    return read_lines(record_path(results, "forecasts"), ForecastRecord)


def forecast_text(records: Sequence[ForecastRecord], style: str, of_card_s: float | None = None) -> str:
    """Return one row per forecaster and horizon, means over runs.

    Args:
        records: Records of scored runs.
        style: Table style.
        of_card_s: Estimated seconds of a card's step, for the share on a card.
    """
    rows = [
        _row(kind, horizon, scores, fmean(record.step_cpu_s for record in records), of_card_s)
        for kind in FORECASTERS
        for horizon in _HORIZONS
        if (scores := [s for record in records for s in record.scores if (s.kind, s.horizon) == (kind, horizon)])
    ]
    if not rows:
        return (
            f"No run to score: forecasts need at least {_SHORTEST} true steps with losses, which a study keeps for "
            f"full-length runs without intermediate validations."
        )
    headers = _HEADERS if of_card_s is None else (*_HEADERS, "of card step %")
    shown, card = table(headers, rows, style, keys=2), "."
    if of_card_s is not None:
        card = (
            f". The last column is the share of a card's much shorter step, estimated for {CARD_STEP_OF} as "
            f"{1000 * of_card_s:.0f} ms, without overlap of CPU and card."
        )
    return f"{_sentence(records)}\n\n{shown}\n\n{_HOW}{card}"


def write_forecasts(results: Path) -> list[Path]:
    """Write ``tables/forecasts.md`` below ``results``; nothing without records."""
    if not (records := read_forecasts(results)):
        return []
    text = forecast_text(records, MARKDOWN, card_step_s(results / "records"))
    parts = ["# Forecasts of the loss", text, made_by(("", record) for record in records)]
    return [write_page(results, "forecasts", "\n\n".join(parts))]


def _sentence(records: Sequence[ForecastRecord]) -> str:
    found: dict[str, list[float]] = {}
    for score in (score for record in records for score in record.scores):
        found.setdefault(score.kind, []).append(score.mean_absolute_error)
    errors = sorted((fmean(values), kind) for kind, values in found.items())
    told, best = ", ".join(f"{kind} {error:.4f}" for error, kind in errors), errors[0][1]
    default = "it is the default" if best == DEFAULT_FORECASTER else f"the default is {DEFAULT_FORECASTER}"
    return f"Smallest mean error over all horizons and {len(records)} runs: {best} ({told}); {default}."


def _row(
    kind: str, horizon: int, scores: Sequence[ForecastScore], step_cpu_s: float, of_card_s: float | None
) -> list[str]:
    cpu_s = fmean(score.cpu_s_per_step for score in scores)
    return [
        kind, str(horizon), f"{fmean(s.mean_absolute_error for s in scores):.4f}",
        f"{fmean(s.mean_width for s in scores):.3f}", f"{100 * fmean(s.coverage for s in scores):.0f}",
        str(sum(s.num_forecasts for s in scores)), f"{1000 * cpu_s:.2f}", f"{100 * cpu_s / step_cpu_s:.3f}",
        *([] if of_card_s is None else [f"{100 * cpu_s / of_card_s:.2f}"]),
    ]  # fmt: skip
