"""What a run's snapshots add up to, as figures and as text: phases, the peak, spikes, alerts with advice, the cost.

Statistics, peak and counts are exact whatever the length of the run. Snapshots are thinned and events capped, so that
memory stays bounded: a snapshot is about half a KB, and ``max_snapshots`` of them are about 10 MB.
"""

import csv
import io
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from tabulate import tabulate

from hybridtrain.phase import Phase
from hybridtrain.profiler.memory_reader import CudaMemory, MemorySource
from hybridtrain.units import GB, format_seconds

_MB_PER_GB = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """The memory after one step, in bytes."""

    step: int
    phase: Phase
    elapsed_s: float
    """Seconds since the profiler's start."""
    source: MemorySource
    """Where ``used_bytes`` comes from."""
    used_bytes: int
    total_bytes: int | None
    """None: unknown."""
    allocator: CudaMemory | None
    """None without CUDA."""
    rss_bytes: int | None
    """Resident memory of the process; None where the system does not tell."""
    peak_rss_bytes: int | None
    """Its largest since the process began."""

    @property
    def used_mb(self) -> float:
        """Used memory in MB (10**6 bytes)."""
        return self.used_gb * _MB_PER_GB

    @property
    def used_gb(self) -> float:
        """Used memory in GB (10**9 bytes)."""
        return self.used_bytes / GB

    @property
    def utilization_percent(self) -> float | None:
        """Used memory in percent of the total; None: the total is unknown."""
        return 100.0 * self.used_bytes / self.total_bytes if self.total_bytes else None

    def as_row(self) -> dict[str, object]:
        """Return every figure by its column in the CSV file; what is unknown is None."""
        utilization = self.utilization_percent
        return {
            "step": self.step,
            "phase": self.phase.value,
            "elapsed_s": f"{self.elapsed_s:.6f}",
            "source": self.source.value,
            "used_bytes": self.used_bytes,
            "total_bytes": self.total_bytes,
            "used_mb": f"{self.used_mb:.3f}",
            "used_gb": f"{self.used_gb:.6f}",
            "utilization_percent": None if utilization is None else f"{utilization:.3f}",
            **self._allocator_bytes(),
            "allocator_free_bytes": None if self.allocator is None else self.allocator.free_bytes,
            "rss_bytes": self.rss_bytes,
            "peak_rss_bytes": self.peak_rss_bytes,
        }

    def as_metrics(self) -> dict[str, float]:
        """Return what is known by its metric's name: GB and percent."""
        sizes = {"used_bytes": self.used_bytes, **self._allocator_bytes(), "rss_bytes": self.rss_bytes}
        metrics = {
            f"memory/{name.removesuffix('_bytes')}_gb": size / GB for name, size in sizes.items() if size is not None
        }
        utilization = self.utilization_percent
        if utilization is not None:
            metrics["memory/utilization_percent"] = utilization
        return metrics

    def _allocator_bytes(self) -> dict[str, int | None]:
        allocator = self.allocator
        return {name: None if allocator is None else getattr(allocator, name) for name in _ALLOCATOR_FIELDS}


_ALLOCATOR_FIELDS = tuple(field.name for field in fields(CudaMemory))


