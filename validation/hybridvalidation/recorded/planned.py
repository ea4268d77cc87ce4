"""The record of a planned run of others' trainer, and the rows that hold it against what they measured."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from hybridvalidation.recorded.job import RecordedJob
from hybridvalidation.recorded.source import RecordedRun, Role, Source
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import append_record, read_lines

_FILE = Path("recorded") / "planned.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun(Record):
    """One run, planned."""

    source: str
    run: str
    figures: Mapping[str, float]
    packages: Mapping[str, str]
    """Version of each package of the source, as planned with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure: recorded, planned, and how far apart."""

    source: str
    id: str
    quantity: str
    role: Role
    recorded: float
    planned: float | None
    """None: left out, not planned yet, or the plan failed; ``why`` says which."""
    why: str = ""

    @property
    def is_predicted(self) -> bool:
        """Whether it is neither fitted on nor left out."""
        return self.role in {Role.PREDICT, Role.SEEN}

    @property
    def error(self) -> float | None:
        """Planned over recorded, less one; of ``oom`` 0 where both agree and 1 where not."""
        if self.planned is None:
            return None
        if self.quantity == "oom":
            return float(self.planned != self.recorded)
        return self.planned / self.recorded - 1

    def as_mapping(self) -> dict[str, object]:
        """Return it as ``recorded --json`` prints it."""
        found: dict[str, object] = {
            "source": self.source, "id": self.id, "quantity": self.quantity, "role": self.role.value,
            "recorded": self.recorded, "planned": self.planned, "error": self.error,
        }  # fmt: skip
        return found | ({"why": self.why} if self.why else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors of one quantity of one source, over its predicted runs, blind ones or seen ones."""

    source: str
    quantity: str
    count: int
    mean_error: float
    """Signed."""
    mean_absolute: float
    worst: Row

    @staticmethod
    def of(rows: Sequence[Row]) -> "Score":
        """Return the score of predicted rows of one source and quantity."""
        errors = [row.error for row in rows if row.error is not None]
        worst = max(rows, key=lambda row: abs(row.error or 0.0))
        return Score(
            source=rows[0].source, quantity=rows[0].quantity, count=len(errors), mean_error=mean(errors),
            mean_absolute=mean(abs(error) for error in errors), worst=worst,
        )  # fmt: skip


def job_of(name: str, source: Source, run: RecordedRun) -> RecordedJob:
    """Return what is asked of a child."""
    return RecordedJob(
        source=name, run=run.id, engine=source.engine, card=source.card, common=source.common, config=run.config
    )


def rows_of(sources: Mapping[str, Source], planned: Iterable[PlannedRun]) -> list[Row]:
    """Return a row for each recorded figure, with the newest plan of its run."""
    newest = {(record.source, record.run): record for record in planned}
    rows = []
    for name, source in sources.items():
        for run in source.runs:
            record = newest.get((name, run.id))
            if record is not None and record.key != job_of(name, source, run).key:
                record = None
            for quantity, value in run.recorded.items():
                row = _row(name, run, quantity, value, record)
                is_seen = run.role is Role.PREDICT and quantity in source.seen
                rows.append(replace(row, role=Role.SEEN) if is_seen else row)
    return rows


def scores(rows: Iterable[Row]) -> list[Score]:
    """Return the scores of all that was predicted."""
    groups: dict[tuple[str, str, Role], list[Row]] = {}
    for row in rows:
        if row.is_predicted and row.error is not None:
            groups.setdefault((row.source, row.quantity, row.role), []).append(row)
    return [Score.of(group) for group in groups.values()]


def recipe_errors(rows: Iterable[Row]) -> list[float]:
    """Return the errors, relative, of planned steps of recipes that run on one card: what they differ by in speed."""
    errors = (row.error for row in rows if row.source == "peft" and row.quantity == "step_seconds" and row.is_predicted)
    return [error for error in errors if error is not None]


def read_planned(records: Path) -> list[PlannedRun]:
    """Return all records, oldest first."""
    return read_lines(records / _FILE, PlannedRun)


def append_planned(records: Path, record: PlannedRun) -> Path:
    """Add a record and wait until it is on disk; return the file."""
    return append_record(records, _FILE, record)


def _row(name: str, run: RecordedRun, quantity: str, value: float, record: PlannedRun | None) -> Row:
    planned, why = None, run.why
    if run.role is not Role.LEFT_OUT:
        if record is None:
            why = why or "not planned yet"
        elif record.outcome is not Outcome.OK:
            why = why or f"the plan failed: {record.message}"
        else:
            planned = record.figures.get(quantity)
            why = why or ("" if planned is not None else "not among the plan's figures")
    return Row(source=name, id=run.id, quantity=quantity, role=run.role, recorded=value, planned=planned, why=why)
