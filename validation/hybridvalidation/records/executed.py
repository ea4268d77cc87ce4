"""The record of an executed run: what the card would have held, counted while the arithmetic was real."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridtrain.config.encode import digest
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.phase import Phase
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import append_record, read_lines

_FILE = "executed.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedJob:
    """What is asked for; the newest of equal ones stands for all."""

    model: str
    shape: ModelConfig
    stack: str
    plan: Mapping[str, str]
    micro_batch_size: int
    seq_len: int
    phases: tuple[str, ...]
    """Of each step."""
    lr: float
    seed: int

    @property
    def key(self) -> str:
        """Digest of all of it."""
        return digest(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedStep:
    """One optimizer step."""

    step: int
    """True steps done."""
    loss: float | None
    """Nats per token, mean over the micro-batches, before the step's update; None in PREDICT."""
    grad_norm: float | None
    """Global L2 norm before clipping."""
    seconds: float
    device_peak_bytes: int
    """Most bytes at once that a card would have held."""
    planned_device_peak_bytes: int
    phase: str = Phase.FULL.value
    predicted_steps: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPeaks:
    """Most bytes at once, the building of the model included."""

    device_bytes: int
    host_bytes: int
    """Offloaded tensors."""
    disk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedRank:
    """What one process did; fields are those of the run."""

    rank: int
    build_s: float
    steps: tuple[ExecutedStep, ...]
    executed: TierPeaks
    planned: TierPeaks
    process_peak_bytes: int
    num_events: int
    difference: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedRun(Record):
    """One run on the CPU, and the dry run of the same steps."""

    model: str
    shape: ModelConfig
    num_params: int
    stack: str
    plan: Mapping[str, str]
    micro_batch_size: int
    seq_len: int
    accum_steps: int
    lr: float
    """Constant, no warm-up."""
    seed: int
    corpus: str
    corpus_digest: str
    evidence: Evidence = Evidence.EXECUTED
    build_s: float
    """Of the run's duration: drawing the initial weights."""
    num_threads: int
    steps: tuple[ExecutedStep, ...]
    executed: TierPeaks
    planned: TierPeaks
    process_peak_bytes: int
    """Largest resident set of the whole process: tensors of every tier but the disk, Python, torch."""
    num_events: int
    """Allocations and releases of the execution."""
    difference: str
    """First place in which the dry run differs from the execution; empty: nowhere."""
    ranks: tuple[ExecutedRank, ...] = ()
    """Of several ranks each; peaks and steps above are then of the one that held the most, events of all."""

    def faults(self) -> list[str]:
        """Return what cannot be."""
        return [] if self.steps else ["steps: empty; a run has at least one"]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.micro_batch_size * self.seq_len * self.accum_steps

    @property
    def is_equal(self) -> bool:
        """Whether the dry run counted what the execution held, event by event."""
        return not self.difference


def append_executed(records: Path, run: ExecutedRun) -> Path:
    """Add a run to the folder's ``executed.jsonl``; raises ``RecordError`` when its last line was cut short."""
    return append_record(records, _FILE, run)


def read_executed(records: Path) -> list[ExecutedRun]:
    """Return all runs, oldest first; raises ``RecordError`` for a line that is no record."""
    return read_lines(records / _FILE, ExecutedRun)
