"""How well loss forecasters do on the recorded losses of a study's runs: nothing is seen before it happens."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

import torch
from tabulate import tabulate

from hybridtrain.data.batches import BatchSampler
from hybridtrain.data.corpus import embedded_corpus
from hybridtrain.hybrid.forecast import DEFAULT_FORECASTER, FORECASTERS
from hybridtrain.hybrid.forecast.base import TrainingSignal
from hybridtrain.hybrid.forecast.evaluate import FIRST_STEP, ForecastScore, evaluate_forecasters
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.model_config import model_preset
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridvalidation.records.environment import read_environment
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.own_program import own_program
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import append_record, read_lines
from hybridvalidation.show.tables import MARKDOWN, made_by, write_page
from hybridvalidation.study.figures import record_of
from hybridvalidation.study.protocol import BASELINE, Made, StudyFile, StudyRecord
from hybridvalidation.study.runner import study_file

_HORIZONS = (50, 100, 200, 400)
_WINDOW = 25
_SHORTEST = FIRST_STEP + max(_HORIZONS)
"""Steps of a run that has a forecast at every horizon."""
_SEEDS = 3
_FILE = study_file("forecasts")
_METHODS = (BASELINE, "slow_gradient")
_STEP_MODEL, _STEP_SEQ_LEN = "gpt2-small", 512
_HOW = (
    "Executed on the CPU: each forecaster saw a recorded run step by step and, every 50 steps from step 300 on, told "
    f"the mean training loss of the last {_WINDOW} steps of the horizon; coming learning rates are known. Error: "
    "mean absolute, nats per token. Width and coverage are of the 90 % interval. Every forecaster starts anew in every "
    "run; their settings were chosen on other runs of the same model and corpus. Share of a step: processor time of "
    f"learning and forecasting per training step, over that of one {_STEP_MODEL} step of {_STEP_SEQ_LEN} tokens."
)


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


def score_study(study: StudyFile, made: Made, results: Path, say: Callable[[str], None]) -> list[ForecastRecord]:
    """Score every forecaster on the runs that were not scored yet, and return all records."""
    torch.set_num_threads(1)
    known = read_forecasts(results)
    runs = [record_of(study, made, name, seed, study.num_steps) for name in _METHODS for seed in study.seeds[:_SEEDS]]
    scored = {record.key for record in known}
    missing = [run for run in runs if run is not None and run.key not in scored and len(run.step_losses) >= _SHORTEST]
    step_cpu_s = _step_cpu_s() if missing else 0.0
    for run in missing:
        started, begin = datetime.now(UTC), time.perf_counter()
        scores = evaluate_forecasters(signals_of(study, run), list(FORECASTERS), _HORIZONS, _WINDOW, run.run.seed)
        record = ForecastRecord(
            key=run.key, study=study.name, method=run.run.method, seed=run.run.seed, scores=scores,
            step_cpu_s=step_cpu_s, started_at=started.isoformat(timespec="seconds"),
            duration_s=round(time.perf_counter() - begin, 3), environment=read_environment(),
            program=own_program().digest,
        )  # fmt: skip
        append_record(results / "records", _FILE, record)
        known.append(record)
        say(f"forecasts of {record.method}, seed {record.seed}: scored")
    return known


def signals_of(study: StudyFile, record: StudyRecord) -> list[TrainingSignal]:
    """Return what a run told of its true steps."""
    schedule = replace(study.schedule, total_steps=record.run.num_steps)
    return [
        TrainingSignal(step=step, loss=loss, grad_norm=None, lr=record.run.lr * schedule.factor(step), phase=Phase.FULL)
        for step, loss in enumerate(record.step_losses, 1)
    ]


def read_forecasts(results: Path) -> list[ForecastRecord]:
    """Return all records, oldest first."""
    return read_lines(results / "records" / _FILE, ForecastRecord)


def forecast_text(records: Sequence[ForecastRecord], style: str) -> str:
    """Return one row per forecaster and horizon, means over runs."""
    rows = []
    for kind in FORECASTERS:
        for horizon in _HORIZONS:
            scores = [s for record in records for s in record.scores if (s.kind, s.horizon) == (kind, horizon)]
            if scores:
                rows.append(_row(kind, horizon, scores, fmean(record.step_cpu_s for record in records)))
    headers = ["forecaster", "horizon", "error", "width", "coverage %", "forecasts", "ms a step", "share of a step %"]
    if not rows:
        return (
            f"No run to score: forecasts need the losses of at least {_SHORTEST} true steps, which a study keeps for "
            "runs of its own length without validations on their way."
        )
    table = tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)
    return f"{_sentence(records)}\n\n{table}\n\n{_HOW}"


def write_forecasts(results: Path) -> list[Path]:
    """Write ``tables/forecasts.md`` below ``results``; nothing without records."""
    records = read_forecasts(results)
    if not records:
        return []
    parts = ["# Forecasts of the loss", forecast_text(records, MARKDOWN), made_by(("", record) for record in records)]
    return [write_page(results, "forecasts", "\n\n".join(parts))]


def _sentence(records: Sequence[ForecastRecord]) -> str:
    found: dict[str, list[float]] = {}
    for score in (score for record in records for score in record.scores):
        found.setdefault(score.kind, []).append(score.mean_absolute_error)
    errors = {kind: fmean(values) for kind, values in found.items()}
    order = sorted(errors, key=lambda kind: errors[kind])
    told = ", ".join(f"{kind} {errors[kind]:.4f}" for kind in order)
    default = "it is the default" if order[0] == DEFAULT_FORECASTER else f"the default is {DEFAULT_FORECASTER}"
    return f"Smallest mean error over all horizons and {len(records)} runs: {order[0]} ({told}); {default}."


def _row(kind: str, horizon: int, scores: Sequence[ForecastScore], step_cpu_s: float) -> list[str]:
    cpu_s = fmean(score.cpu_s_per_step for score in scores)
    return [
        kind, str(horizon), f"{fmean(s.mean_absolute_error for s in scores):.4f}",
        f"{fmean(s.mean_width for s in scores):.3f}", f"{100 * fmean(s.coverage for s in scores):.0f}",
        str(sum(s.num_forecasts for s in scores)), f"{1000 * cpu_s:.2f}", f"{100 * cpu_s / step_cpu_s:.3f}",
    ]  # fmt: skip


def _step_cpu_s() -> float:
    """Return the processor time of a gpt2-small step in its steady state, the least of three."""
    config = model_preset(_STEP_MODEL)
    trainer = Trainer(config, compose([]), TrainerConfig(), DirectTransfer(torch.device("cpu")))
    sampler = BatchSampler(embedded_corpus().train, micro_batch_size=1, seq_len=_STEP_SEQ_LEN, seed=0)
    times = []
    for step in range(4):
        begin = time.process_time()
        trainer.step([sampler.batch(step, 0)])
        times.append(time.process_time() - begin)
    return min(times[1:])
