"""Record of the memory profiler's cost, as ``benchmarks/profiler_overhead.py`` timed it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import append_record, read_lines

_FILE = "profiler.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledCase:
    """One model, interleaved steps with the profiler and without it; medians of wall time."""

    model: str
    num_params: int
    batch_size: int
    seq_len: int
    every_n_steps: int
    rounds: int
    """Pairs of steps."""
    step_s: float
    """Of a step without the profiler."""
    snapshot_s: float
    """Of ``record_step`` where it takes a snapshot, right after a step."""
    ratio: float
    """Steps with the profiler over those without it."""
    noise: float
    """That ratio between the steps without it, odd rounds to even rounds."""

    @property
    def overhead_pct(self) -> float:
        """Share of a step's time that snapshots take."""
        return 100 * self.snapshot_s / self.every_n_steps / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerRecord(Record):
    """One run of the benchmark."""

    device: str
    num_threads: int
    cases: tuple[ProfiledCase, ...]
    evidence: Evidence = Evidence.EXECUTED

    def faults(self) -> list[str]:
        """Return inconsistencies of the content."""
        return [] if self.cases else ["cases: empty; a run has at least one"]

    @property
    def judged(self) -> ProfiledCase:
        """The largest model at its shortest interval: the most realistic case."""
        return max(self.cases, key=lambda case: (case.num_params, -case.every_n_steps))


def append_profiled(records: Path, record: ProfilerRecord) -> Path:
    """Add a run to the folder's ``profiler.jsonl``."""
    return append_record(records, _FILE, record)


def read_profiled(records: Path) -> Sequence[ProfilerRecord]:
    """Return all runs, oldest first; raises ``RecordError`` for a line that is no record."""
    return read_lines(records / _FILE, ProfilerRecord)
