"""``hybridtrain recorded``: runs that others measured and published, planned with the same libraries and compared."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from math import exp, log
from pathlib import Path
from statistics import mean

from tabulate import tabulate

from hybridtrain.config.decode import load_toml
from hybridtrain.config.encode import encode
from hybridtrain.config.rules import repeated
from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.reports.tables import TERMINAL
from hybridtrain.virtual_gpu.cards.card import find_card
from hybridvalidation.child import Child, ChildResult
from hybridvalidation.experiment import Experiment, child_header, in_children, missing_package, versions_of
from hybridvalidation.records.asked import key_of, values_of
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import append_record, read_lines

_FILE = Path("recorded") / "planned.jsonl"
_LIMIT_S = 1800.0


SECONDS = "seconds"
_NO_PEAKS = ("_mean", "_params", SECONDS)


class Role(StrEnum):
    """Role of a run, fixed before prediction."""

    CALIBRATE = "calibrate"
    """Unpublished settings were fitted to it; at most one run of a source."""
    PREDICT = "predict"
    SEEN = "seen"
    """Not a blind prediction: the figure was known when code or recipe were written or changed."""
    MENDED = "mended"
    """Predicted blind, and its miss led to a change: the first plan counts as a prediction, later ones do not."""
    LEFT_OUT = "left_out"
    """Not planned, for the reason in ``why``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """One run that others measured."""

    id: str
    role: Role
    config: str = "{}"
    """The run's own part of the recipe, as JSON with the engine's own names."""
    card: str = ""
    """Card, where runs of a source differ in it."""
    recorded: Mapping[str, float]
    """Quantity to value: bytes, but for ``..._seconds``, ``..._params`` and ``oom`` (1: the run ran out of memory)."""
    why: str = ""
    """Reason for leaving it out; or the known cause of a miss."""

    def __post_init__(self) -> None:
        if self.role is Role.LEFT_OUT and not self.why:
            raise ValueError("why: missing; state why the run is left out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A publication with measured figures: a file of ``scenarios/recorded``."""

    title: str
    where: str
    """Repository, commit, file."""
    engine: str
    """Engine: a file in ``engines/``."""
    card: str
    versions: str
    """Versions of torch and libraries as the source states them; empty if it does not."""
    protocol: str
    """Fitted values, their run, and the definition of the error. Written before predicting."""
    common: str = "{}"
    """The recipe common to all runs, as JSON."""
    packages: tuple[str, ...] = ()
    """Packages that planning requires."""
    seen: tuple[str, ...] = ()
    """Quantities of all predicted runs that were known when the planning code was fixed; the protocol explains."""
    mended: tuple[str, ...] = ()
    """Quantities of all predicted runs that were planned blind, and whose misses led to changes."""
    runs: tuple[RecordedRun, ...]

    def __post_init__(self) -> None:
        names = [run.id for run in self.runs]
        faults = [f"runs: id '{name}' appears twice" for name in repeated(names)]
        if sum(run.role is Role.CALIBRATE for run in self.runs) > 1:
            faults.append(
                "runs: more than one has the role 'calibrate'; at most one run of a source may be used for fitting"
            )
        known = {quantity for run in self.runs for quantity in run.recorded}
        faults += [
            f"{role}: {unknown_name('quantity', name, sorted(known))}"
            for role, names in (("seen", self.seen), ("mended", self.mended)) for name in names if name not in known
        ]  # fmt: skip
        if faults:
            raise ValueError("\n".join(faults))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedJob:
    """Planning job of a child."""

    source: str
    run: str
    engine: str
    card: str
    common: str
    config: str

    @property
    def key(self) -> str:
        """Digest of all values that affect the plan; the card by its figures, without names."""
        task = {"engine": self.engine, "common": self.common, "config": self.config}
        return key_of(task, values_of(card=find_card(self.card)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFigures:
    """Answer of a child: quantity to value, as in ``RecordedRun.recorded``."""

    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun(Record):
    """One run, planned."""

    source: str
    run: str
    figures: Mapping[str, float]
    packages: Mapping[str, str]
    """Versions of the source's packages used for planning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure: recorded, planned, and the error."""

    source: str
    id: str
    quantity: str
    role: Role
    recorded: float
    planned: float | None
    """The planned value; None: left out, not planned yet, or failed, as ``why`` states."""
    first: float | None
    """The value of the oldest plan on record, whatever the program and recipe were then."""
    why: str = ""

    @property
    def is_predicted(self) -> bool:
        """Whether it is a prediction: neither used for fitting nor left out."""
        return self.role in {Role.PREDICT, Role.MENDED, Role.SEEN}

    @property
    def first_error(self) -> float | None:
        """The error of the oldest plan on record."""
        return None if self.first is None else self.first / self.recorded - 1

    @property
    def error(self) -> float | None:
        """Planned over recorded, minus one; for ``oom`` 0 if both agree, else 1."""
        if self.planned is None:
            return None
        if self.quantity == "oom":
            return float(self.planned != self.recorded)
        return self.planned / self.recorded - 1

    @property
    def is_peak(self) -> bool:
        """Whether it is a peak of memory that was predicted: no outcome, count, time, or mean over steps."""
        is_other = self.quantity == "oom" or self.quantity.endswith(_NO_PEAKS)
        return self.is_predicted and bool(self.planned) and not is_other

    def as_mapping(self) -> dict[str, object]:
        """Return it as ``recorded --json`` prints it; ``why`` only if there is a reason."""
        return {name: value for name, value in (encode(self) | {"error": self.error}).items() if value != ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors of one quantity of one source over its predicted runs, blind or seen."""

    source: str
    quantity: str
    count: int
    mean_error: float
    """Signed."""
    mean_absolute: float
    worst: Row


def read_sources(scenarios: Path, only: str | None = None) -> dict[str, Source]:
    """Return sources by name, all or one.

    Raises:
        ConfigError: No such source, or a faulty file.
    """
    folder = scenarios / "recorded"
    names = sorted(path.stem for path in folder.glob("*.toml"))
    if only is not None and only not in names:
        raise ConfigError("recorded", [unknown_name("source", only, names)])
    return {name: load_toml(Source, folder / f"{name}.toml") for name in names if only in {None, name}}


def read_planned(records: Path) -> list[PlannedRun]:
    """Return all records, oldest first."""
    return read_lines(records / _FILE, PlannedRun)


def append_planned(records: Path, record: PlannedRun) -> Path:
    """Add a record and wait until it is on disk; return the file."""
    return append_record(records, _FILE, record)


def job_of(name: str, source: Source, run: RecordedRun) -> RecordedJob:
    """Return the planning job of a run."""
    return RecordedJob(
        source=name,
        run=run.id,
        engine=source.engine,
        card=run.card or source.card,
        common=source.common,
        config=run.config,
    )


def work(job: RecordedJob) -> PlannedFigures:
    """Plan one run, in the child process."""
    engine = import_module(f"hybridvalidation.engines.{job.engine}")
    return PlannedFigures(figures=engine.plan(json.loads(job.common), json.loads(job.config), job.card))


def start_plan(job: RecordedJob) -> Child[PlannedFigures]:
    """Plan one run in a child process."""
    return Child(f"{__name__}:work", job, PlannedFigures, limit_s=_LIMIT_S)


def plan_record(job: RecordedJob, ended: ChildResult[PlannedFigures], source: Source) -> PlannedRun:
    """Return the record of a finished plan."""
    return PlannedRun(
        key=job.key, evidence=Evidence.PLANNED, **child_header(ended), source=job.source, run=job.run,
        figures={} if ended.answer is None else ended.answer.figures, packages=versions_of(source.packages),
    )  # fmt: skip


def rows_of(sources: Mapping[str, Source], planned: Iterable[PlannedRun]) -> list[Row]:
    """Return a row for each recorded figure, with the newest plan of its run."""
    plans = list(planned)
    newest = {record.key: record for record in plans}
    made = [plan for plan in reversed(plans) if plan.outcome is Outcome.OK]
    oldest = {plan.key: plan.figures for plan in made} | {(plan.source, plan.run): plan.figures for plan in made}
    rows = []
    for name, source in sources.items():
        for run in source.runs:
            key = job_of(name, source, run).key  # runs with equal jobs share a plan
            first = oldest.get((name, run.id), oldest.get(key, {}))
            rows += [_row(name, source, run, quantity, newest.get(key), first) for quantity in run.recorded]
    return rows


def _row(
    name: str, source: Source, run: RecordedRun, quantity: str, record: PlannedRun | None, oldest: Mapping[str, float]
) -> Row:
    planned, why = None, ""
    if run.role is Role.LEFT_OUT or record is None:
        why = "not planned yet"
    elif record.outcome is not Outcome.OK:
        why = f"the plan failed: {record.message}"
    elif (planned := record.figures.get(quantity)) is None:
        why = "missing in the plan's figures"
    role = run.role
    if role is Role.PREDICT:
        role = Role.SEEN if quantity in source.seen else Role.MENDED if quantity in source.mended else role
    return Row(
        source=name, id=run.id, quantity=quantity, role=role,
        recorded=run.recorded[quantity], planned=planned, first=oldest.get(quantity), why=run.why or why,
    )  # fmt: skip


def scores(rows: Iterable[Row]) -> list[Score]:
    """Return the scores of all predictions."""
    groups: dict[tuple[str, str, Role], list[Row]] = {}
    for row in rows:
        if row.is_predicted and row.error is not None:
            groups.setdefault((row.source, row.quantity, row.role), []).append(row)
    return [_score(group) for group in groups.values()]


def _score(rows: Sequence[Row]) -> Score:
    errors = [row.error or 0.0 for row in rows]
    return Score(
        source=rows[0].source, quantity=rows[0].quantity, count=len(errors), mean_error=mean(errors),
        mean_absolute=mean(map(abs, errors)), worst=max(rows, key=lambda row: abs(row.error or 0.0)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakScore:
    """Absolute errors of one publication's peaks of memory."""

    name: str
    errors: tuple[float, ...]
    worst: Row
    null: float | None
    """Mean error if each peak were the geometric mean of the publication's others; None: there is one alone."""
    first: float | None
    """Mean error of the oldest plans on record; None: there is none."""

    @property
    def mean(self) -> float:
        """Mean of the errors."""
        return mean(self.errors)


def peak_scores(rows: Iterable[Row], role: Role = Role.PREDICT) -> list[PeakScore]:
    """Return the errors of peaks of one role by publication: files that share a name up to a dash are one."""
    peaks = [row for row in rows if row.is_peak and row.role is role]
    files = {row.source for row in peaks}
    found: dict[str, list[Row]] = {}
    for row in peaks:
        short = row.source.partition("-")[0]
        is_part = sum(each.partition("-")[0] == short for each in files) > 1
        found.setdefault(short if is_part else row.source, []).append(row)
    return [_peak_score(name, group) for name, group in sorted(found.items())]


def _peak_score(name: str, rows: Sequence[Row]) -> PeakScore:
    nulls = []
    for row in rows:
        others = [log(one.recorded) for one in rows if one is not row and one.quantity == row.quantity]
        nulls += [abs(exp(mean(others)) / row.recorded - 1)] if others else []
    first = [abs(row.first_error) for row in rows if row.first_error is not None]
    return PeakScore(
        name=name, errors=tuple(abs(row.error or 0.0) for row in rows),
        worst=max(rows, key=lambda row: abs(row.error or 0.0)), null=mean(nulls) if nulls else None,
        first=mean(first) if first else None,
    )  # fmt: skip


def score_table(rows: Sequence[Row], style: str) -> str:
    """Return errors by source and quantity."""
    table = [
        [
            score.source, score.quantity.replace("_", " "), str(score.count),
            "" if score.worst.role is Role.PREDICT else score.worst.role.value, f"{100 * score.mean_error:+.2f} %",
            f"{100 * score.mean_absolute:.2f} %", f"{100 * (score.worst.error or 0):+.2f} % ({score.worst.id})",
        ]
        for score in scores(rows)
    ]  # fmt: skip
    headers = ("source", "quantity", "predicted", "since", "mean error", "mean absolute", "worst")
    return tabulate(table, headers=headers, tablefmt=style, disable_numparse=True)


def recorded_command(
    *, scenarios: Path, results: Path, source: str | None, record: bool, jobs: int, say: Callable[[str], None]
) -> tuple[str, list[dict[str, object]]]:
    """Plan runs without a valid record; return a table of errors, and all rows as plain data.

    ``record``: append new records. ``jobs``: parallel processes. ``say`` is called with a line per run.

    Raises:
        ConfigError: No such source, or a faulty file.
    """
    sources, records = read_sources(scenarios, source), results / "records"
    cases = [
        job_of(name, found, run) for name, found in sources.items() for run in found.runs if run.role != Role.LEFT_OUT
    ]
    experiment = Experiment[RecordedJob, PlannedRun](
        name="recorded", key=lambda job: job.key, file=lambda _: _FILE,
        run=in_children(start_plan, lambda job, ended: plan_record(job, ended, sources[job.source]), jobs),
        line=lambda job, made: f"{job.source} {job.run}: {made.outcome} {made.message} in {made.duration_s:.0f} s",
        packages=lambda job: sources[job.source].packages,
    )  # fmt: skip
    known = read_planned(records)
    made = experiment.run_missing(cases, known, records=records if record else None, say=say)
    notes = [
        f"{name}: {count} runs are shown from their records: {missing_package(sources[name].packages)} is not "
        f"installed (pip install hybridtrain[peers])"
        for name, count in Counter(job.source for job in made.not_run).items()
    ]
    rows = rows_of(sources, [*known, *made.new])
    text = "\n".join([score_table(rows, TERMINAL), *notes, f"{len(made.new)} new plans"])
    return text, [row.as_mapping() for row in rows]
