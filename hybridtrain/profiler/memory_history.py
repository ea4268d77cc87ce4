"""Statistics of a run's memory snapshots, as figures and as text: phases, peak, spikes, alerts with advice, cost.

Statistics, peak and counts are exact whatever the length of the run. Snapshots are thinned and events capped, so that
memory stays bounded: a snapshot is about half a KB, and ``max_snapshots`` of them are about 10 MB.
"""

import csv
import io
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields

from tabulate import tabulate

from hybridtrain.phase import Phase
from hybridtrain.profiler.memory_reader import CudaMemory, MemoryReading, MemorySource
from hybridtrain.units import GB, format_seconds

MAX_EVENTS = 100
_SHOWN_EVENTS = 5
_ALLOCATOR_COLUMNS = tuple(field.name for field in fields(CudaMemory))
_COLUMNS = (
    "step", "phase", "elapsed_s", "source", "used_bytes", "total_bytes", "used_mb", "used_gb", "utilization_percent",
    *_ALLOCATOR_COLUMNS, "allocator_free_bytes", "rss_bytes", "peak_rss_bytes",
)  # fmt: skip
_CARD_ADVICE = (
    "reduce the micro-batch: all activations scale with it",
    "raise the accumulation steps by the same factor: batch and result stay the same",
    "checkpoint: gradient_checkpointing with a small interval recomputes activations instead of keeping them",
    "offload: optimizer state first, then weights and block inputs; then the bus may limit the speed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """The memory after one step."""

    step: int
    phase: Phase
    elapsed_s: float
    """Seconds since the profiler's start."""
    memory: MemoryReading

    @property
    def used_gb(self) -> float:
        """Used memory in GB (10**9 bytes)."""
        return self.memory.used_bytes / GB

    @property
    def utilization_percent(self) -> float | None:
        """Used memory in percent of the total; None: the total is unknown."""
        return 100.0 * self.memory.used_bytes / self.memory.total_bytes if self.memory.total_bytes else None

    def as_row(self) -> dict[str, object]:
        """Return every known figure by its column in the CSV file."""
        memory, utilization = self.memory, self.utilization_percent
        row: dict[str, object] = {
            "step": self.step,
            "phase": self.phase.value,
            "elapsed_s": f"{self.elapsed_s:.6f}",
            "source": memory.source.value,
            "used_bytes": memory.used_bytes,
            "total_bytes": memory.total_bytes,
            "used_mb": f"{memory.used_bytes / 1e6:.3f}",
            "used_gb": f"{self.used_gb:.6f}",
            "utilization_percent": None if utilization is None else f"{utilization:.3f}",
            **asdict(memory.process),
        }
        if memory.allocator is not None:
            row |= asdict(memory.allocator) | {"allocator_free_bytes": memory.allocator.free_bytes}
        return row

    def as_metrics(self) -> dict[str, float]:
        """Return the known figures by metric name, in GB and percent."""
        memory, utilization = self.memory, self.utilization_percent
        sizes = {"used_bytes": memory.used_bytes, "rss_bytes": memory.process.rss_bytes}
        sizes |= {} if memory.allocator is None else asdict(memory.allocator)
        metrics = {f"memory/{name.removesuffix('_bytes')}_gb": size / GB for name, size in sizes.items()}
        return metrics if utilization is None else metrics | {"memory/utilization_percent": utilization}


def to_csv(snapshots: Iterable[MemorySnapshot]) -> str:
    """Return the snapshots as CSV, one row each under a header; unknown figures are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(snapshot.as_row() for snapshot in snapshots)
    return text.getvalue()


@dataclass(slots=True)
class PhaseStatistics:
    """Used bytes over the snapshots of one phase."""

    min_bytes: int
    count: int = 0
    sum_bytes: int = 0
    max_bytes: int = 0

    def add(self, used_bytes: int) -> None:
        """Count one snapshot."""
        self.min_bytes, self.max_bytes = min(self.min_bytes, used_bytes), max(self.max_bytes, used_bytes)
        self.sum_bytes += used_bytes
        self.count += 1


class MemoryHistory:
    """Statistics over snapshots.

    Args:
        alert_threshold_bytes: A snapshot above this threshold, after one below it, is an alert.
        spike_threshold: Rise over the previous snapshot, as a fraction of it, above which a snapshot is a spike.
        max_snapshots: Most snapshots to keep: then every second one is dropped, and the interval doubles.
    """

    def __init__(self, *, alert_threshold_bytes: int, spike_threshold: float, max_snapshots: int = 20_000) -> None:
        self.alert_threshold_bytes = alert_threshold_bytes
        self.spike_threshold = spike_threshold
        self.phases: dict[Phase, PhaseStatistics] = {}
        """Statistics by phase, in the order of first snapshots."""
        self.peak: MemorySnapshot | None = None
        """The first snapshot with the most used memory."""
        self.last: MemorySnapshot | None = None
        self.spikes: list[tuple[MemorySnapshot, MemorySnapshot]] = []
        """The first ``MAX_EVENTS``, each with the snapshot before."""
        self.alerts: list[MemorySnapshot] = []
        """The first ``MAX_EVENTS``."""
        self.num_snapshots = self.num_spikes = self.num_alerts = self.num_snapshots_in_alert = 0
        self._max_snapshots = max_snapshots
        self._kept: list[MemorySnapshot] = []
        self._stride = 1

    def add(self, snapshot: MemorySnapshot) -> bool:
        """Count a snapshot; return whether it is an alert."""
        used_bytes, before = snapshot.memory.used_bytes, self.last
        self.phases.setdefault(snapshot.phase, PhaseStatistics(used_bytes)).add(used_bytes)
        if self.peak is None or used_bytes > self.peak.memory.used_bytes:
            self.peak = snapshot
        if before is not None and self._is_spike(before.memory, snapshot.memory):
            self.num_spikes += 1
            if len(self.spikes) < MAX_EVENTS:
                self.spikes.append((before, snapshot))
        is_above = used_bytes > self.alert_threshold_bytes
        is_alert = is_above and (before is None or before.memory.used_bytes <= self.alert_threshold_bytes)
        self.num_snapshots_in_alert += is_above
        self.num_alerts += is_alert
        if is_alert and len(self.alerts) < MAX_EVENTS:
            self.alerts.append(snapshot)
        if self.num_snapshots % self._stride == 0:
            self._kept.append(snapshot)
        self.num_snapshots += 1
        self.last = snapshot
        if len(self._kept) >= self._max_snapshots:
            del self._kept[1::2]
            self._stride *= 2
        return is_alert

    def snapshots(self) -> list[MemorySnapshot]:
        """Return the kept snapshots in order; the peak and the last one are always among them."""
        kept = list(self._kept)
        for extra in (self.peak, self.last):
            if extra is not None:
                position = bisect_left(kept, extra.elapsed_s, key=lambda snapshot: snapshot.elapsed_s)
                if extra not in kept[position:]:
                    kept.insert(position, extra)
        return kept

    def _is_spike(self, before: MemoryReading, now: MemoryReading) -> bool:
        if now.source is not before.source or not before.used_bytes:
            return False  # another source counts other things
        return now.used_bytes > before.used_bytes * (1.0 + self.spike_threshold)


def memory_report(
    history: MemoryHistory, notes: Sequence[str], every_n_steps: int, num_steps: int, seconds: float, elapsed_s: float
) -> str:
    """Return the report of ``num_steps`` steps; ``notes`` are sentences on reading and logging faults.

    Profiling took ``seconds`` (loggers included) of the run's ``elapsed_s``.
    """
    peak, last = history.peak, history.last
    if peak is None or last is None:
        return "\n".join([f"memory profile: no snapshot in {num_steps} steps", *(f"  {note}" for note in notes)])
    every = "every step" if every_n_steps == 1 else f"every {every_n_steps} steps"
    seen = f"{history.num_snapshots} snapshots of {num_steps} steps ({every})"
    lines = [
        f"memory profile: {seen}, from {last.memory.source}",
        *(f"  {note}" for note in notes),
        f"  peak {_of_total(peak)} at step {peak.step}, phase {peak.phase}",
    ]
    if (allocator := peak.memory.allocator) is not None:
        lines.append(
            f"  torch allocator there: allocated {_gb(allocator.allocated_bytes)}, "
            f"reserved {_gb(allocator.reserved_bytes)}, free in it {_gb(allocator.free_bytes)}; "
            f"peak allocated {_gb(allocator.peak_allocated_bytes)}, reserved {_gb(allocator.peak_reserved_bytes)}"
        )
    lines.append(f"  process: peak resident memory {_gb(last.memory.process.peak_rss_bytes)} since it began")
    rows = []
    for phase, used in history.phases.items():
        sizes = (used.sum_bytes / used.count, used.min_bytes, used.max_bytes)
        rows.append([phase.value, used.count, *(f"{size / GB:.3f}" for size in sizes)])
    lines.append(tabulate(rows, ["phase", "snapshots", "mean GB", "min GB", "max GB"], disable_numparse=True))
    share = f", {100 * seconds / elapsed_s:.3g} % of the time profiled" if elapsed_s > 0 else ""
    spent = f"cost, measured: {format_seconds(seconds / history.num_snapshots)} per snapshot{share}"
    return "\n".join([*lines, *_spikes(history), *_alerts(history, last.memory), spent])


def alert_advice(source: MemorySource) -> tuple[str, ...]:
    """Return advice on reducing memory, the least costly first; for host memory without offloading."""
    return _CARD_ADVICE[:3] if source is MemorySource.PROCESS else _CARD_ADVICE


def _spikes(history: MemoryHistory) -> list[str]:
    lines = [
        f"  step {now.step}, phase {now.phase}: {_gb(before.memory.used_bytes)} to {_gb(now.memory.used_bytes)} "
        f"({100 * (now.memory.used_bytes / before.memory.used_bytes - 1.0):+.0f} %)"
        for before, now in history.spikes[:_SHOWN_EVENTS]
    ]
    title = f"spikes of more than {100 * history.spike_threshold:.3g} % above the snapshot before"
    return _listed(title, history.num_spikes, lines)


def _alerts(history: MemoryHistory, last: MemoryReading) -> list[str]:
    title, total = f"alerts, above {_gb(history.alert_threshold_bytes)}", last.total_bytes
    if last.source is not MemorySource.PROCESS and total is not None and history.alert_threshold_bytes >= total:
        return [f"{title}: never, the card has {_gb(total)}; set a lower threshold to be warned"]
    lines = [
        f"  from step {alert.step}, phase {alert.phase}: {_gb(alert.memory.used_bytes)}"
        for alert in history.alerts[:_SHOWN_EVENTS]
    ]
    lines = _listed(title, history.num_alerts, lines)
    if history.num_alerts:
        lines.append(
            f"  {history.num_snapshots_in_alert} of {history.num_snapshots} snapshots are above it; in this order:"
        )
        lines += [f"  {number}. {advice}" for number, advice in enumerate(alert_advice(last.source), start=1)]
    return lines


def _listed(title: str, count: int, lines: list[str]) -> list[str]:
    more = [f"  and {count - len(lines)} more"] if count > len(lines) else []
    return [f"{title}: {count or 'none'}", *lines, *more]


def _of_total(snapshot: MemorySnapshot) -> str:
    used, total, percent = _gb(snapshot.memory.used_bytes), snapshot.memory.total_bytes, snapshot.utilization_percent
    return used if percent is None or total is None else f"{used} of {_gb(total)} ({percent:.1f} %)"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:.3f} GB"
