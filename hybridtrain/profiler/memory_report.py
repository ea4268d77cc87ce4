"""A memory profile as text: peak, phases, spikes, alerts with advice, and what the profiling cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from hybridtrain.profiler.memory_history import MemoryHistory
from hybridtrain.profiler.memory_reader import MemorySource
from hybridtrain.profiler.memory_snapshot import MemorySnapshot
from hybridtrain.units import GB, format_seconds

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