def to_csv(snapshots: Iterable[MemorySnapshot]) -> str:
    """Return the snapshots as CSV, one row each under a header; unknown figures are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(snapshot.as_row() for snapshot in snapshots)
    return text.getvalue()


_COLUMNS = tuple(
    MemorySnapshot(
        step=0, phase=Phase.FULL, elapsed_s=0.0, source=MemorySource.PROCESS, used_bytes=0, total_bytes=None,
        allocator=None, rss_bytes=None, peak_rss_bytes=None,
    ).as_row()
)  # fmt: skip


MAX_EVENTS = 100


@dataclass(slots=True)
class PhaseStatistics:
    """Used bytes over the snapshots of one phase."""

    count: int = 0
    sum_bytes: int = 0
    min_bytes: int = 0
    max_bytes: int = 0

    @property
    def mean_bytes(self) -> float:
        """Mean over the snapshots."""
        return self.sum_bytes / self.count

    def add(self, used_bytes: int) -> None:
        """Count one snapshot."""
        self.min_bytes = min(self.min_bytes, used_bytes) if self.count else used_bytes
        self.max_bytes = max(self.max_bytes, used_bytes)
        self.sum_bytes += used_bytes
        self.count += 1


@dataclass(frozen=True, slots=True)
class Spike:
    """A snapshot far above the one before it."""

    step: int
    phase: Phase
    previous_bytes: int
    used_bytes: int

    @property
    def rise_fraction(self) -> float:
        """Rise as a fraction of the snapshot before."""
        return self.used_bytes / self.previous_bytes - 1.0


@dataclass(frozen=True, slots=True)
class Alert:
    """A snapshot above the alert threshold that follows one below it."""

    step: int
    phase: Phase
    used_bytes: int


class MemoryHistory:
    """Adds up snapshots.

    Args:
        alert_threshold_bytes: Use above this is an alert.
        spike_threshold: Rise over the previous snapshot, as a fraction of it, above which a snapshot is a spike.
        max_snapshots: When as many are kept, every second one is dropped, and from then on half as many are kept.
    """

    def __init__(self, *, alert_threshold_bytes: int, spike_threshold: float, max_snapshots: int = 20_000) -> None:
        self.alert_threshold_bytes = alert_threshold_bytes
        self.spike_threshold = spike_threshold
        self.phases: dict[Phase, PhaseStatistics] = {}
        """In the order of their first snapshot."""
        self.peak: MemorySnapshot | None = None
        """The first snapshot with the most used memory."""
        self.last: MemorySnapshot | None = None
        self.spikes: list[Spike] = []
        """The first ``MAX_EVENTS``."""
        self.alerts: list[Alert] = []
        """The first ``MAX_EVENTS``."""
        self.num_snapshots = self.num_spikes = self.num_alerts = self.num_snapshots_in_alert = 0
        self._max_snapshots = max_snapshots
        self._kept: list[MemorySnapshot] = []
        self._stride = 1

    def add(self, snapshot: MemorySnapshot) -> Alert | None:
        """Count a snapshot; return an alert if the use rose above the threshold with it."""
        self.phases.setdefault(snapshot.phase, PhaseStatistics()).add(snapshot.used_bytes)
        if self.peak is None or snapshot.used_bytes > self.peak.used_bytes:
            self.peak = snapshot
        self._find_spike(snapshot)
        alert = self._find_alert(snapshot)
        if self.num_snapshots % self._stride == 0:
            self._kept.append(snapshot)
        self.num_snapshots += 1
        self.last = snapshot
        if len(self._kept) >= self._max_snapshots:
            del self._kept[1::2]
            self._stride *= 2
        return alert

    def snapshots(self) -> list[MemorySnapshot]:
        """Return the kept snapshots in order; the peak and the last one are always among them."""
        kept = list(self._kept)
        for extra in (self.peak, self.last):
            if extra is None:
                continue
            position = bisect_left(kept, extra.elapsed_s, key=lambda snapshot: snapshot.elapsed_s)
            if extra not in kept[position:]:
                kept.insert(position, extra)
        return kept

    def _find_spike(self, snapshot: MemorySnapshot) -> None:
        before = self.last
        if before is None or snapshot.source is not before.source or not before.used_bytes:
            return  # another source counts other things
        if snapshot.used_bytes > before.used_bytes * (1.0 + self.spike_threshold):
            self.num_spikes += 1
            if len(self.spikes) < MAX_EVENTS:
                self.spikes.append(Spike(snapshot.step, snapshot.phase, before.used_bytes, snapshot.used_bytes))

    def _find_alert(self, snapshot: MemorySnapshot) -> Alert | None:
        if snapshot.used_bytes <= self.alert_threshold_bytes:
            return None
        self.num_snapshots_in_alert += 1
        if self.last is not None and self.last.used_bytes > self.alert_threshold_bytes:
            return None
        alert = Alert(snapshot.step, snapshot.phase, snapshot.used_bytes)
        self.num_alerts += 1
        if len(self.alerts) < MAX_EVENTS:
            self.alerts.append(alert)
        return alert


_SHOWN_EVENTS = 5
_CARD_ADVICE = (
    "make the micro-batch smaller: it scales every activation",
    "raise the accumulation steps by as much: the batch and the result stay the same",
    "checkpoint: gradient_checkpointing with a small interval recomputes activations instead of keeping them",
    "offload: optimizer state first, then weights and block inputs; then the bus may limit the speed",
)
_HOST_ADVICE = _CARD_ADVICE[:3]  # offloading moves more to the host


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingCost:
    """What profiling took of a run, in seconds."""

    every_n_steps: int
    num_steps: int
    """Steps the profiler was told of."""
    seconds: float
    """Inside the profiler, loggers included."""
    elapsed_s: float
    """From its start to its end."""


def memory_report(history: MemoryHistory, cost: ProfilingCost, notes: Sequence[str]) -> str:
    """Return the report; ``notes`` are sentences about what could not be read or logged."""
    peak, last = history.peak, history.last
    if peak is None or last is None:
        return "\n".join([f"memory profile: no snapshot in {cost.num_steps} steps", *(f"  {note}" for note in notes)])
    every = "every step" if cost.every_n_steps == 1 else f"every {cost.every_n_steps} steps"
    lines = [
        f"memory profile: {history.num_snapshots} snapshots of {cost.num_steps} steps ({every}), from {last.source}",
        *(f"  {note}" for note in notes),
        f"  peak {_of_total(peak)} at step {peak.step}, phase {peak.phase}",
    ]
    if peak.allocator is not None:
        allocator = peak.allocator
        lines.append(
            f"  torch allocator there: allocated {_gb(allocator.allocated_bytes)}, "
            f"reserved {_gb(allocator.reserved_bytes)}, free in it {_gb(allocator.free_bytes)}; "
            f"peak allocated {_gb(allocator.peak_allocated_bytes)}, reserved {_gb(allocator.peak_reserved_bytes)}"
        )
    if last.peak_rss_bytes is not None:
        lines.append(f"  process: peak resident memory {_gb(last.peak_rss_bytes)} since it began")
    return "\n".join([*lines, _phases(history), *_spikes(history), *_alerts(history, last), _cost(history, cost)])


def alert_advice(source: MemorySource) -> tuple[str, ...]:
    """Return what to do against too much memory, gentlest first."""
    return _HOST_ADVICE if source is MemorySource.PROCESS else _CARD_ADVICE


def _phases(history: MemoryHistory) -> str:
    rows = [
        [
            phase.value,
            found.count,
            *(f"{size / GB:.3f}" for size in (found.mean_bytes, found.min_bytes, found.max_bytes)),
        ]
        for phase, found in history.phases.items()
    ]
    return tabulate(rows, headers=["phase", "snapshots", "mean GB", "min GB", "max GB"], disable_numparse=True)


def _spikes(history: MemoryHistory) -> list[str]:
    what = f"spikes, more than {100 * history.spike_threshold:.3g} % above the snapshot before"
    lines = [
        f"  step {spike.step}, phase {spike.phase}: {_gb(spike.previous_bytes)} to {_gb(spike.used_bytes)} "
        f"({100 * spike.rise_fraction:+.0f} %)"
        for spike in history.spikes[:_SHOWN_EVENTS]
    ]
    return _listed(what, history.num_spikes, lines)


def _alerts(history: MemoryHistory, last: MemorySnapshot) -> list[str]:
    what = f"alerts, above {_gb(history.alert_threshold_bytes)}"
    total = last.total_bytes
    if last.source is not MemorySource.PROCESS and total is not None and history.alert_threshold_bytes >= total:
        return [f"{what}: never, the card has {_gb(total)}; set a lower threshold to be warned"]
    lines = [
        f"  from step {alert.step}, phase {alert.phase}: {_gb(alert.used_bytes)}"
        for alert in history.alerts[:_SHOWN_EVENTS]
    ]
    found = _listed(what, history.num_alerts, lines)
    if history.num_alerts:
        found.append(
            f"  {history.num_snapshots_in_alert} of {history.num_snapshots} snapshots are above it; in this order:"
        )
        found += [f"  {number}. {advice}" for number, advice in enumerate(alert_advice(last.source), start=1)]
    return found


def _listed(what: str, count: int, lines: list[str]) -> list[str]:
    more = [f"  and {count - len(lines)} more"] if count > len(lines) else []
    return [f"{what}: {count or 'none'}", *lines, *more]


def _cost(history: MemoryHistory, cost: ProfilingCost) -> str:
    share = f", {100 * cost.seconds / cost.elapsed_s:.3g} % of the time profiled" if cost.elapsed_s > 0 else ""
    return f"cost, measured: {format_seconds(cost.seconds / history.num_snapshots)} per snapshot{share}"


def _of_total(snapshot: MemorySnapshot) -> str:
    if snapshot.utilization_percent is None or snapshot.total_bytes is None:
        return _gb(snapshot.used_bytes)
    return f"{_gb(snapshot.used_bytes)} of {_gb(snapshot.total_bytes)} ({snapshot.utilization_percent:.1f} %)"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:.3f} GB"
