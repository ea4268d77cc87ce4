"""The record of a run of others' trainer, and the rows that records become."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridvalidation.peers.scenario import PeerRun, PeerScenario, jobs_of
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import append_record, read_lines
from hybridvalidation.scenario_files import ScenarioFiles

KINDS = (Evidence.PLANNED, Evidence.MEASURED, Evidence.EXECUTED)
"""A file of records for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigures:
    """What a run found. Bytes and times of an executed run are those of no card, and not told."""

    num_params: int = 0
    """Elements of parameters as they are stored: with adapters, a tied weight once, two 4-bit weights as one byte."""
    peak_allocated_bytes: int = 0
    """Of a run that does not fit: what it would take of a larger card. As the next two."""
    peak_reserved_bytes: int = 0
    host_peak_bytes: int = 0
    fits: bool = False
    shortage: str = ""
    """What was too small, and where in the step that was noticed."""
    step_time_s: float = 0.0
    bound: str = ""
    """What the time of a planned step is spent on."""
    losses: tuple[float, ...] = ()
    """Of each step that was computed."""
    without_gradient: int = 0
    """Trainable parameters that got no gradient: a part of the model did not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord(Record):
    """One run."""

    scenario: str
    run: str
    figures: PeerFigures | None
    packages: Mapping[str, str]
    """Version of each package that it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A recipe and its newest records."""

    run: PeerRun
    tokens_per_step: int
    records: Mapping[Evidence, PeerRecord]

    def figures(self, evidence: Evidence) -> PeerFigures | None:
        """Return what a kind of run found, None where it was not made or failed."""
        record = self.records.get(evidence)
        return None if record is None or record.outcome is not Outcome.OK else record.figures

    def why(self, evidence: Evidence) -> str:
        """Return why there are no figures."""
        record = self.records.get(evidence)
        if self.run.left_out:
            return self.run.left_out
        if record is None:
            return f"not {evidence.value} yet"
        return "" if record.outcome is Outcome.OK else f"{evidence.value}: {record.message}"


def read_peer_records(records: Path) -> list[PeerRecord]:
    """Return all records, of each kind oldest first."""
    return [record for kind in KINDS for record in read_lines(records / _file(kind), PeerRecord)]


def append_peer_record(records: Path, record: PeerRecord) -> Path:
    """Add a record and wait until it is on disk; return the file."""
    return append_record(records, _file(record.evidence), record)


def rows_of(scenario: PeerScenario, files: ScenarioFiles, records: Iterable[PeerRecord]) -> list[Row]:
    """Return a row for each recipe; records of another recipe do not count."""
    newest = {(record.evidence, record.run, record.key): record for record in records}
    found: dict[str, dict[Evidence, PeerRecord]] = {}
    for run, job in jobs_of(scenario, files, KINDS):
        record = newest.get((job.evidence, run.id, job.key))
        if record is not None:
            found.setdefault(run.id, {})[job.evidence] = record
    return [
        Row(run=run, tokens_per_step=scenario.tokens_per_step, records=found.get(run.id, {})) for run in scenario.runs
    ]


def _file(kind: Evidence) -> Path:
    return Path("peers") / f"{kind.value}.jsonl"
