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
    """Matmul rate in bfloat16, 8192 x 8192 x 8192, random values."""
    device_copy_gbps: float
    """Device-to-device copy rate, read plus written bytes."""
    in_gbps: float
    """Rate of pinned copies to the device, alone."""
    out_gbps: float
    both_in_gbps: float
    """Rates of pinned copies to the device while the other direction runs too."""
    both_out_gbps: float
    is_pinned: bool
    """Whether torch recognises the host tier's memory as pinned."""
    pin_gbps: float
    """Rate of pinning new host memory."""
    context_bytes: int
    """CUDA context after the first tensor."""
    context_with_libraries_bytes: int
    """CUDA context after the first matmuls."""
    forward_workspace_bytes: int
    """Workspace bytes of the first matmul, besides its result."""
    backward_workspace_bytes: int
    """Additional workspace bytes of the first matmul of the backward thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOverlap:
    """Overlap of bus copies with kernels in one profiled step."""

    window_s: float
    """From the first to the last event on the card."""
    kernel_s: float
    """Time with at least one kernel running."""
    copy_in_s: float
    """Time with copies from the host."""
    copy_out_s: float
    copy_s: float
    """Time with copies in either direction."""
    hidden_s: float
    """Part of the copies' time with a kernel running."""
    pageable_s: float
    """Time of copies from or to memory that was not pinned."""
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
    """Seconds of building the model with initial values on the device."""
    steps: tuple[MeasuredStep, ...] = ()
    outside_bytes: int = 0
    """Bytes of CUDA context and libraries, outside of the allocator."""
    host_bytes: int = 0
    disk_bytes: int = 0
    num_alloc_retries: int = 0
    overlap: CopyOverlap | None = None

    @property
    def peak_allocated_bytes(self) -> int:
        """Peak over all steps."""
        return max((step.peak_allocated_bytes for step in self.steps), default=0)

    @property
    def peak_reserved_bytes(self) -> int:
        """Peak over all steps."""
        return max((step.peak_reserved_bytes for step in self.steps), default=0)

    @property
    def device_used_bytes(self) -> int:
        """Peak bytes of the card used by this process."""
        return self.peak_reserved_bytes + self.outside_bytes

    @property
    def step_time_s(self) -> float | None:
        """Median step time without the first step, which allocates and warms up, unless it is the only one."""
        times = [step.seconds for step in self.steps]
        return median(times[1:] or times) if times else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model trained under a cap, with the dry run of these steps."""

    model: str
    num_params: int
    stack: str
    description: str
    plan: Mapping[str, str]
    cap_bytes: int
    """Cap of the card's memory, CUDA context included."""
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
        """Measured tokens per second, by the median step."""
        seconds = None if self.measured is None else self.measured.step_time_s
        return self.tokens_per_step / seconds if seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRecord(Record):
    """Record of one part."""

    part: str
    description: str
    evidence: Evidence = Evidence.MEASURED
    card: str
    """Name of the CUDA card."""
    others_bytes: int
    """Card memory of other programs at the start of the part."""
    ceilings: Ceilings | None = None
    training: Training | None = None


def read_evidence(records: Path) -> list[EvidenceRecord]:
    """Return all records, oldest first; raises ``RecordError`` for an invalid line."""
    return read_lines(records / EVIDENCE_FILE, EvidenceRecord)
