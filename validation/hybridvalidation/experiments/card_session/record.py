"""The record of one part of the evidence from a CUDA card. Bytes are integers, times seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from hybridtrain.planning.figures import MemoryFigures
from hybridvalidation.experiments.measure import MeasuredStep
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import read_lines

EVIDENCE_FILE = "evidence.jsonl"
CURVES_FILE = "curves.jsonl"
"""Records of the part with the times of kernels; of the same shape."""
RECORDED_STEPS = 2
"""First steps of a script, in which the allocator's events are recorded; later ones are timed."""


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
class KernelTime:
    """Time of one call of an op at one shape."""

    kind: str
    """Class of kernel: ``gemm``, ``attention``, ``normalization``, ..."""
    op: str
    shape: tuple[int, ...]
    dtype: str
    seconds: float
    """Median of the samples."""
    spread: float
    """Largest sample over the smallest one."""
    flops: int = 0
    """Least arithmetic (arithmetic, not counted)."""
    num_bytes: int = 0
    """Least traffic: operands read once, results written once."""
    extra_bytes: int = 0
    """Peak of allocated memory above what was held before the call."""
    fault: str = ""
    """Why the op did not run; empty: it ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedScript:
    """Plan of a script on the virtual card, as ``hybridtrain virtual`` answers."""

    fits: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int
    step_time_s: float | None
    """Estimated; None where it does not fit."""
    caveats: tuple[str, ...] = ()
    """What the plan does not count, or counts otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredScript:
    """A script on the card."""

    seconds: float
    """Of the whole script, without its imports."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    outside_bytes: int
    """Bytes of CUDA context and libraries, outside of the allocator."""
    num_alloc_retries: int
    step_seconds: tuple[float, ...]
    """From the end of each optimizer step to that of the next."""

    @property
    def device_used_bytes(self) -> int:
        """Peak bytes of the card used by the script."""
        return self.peak_reserved_bytes + self.outside_bytes

    @property
    def step_time_s(self) -> float | None:
        """Median step whose allocations were not recorded; None without one."""
        later = self.step_seconds[RECORDED_STEPS - 1 :]
        return median(later) if later else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """A script, planned and on the card."""

    planned: PlannedScript | None
    measured: MeasuredScript | None
    plan_fault: str = ""
    """Why there is no plan."""
    ratios: Mapping[str, float] = field(default_factory=dict)
    """Planned over measured figures, by the names of their fields."""


def script_run(planned: PlannedScript | None, measured: MeasuredScript | None, plan_fault: str) -> ScriptRun:
    """Return a script's figures with their ratios, as far as both are known."""
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "step_time_s")
    pairs = {name: (getattr(planned, name, None), getattr(measured, name, None)) for name in names}
    ratios = {name: round(plan / found, 5) for name, (plan, found) in pairs.items() if plan and found}
    return ScriptRun(planned=planned, measured=measured, plan_fault=plan_fault, ratios=ratios)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRecord(Record):
    """Record of one part."""

    part: str
    description: str
    evidence: Evidence = Evidence.MEASURED
    card: str
    """Name of the CUDA card."""
    driver: str
    """Version of the card's driver; empty if unknown."""
    versions: Mapping[str, str]
    """Installed libraries that a part may use."""
    others_bytes: int
    """Card memory of other programs at the start of the part."""
    ceilings: Ceilings | None = None
    curves: tuple[KernelTime, ...] = ()
    script: ScriptRun | None = None
    training: Training | None = None


def read_evidence(records: Path) -> list[EvidenceRecord]:
    """Return all records, oldest first by file; raises ``RecordError`` for an invalid line."""
    return [record for file in (EVIDENCE_FILE, CURVES_FILE) for record in read_lines(records / file, EvidenceRecord)]
