"""One run of a scenario under one stack, planned, trained as a proxy or measured. Bytes are integers, times seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.cards.card import Card, FitVerdict, Host
from hybridvalidation.records.record import Record

RunKind = Literal["dry_run", "accuracy", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPeaks:
    """Peaks of one optimizer step."""

    step: int
    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    by_class: Mapping[str, int]
    stage: str
    unit: str
    phase: str = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRequest:
    """The request at which the card ran out of memory."""

    step: int
    stage: str
    unit: str
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    capacity_bytes: int
    by_class: Mapping[str, int]
    by_unit: Mapping[str, int]
    """The ten largest holders, as ``class/unit``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Allocated bytes through the last step, thinned to a few hundred moments."""

    times_s: tuple[float, ...]
    by_class: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        faults = [
            f"by_class.{name}: {len(sizes)} sizes must be as many as times_s has moments ({len(self.times_s)})"
            for name, sizes in self.by_class.items()
            if len(sizes) != len(self.times_s)
        ]
        if faults:
            raise ValueError("\n".join(faults))

    def sizes(self, name: str) -> tuple[int, ...]:
        """Return the bytes of a class at each moment; of one that is not told, none."""
        return self.by_class.get(name, (0,) * len(self.times_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """What a dry run found: bytes planned, times estimated."""

    num_params: int
    fits: bool
    steps: tuple[StepPeaks, ...]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int
    host_peak_bytes: int
    """Offloaded tensors and the batch on its way."""
    by_class: Mapping[str, int]
    by_unit: Mapping[str, int]
    """Holders of the peak's bytes, as ``class/unit``."""
    oom: RefusedRequest | None
    step_time_s: float
    time_by_bound: Mapping[str, float]
    tokens_per_step: int
    tokens_per_s: float
    bound: str
    timeline: Timeline | None
    host_by_class: Mapping[str, int] = field(default_factory=dict)
    disk_peak_bytes: int = 0
    fits_host: bool = True
    """Whether host memory and disk hold what is offloaded."""
    busy_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of work of each lane, hidden or not."""
    flops: int = 0
    """Of one step: matmuls and attention, recomputation included."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Bytes that each rank of several takes of its card, of those that were run; the other figures are of the one that
    holds the most, times of the slowest."""

    def verdict(self, card: Card) -> FitVerdict:
        """Return whether the plan fits, and leaves the card's margin free."""
        return card.verdict(self.device_used_bytes, fits=self.fits)

    def shortage(self, host: Host) -> str:
        """Return what does not hold the run, and by how much; empty where all do."""
        if self.oom is not None:
            oom = self.oom
            return (
                f"{format_bytes(oom.requested_bytes)} requested of the card, with {format_bytes(oom.allocated_bytes)} "
                f"of {format_bytes(oom.capacity_bytes)} allocated"
            )
        if self.fits_host:
            return ""
        tiers = (
            ("host memory", self.host_peak_bytes, host.tensor_bytes), ("disk", self.disk_peak_bytes, host.disk_bytes)
        )  # fmt: skip
        short = [
            f"{format_bytes(size)} of {name} needed, {format_bytes(there)} are there"
            for name, size, there in tiers
            if size > there
        ]
        return "; ".join(short) or "host memory or disk is too small"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedResult:
    """One training run of the proxy."""

    seed: int
    validation_loss: float
    """Nats per token."""
    validation_accuracy: float
    """Share of validation tokens whose most likely prediction is right, 0 to 1."""
    final_train_loss: float
    """Mean of the last tenth of the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyFigures:
    """What training the proxy found."""

    num_params: int
    """Of the proxy."""
    num_tokens: int
    """Seen in training, per seed."""
    num_validation_tokens: int
    corpus: str
    corpus_digest: str
    seeds: tuple[SeedResult, ...]
    accumulation_difference: float | None = None
    """Norm of the weights' difference from those of the large batch over their norm, for fp32 accumulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFigures:
    """What a CUDA card did under a hard cap of the scenario card's size."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int
    num_alloc_retries: int
    step_times_s: tuple[float, ...]
    """Every counted step."""
    tokens_per_s: float
    """Tokens of a step over the median step time."""
    cap_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRun(Record):
    """One run; figures only of its kind, and none where it did not end well."""

    kind: RunKind
    scenario: str
    stack: str
    asked: Mapping[str, str]
    """Model, card, link, host, workload and optimizer, resolved to values, by path."""
    plan: Mapping[str, str]
    memory: MemoryFigures | None = None
    accuracy: AccuracyFigures | None = None
    measured: MeasuredFigures | None = None
