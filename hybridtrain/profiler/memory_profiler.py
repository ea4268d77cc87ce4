"""The memory profiler: a snapshot every n steps, for a report, a CSV file and metric loggers.

A snapshot costs a call to torch's allocator, one to NVML and a read in /proc; other steps cost a comparison.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from hybridtrain.atomic_write import replace_file
from hybridtrain.phase import Phase
from hybridtrain.profiler.memory_history import (
    MemoryHistory,
    MemorySnapshot,
    alert_advice,
    memory_report,
    to_csv,
)
from hybridtrain.profiler.memory_reader import MemoryReader, SystemReader
from hybridtrain.profiler.metric_loggers import MetricLogger, MetricLoggers
from hybridtrain.units import GB

DEFAULT_ALERT_BYTES = 45 * GB
"""Default for cards of 48 GB."""
DEFAULT_SPIKE_FRACTION = 0.1
_MAX_NOTES = 10


class MemoryProfiler:
    """Takes a memory snapshot every n steps. Faults in reading or logging do not end the run.

    Args:
        every_n_steps: Interval of snapshots: at its multiples, and at the first step.
        alert_threshold_bytes: Used memory that triggers an alert.
        spike_threshold: Rise over the previous snapshot, as a fraction of it, above which a snapshot is a spike.
        sinks: Loggers of the snapshots' metrics; the caller closes them.
        reader: Reads the memory; None: the card and this process, opened at the start.
        on_alert: Called at once with the first alert and the advice.
        clock: Returns seconds, monotonic.

    Raises:
        ValueError: an interval or a threshold is out of range.
    """

    def __init__(
        self,
        *,
        every_n_steps: int = 1,
        alert_threshold_bytes: int = DEFAULT_ALERT_BYTES,
        spike_threshold: float = DEFAULT_SPIKE_FRACTION,
        sinks: Sequence[MetricLogger] = (),
        reader: MemoryReader | None = None,
        on_alert: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        faults = [] if every_n_steps >= 1 else [f"every_n_steps: {every_n_steps} must be at least 1"]
        thresholds = {"alert_threshold_bytes": alert_threshold_bytes, "spike_threshold": spike_threshold}
        faults += [f"{name}: {value} must be above 0" for name, value in thresholds.items() if not value > 0]
        if faults:
            raise ValueError("\n".join(faults))
        self.every_n_steps = every_n_steps
        self._given_reader = reader
        self._on_alert = on_alert
        self._clock = clock
        self._notes: list[str] = []
        self._sinks = MetricLoggers(sinks, self._notes.append)
        self._reset(alert_threshold_bytes, spike_threshold)

    def _reset(self, alert_threshold_bytes: int, spike_threshold: float) -> None:
        self.history = MemoryHistory(alert_threshold_bytes=alert_threshold_bytes, spike_threshold=spike_threshold)
        """Snapshots and their statistics."""
        self._notes.clear()
        self._reader: MemoryReader | None = None
        self.num_steps = 0
        """Steps recorded since the start, with or without a snapshot."""
        self._seconds = 0.0
        self._begin_s = self._end_s = self._clock()

    def start(self) -> None:
        """Start a new profile; earlier records are dropped."""
        self.stop()
        self._reset(self.history.alert_threshold_bytes, self.history.spike_threshold)
        self._reader = self._given_reader or SystemReader()

    def record_step(self, step: int, phase: Phase) -> None:
        """Take a snapshot after ``step``, counted up, if it is due; raises ``RuntimeError`` before ``start``."""
        if self._reader is None:
            raise RuntimeError("the memory profiler is not running; call start() or use it in a with statement")
        self.num_steps += 1
        if step % self.every_n_steps and self.num_steps > 1:
            return
        begin = self._clock()
        try:
            memory = self._reader()
        except (OSError, RuntimeError, ValueError) as error:
            self._note_once(f"at some steps memory could not be read ({error}); they have no snapshot")
        else:
            self._count(MemorySnapshot(step=step, phase=phase, elapsed_s=begin - self._begin_s, memory=memory))
        self._seconds += self._clock() - begin

    def stop(self) -> None:
        """Stop the profile and release the card; records stay. Repeated calls do nothing."""
        if self._reader is None:
            return
        self._end_s = self._clock()
        if isinstance(self._reader, SystemReader):
            self._note_once(self._reader.note)
            if self._reader is not self._given_reader:
                self._reader.close()
        self._reader = None

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()

    def report(self) -> str:
        """Return the profile as text, while it runs and after."""
        note = self._reader.note if isinstance(self._reader, SystemReader) else ""
        notes = [*self._notes, *([note] if note else [])]
        elapsed_s = (self._end_s if self._reader is None else self._clock()) - self._begin_s
        return memory_report(self.history, notes, self.every_n_steps, self.num_steps, self._seconds, elapsed_s)

    def write_csv(self, path: Path) -> None:
        """Write the snapshots to ``path`` atomically; a long run's are thinned. Raises ``OSError``."""
        replace_file(path, to_csv(self.history.snapshots()).encode())

    def _count(self, snapshot: MemorySnapshot) -> None:
        is_alert = self.history.add(snapshot)
        if self._sinks:
            self._sinks.log(snapshot.step, snapshot.as_metrics())
        if is_alert and self.history.num_alerts == 1 and self._on_alert is not None:
            source = snapshot.memory.source
            self._on_alert(
                f"memory alert: {snapshot.used_gb:.1f} GB used at step {snapshot.step}, above "
                f"{self.history.alert_threshold_bytes / GB:.1f} GB ({source}). In this order: "
                f"{'; '.join(alert_advice(source))}"
            )

    def _note_once(self, note: str) -> None:
        if note and note not in self._notes and len(self._notes) < _MAX_NOTES:
            self._notes.append(note)
