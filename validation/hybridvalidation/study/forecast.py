"""How well loss forecasters do on the recorded losses of a study's runs: nothing is seen before it happens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from tabulate import tabulate

from hybridtrain.errors import HybridTrainError
from hybridtrain.hybrid.forecast.catalogue import DEFAULT_FORECASTER, FORECASTERS
from hybridtrain.hybrid.forecast.evaluate import FIRST_STEP, ForecastScore
from hybridtrain.reports.tables import MARKDOWN, write_page
from hybridvalidation.records.card_step import CARD_STEP_OF, card_step_s
from hybridvalidation.records.makers import made_by
from hybridvalidation.records.store import append_record, read_lines
from hybridvalidation.runs.child import Child
from hybridvalidation.study.figures import record_of
from hybridvalidation.study.forecast_run import (
    HORIZONS,
    STEP_MODEL,
    STEP_SEQ_LEN,
    WINDOW,
    ForecastJob,
    ForecastRecord,
)
from hybridvalidation.study.protocol import BASELINE, Made, StudyFile
from hybridvalidation.study.runner import study_file

_SHORTEST = FIRST_STEP + max(HORIZONS)
"""Steps of a run that has a forecast at every horizon."""
_SEEDS = 3
_FILE = study_file("forecasts")
_METHODS = (BASELINE, "slow_gradient")
_HOW = (
    "Executed on the CPU: each forecaster saw a recorded run step by step and, every 50 steps from step 300 on, told "
    f"the mean training loss of the last {WINDOW} steps of the horizon; coming learning rates are known. Error: "
    "mean absolute, nats per token. Width and coverage are of the 90 % interval. Every forecaster starts anew in every "
    "run; their settings were chosen on other runs of the same model and corpus. Share: processor time of learning and "
    f"forecasting per training step, over that of one {STEP_MODEL} step of {STEP_SEQ_LEN} tokens on the processor"
)


def score_study(study: StudyFile, made: Made, results: Path, say: Callable[[str], None]) -> list[ForecastRecord]:
    """Score every forecaster on the runs that were not scored yet, and return all records.

    Raises:
        HybridTrainError: a process that scores ended without an answer.
    """
    known = read_forecasts(results)
    runs = [record_of(study, made, name, seed, study.num_steps) for name in _METHODS for seed in study.seeds[:_SEEDS]]
    scored = {record.key for record in known}
    missing = [run for run in runs if run is not None and run.key not in scored and len(run.step_losses) >= _SHORTEST]
    step_cpu_s = None
    for run in missing:
        job = ForecastJob(study=study, run=run, kinds=tuple(FORECASTERS), step_cpu_s=step_cpu_s)
        ended = _start(job).wait()
        if (record := ended.answer) is None:
            raise HybridTrainError(
                f"forecasts of {study.name}: {run.run.method}, seed {run.run.seed} has no record: {ended.fault}; those "
                "that ended are kept, the same command goes on behind them"
            )
        append_record(results / "records", _FILE, record)
        known.append(record)
        step_cpu_s = record.step_cpu_s
        say(f"forecasts of {record.method}, seed {record.seed}: scored")
    return known


def _start(job: ForecastJob) -> Child[ForecastRecord]:
    return Child("hybridvalidation.study.forecast_run:score_in_child", job, ForecastRecord)


def read_forecasts(results: Path) -> list[ForecastRecord]:
    """Return all records, oldest first."""
    return read_lines(results / "records" / _FILE, ForecastRecord)


def forecast_text(records: Sequence[ForecastRecord], style: str, of_card_s: float | None = None) -> str:
    """Return one row per forecaster and horizon, means over runs.

    Args:
        records: Of the runs that were scored.
        style: Of tabulate.
        of_card_s: Seconds of a card's step, estimated, for the share that counts where a card trains.
    """
    rows = []
    for kind in FORECASTERS:
        for horizon in HORIZONS:
            scores = [s for record in records for s in record.scores if (s.kind, s.horizon) == (kind, horizon)]
            if scores:
                rows.append(_row(kind, horizon, scores, fmean(record.step_cpu_s for record in records), of_card_s))
    headers = ["forecaster", "horizon", "error", "width", "coverage %", "forecasts", "ms a step", "share %"]
    if of_card_s is not None:
        headers.append("of a card's %")
    if not rows:
        return (
            f"No run to score: forecasts need the losses of at least {_SHORTEST} true steps, which a study keeps for "
            "runs of its own length without validations on their way."
        )
    table = tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)
    return f"{_sentence(records)}\n\n{table}\n\n{_HOW}{_of_card(of_card_s)}"


def write_forecasts(results: Path) -> list[Path]:
    """Write ``tables/forecasts.md`` below ``results``; nothing without records."""
    records = read_forecasts(results)
    if not records:
        return []
    text = forecast_text(records, MARKDOWN, card_step_s(results / "records"))
    parts = ["# Forecasts of the loss", text, made_by(("", record) for record in records)]
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


def _of_card(step_s: float | None) -> str:
    if step_s is None:
        return "."
    return (
        f"; a card's step is far shorter, so the share is told of the one that is estimated for {CARD_STEP_OF}, "
        f"{1000 * step_s:.0f} ms, too, as if nothing hid the processor's work."
    )


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
