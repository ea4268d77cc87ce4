"""A dry run as plain figures, for records and reports: bytes are integers, times seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hybridtrain.planning.dry_runs import DryRun
from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.allocator.replay import OutOfMemory
from hybridtrain.virtual_gpu.cards.card import Card, FitVerdict, Host

_TIMELINE_POINTS = 240
_LARGEST_HOLDERS = 10


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
        """Return which memory is too small, and by how many bytes; empty where all are large enough."""
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


def figures_of_ranks(runs: Sequence[DryRun], *, with_timeline: bool = True) -> MemoryFigures:
    """Return the bytes of the first run, which holds the most, and the time of the one that takes longest."""
    figures = memory_figures(runs[0], with_timeline=with_timeline)
    if len(runs) == 1:
        return figures
    slowest = memory_figures(max(runs, key=lambda run: run.time.seconds), with_timeline=False)
    return replace(
        figures,
        fits=all(run.fits for run in runs),
        fits_host=all(run.fits_host for run in runs),
        host_peak_bytes=max(run.host_peak_bytes for run in runs),
        disk_peak_bytes=max(run.disk_peak_bytes for run in runs),
        step_time_s=slowest.step_time_s,
        busy_s=slowest.busy_s,
        flops=slowest.flops,
        time_by_bound=slowest.time_by_bound,
        tokens_per_s=slowest.tokens_per_s,
        bound=slowest.bound,
        ranks={str(run.world.rank): run.device_used_bytes for run in sorted(runs, key=lambda run: run.world.rank)},
    )


def memory_figures(run: DryRun, *, with_timeline: bool = True) -> MemoryFigures:
    """Return the figures of a dry run that a record keeps."""
    return MemoryFigures(
        num_params=run.num_params,
        fits=run.fits,
        steps=tuple(
            StepPeaks(
                step=step.step, allocated_bytes=step.allocated_bytes, active_bytes=step.active_bytes,
                reserved_bytes=step.reserved_bytes, by_class=_plain(step.by_class), stage=step.stage, unit=step.unit,
                phase=run.phase_of(step.step).value,
            )
            for step in run.steps
        ),
        peak_allocated_bytes=run.peak.allocated_bytes,
        peak_reserved_bytes=run.peak_reserved_bytes,
        device_used_bytes=run.device_used_bytes,
        host_peak_bytes=run.host_peak_bytes,
        host_by_class=_plain(run.host_by_class),
        disk_peak_bytes=run.disk_peak_bytes,
        fits_host=run.fits_host,
        by_class=_plain(run.by_class()),
        by_unit=unit_names(run.peak.by_unit),
        oom=None if run.oom is None else refused_request(run.oom),
        step_time_s=run.time.seconds,
        busy_s={lane.value: seconds for lane, seconds in run.time.busy_seconds.items()},
        flops=run.time.flops,
        time_by_bound={bound.value: seconds for bound, seconds in run.time.seconds_by_bound.items()},
        tokens_per_step=run.tokens_per_step,
        tokens_per_s=run.tokens_per_s,
        bound=run.bound,
        timeline=_timeline(run) if with_timeline else None,
    )  # fmt: skip


def unit_names(by_unit: Mapping[tuple[TensorClass, str], int]) -> dict[str, int]:
    """Return holders as ``class/unit``, largest first."""
    ranked = sorted(by_unit.items(), key=lambda item: (-item[1], item[0]))
    return {
        f"{tensor_class.value}/{unit}" if unit else tensor_class.value: size for (tensor_class, unit), size in ranked
    }


def _plain(by_class: Mapping[TensorClass, int]) -> dict[str, int]:
    return {tensor_class.value: size for tensor_class, size in by_class.items()}


def refused_request(oom: OutOfMemory) -> RefusedRequest:
    """Return an out-of-memory as plain figures, with its largest holders."""
    return RefusedRequest(
        step=oom.step, stage=oom.stage, unit=oom.unit, requested_bytes=oom.requested_bytes,
        allocated_bytes=oom.allocated_bytes, reserved_bytes=oom.reserved_bytes, capacity_bytes=oom.capacity_bytes,
        by_class=_plain(oom.by_class), by_unit=dict(list(unit_names(oom.by_unit).items())[:_LARGEST_HOLDERS]),
    )  # fmt: skip


def _timeline(run: DryRun) -> Timeline:
    """Return the highest moment of each of a few hundred equal slices of the last step."""
    moments: dict[int, tuple[float, dict[TensorClass, int]]] = {}
    width = run.time.seconds / _TIMELINE_POINTS
    for clock, by_class in run.moments():
        bucket = int(clock / width)
        if bucket not in moments or sum(by_class.values()) > sum(moments[bucket][1].values()):
            moments[bucket] = (clock, by_class)
    kept = [moments[bucket] for bucket in sorted(moments)]
    return Timeline(
        times_s=tuple(round(time, 6) for time, _ in kept),
        by_class={name.value: tuple(by_class[name] for _, by_class in kept) for name in TensorClass},
    )
