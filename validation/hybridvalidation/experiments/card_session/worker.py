"""One part of the evidence, in a child process."""

import io
import json
import os
import re
import time
import traceback
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridtrain.cli.main import main
from hybridtrain.config.encode import to_json
from hybridtrain.data.corpus import embedded_corpus
from hybridtrain.errors import DivergenceError, HostMemoryError, HybridTrainError
from hybridtrain.run.virtual_run import run_python
from hybridtrain.virtual_gpu.cards.card import Card
from hybridtrain.virtual_gpu.facade.launchers import PythonCommand
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu
from hybridtrain.weights.dummy_weights import write_dummy_model
from hybridvalidation.child import without_folders
from hybridvalidation.experiments.card_session.ceilings import measure_ceilings
from hybridvalidation.experiments.card_session.curves import all_rows, measure_curves
from hybridvalidation.experiments.card_session.plan import PlanJob, PlannedPart, plan_part
from hybridvalidation.experiments.card_session.record import (
    CardMeasurements,
    Ceilings,
    KernelTime,
    MeasuredScript,
    PlannedScript,
)
from hybridvalidation.experiments.card_session.run_script import ScriptJob, run_script
from hybridvalidation.experiments.card_session.train import TrainedPart, TrainJob, train_part
from hybridvalidation.records.outcome import Outcome

_BEGIN_S = time.monotonic()
"""Start of the process: this module is imported first."""
_MOST_TEXT = 600
"""Characters kept of an error."""
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")
"""Begin of the line of a traceback that names the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CeilingsJob:
    """Input of the first part."""

    used_before_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvesJob:
    """Where the times of kernels go, one line each, at once."""

    rows: Path
    limit_s: float
    """Seconds from the start of the process in which rows are begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsJob:
    """A short benchmark of the kernels, which keeps its own records."""

    results: Path
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsJob:
    """Folders of models to make, with weights that take no disk."""

    names: tuple[str, ...]
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptPlanJob:
    """A script to plan on a card."""

    script: Path
    folder: Path
    """Working folder of the script."""
    card: Card


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of a process, or the reason why there is none."""

    outcome: Outcome = Outcome.OK
    message: str = ""
    planned: PlannedPart | None = None
    planned_script: PlannedScript | None = None
    ceilings: Ceilings | None = None
    measured: CardMeasurements | None = None
    measured_script: MeasuredScript | None = None


def plan(job: PlanJob) -> Answer:
    """Plan a part on the CPU; errors are returned, not raised."""
    try:
        return Answer(planned=plan_part(job))
    except HybridTrainError as error:
        return Answer(outcome=Outcome.ERROR, message=str(error))


def ceilings(job: CeilingsJob) -> Answer:
    """Measure the card's peak rates."""
    return Answer(ceilings=measure_ceilings(job.used_before_bytes))


def models(job: ModelsJob) -> Answer:
    """Write folders of models for the scripts."""
    try:
        for name in job.names:
            write_dummy_model(job.folder / "models" / name)
    except (HybridTrainError, OSError) as error:
        return Answer(outcome=Outcome.ERROR, message=str(error))
    return Answer()


def plan_script(job: ScriptPlanJob) -> Answer:
    """Plan a script on the CPU, as ``hybridtrain virtual`` does."""
    os.chdir(job.folder)
    try:
        found = run_python(
            PythonCommand(str(job.script), False, ()), VirtualGpu(job.card), host_memory_bytes=None, quiet=True
        )  # fmt: skip
    except HybridTrainError as error:
        lines = str(error).splitlines()  # of an error of the script's own: a traceback
        told = next((line for line in reversed(lines) if _ERROR.match(line)), lines[0])
        return Answer(outcome=Outcome.ERROR, message=without_folders(told)[:_MOST_TEXT])
    run = found.run
    planned = PlannedScript(
        fits=found.fits, peak_allocated_bytes=run.peak.allocated_bytes, peak_reserved_bytes=run.peak_reserved_bytes,
        device_used_bytes=run.device_used_bytes, step_time_s=run.time.seconds if found.fits else None,
        caveats=tuple(map(without_folders, found.basis.caveats(fits=found.fits))),
    )  # fmt: skip
    return Answer(planned_script=planned)


def curves(job: CurvesJob) -> Answer:
    """Time kernels; each time is on disk before the next one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with job.rows.open("w", encoding="utf-8", buffering=1) as file:

        def on_row(row: KernelTime) -> None:
            file.write(f"{to_json(row)}\n")

        message = measure_curves(all_rows(device), device, end_s=_BEGIN_S + job.limit_s, on_row=on_row)
    return Answer(message=message)


def script(job: ScriptJob) -> Answer:
    """Run a script on the card; its figures before an error are kept."""
    measured, error = run_script(job)
    outcome, message = (Outcome.OK, "") if error is None else _ended_by(error)
    return Answer(outcome=outcome, message=message, measured_script=measured)


def kernels(job: KernelsJob) -> Answer:
    """Time this project's kernels beside others by the command, which writes each case's record at once."""
    told = io.StringIO()
    options = ["--quick", "--minutes", f"{job.limit_s / 60:.3f}", "--results", str(job.results), "--json"]
    with redirect_stdout(told):
        main(["bench", "kernels", *options])
    found = json.loads(told.getvalue().splitlines()[-1])
    if "message" in found:
        return Answer(outcome=Outcome.ERROR, message=str(found["message"]))
    left = f", {len(found['not_run'])} had no time" if found["not_run"] else ""
    lost = [f"the card stopped answering after {found['lost_card']}"] if found["lost_card"] else []
    outcome = Outcome.ERROR if lost else Outcome.WRONG if found["faults"] else Outcome.OK
    message = "; ".join([f"{len(found['records'])} cases{left}", *lost, *found["faults"]])
    return Answer(outcome=outcome, message=message[:_MOST_TEXT])


def train(job: TrainJob) -> Answer:
    """Train on the card; steps before an error are kept."""
    trained = TrainedPart()
    try:
        train_part(job, embedded_corpus(), trained, _BEGIN_S)
        outcome, message = Outcome.OK, trained.remark
    except Exception as error:  # noqa: BLE001  whatever a card may do to a run is evidence too
        outcome, message = _ended_by(error)
    return Answer(outcome=outcome, message=message, measured=trained.measured)


def _ended_by(error: BaseException) -> tuple[Outcome, str]:
    """Return the outcome of a run that an error ended."""
    if isinstance(error, torch.OutOfMemoryError | HostMemoryError):
        return Outcome.OUT_OF_MEMORY, str(error) or type(error).__name__
    if isinstance(error, DivergenceError):
        return Outcome.DIVERGED, str(error)
    if isinstance(error, SystemExit) and not error.code:
        return Outcome.OK, ""
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {error}"
    return Outcome.ERROR, without_folders(text)[:_MOST_TEXT]
