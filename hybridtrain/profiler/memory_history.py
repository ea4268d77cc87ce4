"""What a run's snapshots add up to: statistics per phase, the peak, spikes, alerts, and the snapshots themselves.

Statistics, peak and counts are exact whatever the length of the run. Snapshots are thinned and events capped, so that
memory stays bounded: a snapshot is about half a KB, and ``max_snapshots`` of them are about 10 MB.
"""

from bisect import bisect_left
from dataclasses import dataclass

from hybridtrain.phase import Phase
from hybridtrain.profiler.memory_snapshot import MemorySnapshot

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
