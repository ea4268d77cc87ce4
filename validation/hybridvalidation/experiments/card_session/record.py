"""The record of one part of the evidence from a CUDA card. Bytes are integers, times seconds."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hybridtrain.planning.figures import MemoryFigures
from hybridvalidation.experiments.measure import MeasuredStep
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import read_lines

EVIDENCE_FILE = "evidence.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Peak rates of the card, and its memory use at rest."""

    name: str
    driver: str
    """Version of the driver, empty where unknown."""
    memory_bytes: int
    compute_capability: str
    num_sms: int
    matmul_tflops: float
    """bfloat16, 8192 x 8192 x 8192, random values."""
    device_copy_gbps: float
    """Device to device, bytes read and written together."""
    in_gbps: float
    """Pinned host memory to the device, alone."""
    out_gbps: float
    both_in_gbps: float
    """The same while the other direction runs too."""
    both_out_gbps: float
    is_pinned: bool
    """Whether torch sees the memory of the host tier as pinned."""
    pin_gbps: float
    """Rate at which new host memory is locked."""
    context_bytes: int
    """CUDA context after the first tensor."""
    context_with_libraries_bytes: int
    """The same after the first matmuls."""
    forward_workspace_bytes: int
    """Workspace bytes that the first matmul keeps, beside its result."""
    backward_workspace_bytes: int
    """Additional workspace bytes of the first matmul of the backward thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOverlap:
    """One profiled step: overlap of bus copies with kernels."""

    window_s: float
    """From the first to the last thing the card did."""
    kernel_s: float
    """Time in which at least one kernel ran."""
    copy_in_s: float
    """Time in which data came from the host."""
    copy_out_s: float
    copy_s: float
    """Time in which either did."""
    hidden_s: float
    """Part of it in which a kernel ran too."""
    pageable_s: float
    """Of all copies: those from or to memory that was not pinned."""
    num_kernels: int
    num_copies: int

    @property
    def hidden_share(self) -> float | None:
        """Share of the copies' time that kernels hid; None without copies."""
        return self.hidden_s / self.copy_s if self.copy_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardMeasurements:
    """Measurements of the card."""

    build_s: float = 0.0
    """Model built, initial values drawn on the device."""
    steps: tuple[MeasuredStep, ...] = ()
    outside_bytes: int = 0
    """CUDA context and libraries, outside of the allocator."""
    host_bytes: int = 0
    disk_bytes: int = 0
    num_alloc_retries: int = 0
    overlap: CopyOverlap | None = None

    @property
    def peak_allocated_bytes(self) -> int:
        """Largest of any step."""
        return max((step.peak_allocated_bytes for step in self.steps), default=0)

    @property
    def peak_reserved_bytes(self) -> int:
        """Largest of any step."""
        return max((step.peak_reserved_bytes for step in self.steps), default=0)

    @property
    def device_used_bytes(self) -> int:
        """Peak bytes of the card used by this process."""
        return self.peak_reserved_bytes + self.outside_bytes

    @property
    def step_time_s(self) -> float | None:
        """Median of the steps after the first, which allocates and warms up; of the first where it is alone."""
        times = [step.seconds for step in self.steps]
        return median(times[1:] or times) if times else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model trained under a cap, beside the dry run of the same steps."""

    model: str
    num_params: int
    stack: str
    description: str
    plan: Mapping[str, str]
    cap_bytes: int
    """Of the card, CUDA context included."""
    micro_batch_size: int
    seq_len: int
    accum_steps: int
    predicted: MemoryFigures
    measured: CardMeasurements | None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.micro_batch_size * self.seq_len * self.accum_steps

    @property
    def tokens_per_s(self) -> float | None:
        """CardMeasurements, by the median step."""
        seconds = None if self.measured is None else self.measured.step_time_s
        return self.tokens_per_step / seconds if seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRecord(Record):
    """One part."""

    part: str
    description: str
    evidence: Evidence = Evidence.MEASURED
    card: str
    """Name of the CUDA card."""
    others_bytes: int
    """Memory of the card that other programs held when the part began."""
    ceilings: Ceilings | None = None
    training: Training | None = None


def read_evidence(records: Path) -> list[EvidenceRecord]:
    """Return all records, oldest first; raises ``RecordError`` for a line that is no record."""
    return read_lines(records / EVIDENCE_FILE, EvidenceRecord)
