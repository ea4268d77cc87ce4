"""Record of the memory profiler's cost, timed by ``benchmarks/profiler_overhead.py``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import append_record, read_lines

_FILE = "profiler.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledCase:
    """One model; medians of wall time over interleaved steps with and without the profiler."""

    model: str
    num_params: int
    batch_size: int
    seq_len: int
    every_n_steps: int
    rounds: int
    """Number of pairs of steps."""
    step_s: float
    """Seconds of a step without the profiler."""
    snapshot_s: float
    """Seconds of a ``record_step`` with a snapshot, right after a step."""
    ratio: float
    """Time of steps with the profiler over those without it."""
    noise: float
    """Noise: the ratio of odd to even rounds without the profiler."""

    @property
    def overhead_pct(self) -> float:
        """Snapshots' share of a step's time, in percent."""
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
        """The most realistic case: the largest model at its shortest interval."""
        return max(self.cases, key=lambda case: (case.num_params, -case.every_n_steps))


def append_profiled(records: Path, record: ProfilerRecord) -> Path:
    """Add a run to the folder's ``profiler.jsonl``."""
    return append_record(records, _FILE, record)


def read_profiled(records: Path) -> Sequence[ProfilerRecord]:
    """Return all runs, oldest first; raises ``RecordError`` for an invalid line."""
    return read_lines(records / _FILE, ProfilerRecord)
