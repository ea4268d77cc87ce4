"""Timelines in Chrome's trace format, for https://ui.perfetto.dev: one row per stream, one track per counter.

Times are microseconds. Format: "Trace Event Format" of the Chromium project; events X, C and M are used.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridtrain.atomic_write import replace_file

_PROCESS = 1
# Viewers take thread 0 for the idle thread and leave it out.
_FIRST_THREAD = 1

ArgumentValue = str | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A span of work on a stream.

    Raises:
        ValueError: A time is not finite, or the duration is negative.
    """

    name: str
    category: str
    stream: int
    start_us: float
    duration_us: float
    args: Mapping[str, ArgumentValue] = field(default_factory=dict)
    """Details shown when the slice is selected."""

    def __post_init__(self) -> None:
        """Check that times are finite and durations not negative."""
        if not (math.isfinite(self.start_us) and 0 <= self.duration_us < math.inf):
            raise ValueError(
                f"slice '{self.name}': start {self.start_us} us, duration {self.duration_us} us; both must "
                "be finite and the duration not negative; check the clock that made them."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """Values of one track from a moment on, stacked when there are several.

    Raises:
        ValueError: The time or a value is not finite.
    """

    name: str
    time_us: float
    values: Mapping[str, float]

    def __post_init__(self) -> None:
        """Check that numbers are finite."""
        if not all(map(math.isfinite, (self.time_us, *self.values.values()))):
            raise ValueError(
                f"counter '{self.name}': {dict(self.values)} at {self.time_us} us; numbers must be finite; "
                "leave out what was not measured."
            )


def build_trace(
    slices: Iterable[Slice], counters: Iterable[Counter], *, process_name: str, stream_names: Mapping[int, str]
) -> dict[str, Any]:
    """Return the trace of one process, its events in order of time.

        >>> step = Slice(name="matmul", category="compute", stream=0, start_us=0.0, duration_us=1900.0)
        >>> trace = build_trace([step], [], process_name="card", stream_names={0: "compute"})
        >>> write_trace(Path("trace.json"), trace)  # doctest: +SKIP

    Args:
        slices: What the streams did.
        counters: Values over time.
        process_name: Heading of the rows.
        stream_names: Title of each stream's row, in the order of the rows from the top.

    Raises:
        ValueError: A slice is on a stream without a name.
    """
    threads = {stream: _FIRST_THREAD + row for row, stream in enumerate(stream_names)}
    events = [*(_slice_event(piece, threads) for piece in slices), *map(_counter_event, counters)]
    events.sort(key=lambda event: event["ts"])
    return {
        "traceEvents": [
            _metadata("process_name", None, {"name": process_name}),
            *(_metadata("thread_name", threads[stream], {"name": name}) for stream, name in stream_names.items()),
            *(_metadata("thread_sort_index", thread, {"sort_index": thread}) for thread in threads.values()),
            *events,
        ],
        "displayTimeUnit": "ms",
    }


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    """Write the trace as JSON, one event a line. The file appears whole or not at all."""
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in trace["traceEvents"])
    unit = json.dumps(trace["displayTimeUnit"])
    replace_file(path, f'{{"displayTimeUnit": {unit}, "traceEvents": [\n{lines}\n]}}\n'.encode())


def _metadata(name: str, thread: int | None, args: dict[str, ArgumentValue]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": _PROCESS, "args": args} | ({} if thread is None else {"tid": thread})


def _slice_event(piece: Slice, threads: Mapping[int, int]) -> dict[str, Any]:
    if piece.stream not in threads:
        raise ValueError(
            f"slice '{piece.name}': stream {piece.stream} has no name; named are {sorted(threads)}; add it "
            "to stream_names."
        )
    times = {"ts": piece.start_us, "dur": piece.duration_us, "pid": _PROCESS, "tid": threads[piece.stream]}
    return {"name": piece.name, "cat": piece.category, "ph": "X", **times, "args": dict(piece.args)}


def _counter_event(counter: Counter) -> dict[str, Any]:
    return {"name": counter.name, "ph": "C", "ts": counter.time_us, "pid": _PROCESS, "args": dict(counter.values)}
