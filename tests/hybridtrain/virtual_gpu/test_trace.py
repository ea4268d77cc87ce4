"""Chrome traces: the events, their order, and what is refused."""

import json
import math
from pathlib import Path

import pytest

from hybridtrain.virtual_gpu.account.trace import Counter, Slice, build_trace, write_trace

FORWARD = Slice(name="block 0", category="forward", stream=0, start_us=5.0, duration_us=2.5, args={"bytes": 4096})
COPY = Slice(name="weights", category="copy", stream=7, start_us=1.0, duration_us=0.0)
MEMORY = Counter(name="memory", time_us=3.0, values={"allocated": 10.0, "reserved": 20.0})
NAMES = {7: "copy", 0: "compute"}


def test_every_event_is_written_out() -> None:
    trace = build_trace([FORWARD, COPY], [MEMORY], process_name="virtual GPU", stream_names=NAMES)
    assert trace["displayTimeUnit"] == "ms"
    assert trace["traceEvents"] == [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "virtual GPU"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "copy"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 2, "args": {"name": "compute"}},
        {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": 1, "args": {"sort_index": 1}},
        {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": 2, "args": {"sort_index": 2}},
        {"name": "weights", "cat": "copy", "ph": "X", "ts": 1.0, "dur": 0.0, "pid": 1, "tid": 1, "args": {}},
        {"name": "memory", "ph": "C", "ts": 3.0, "pid": 1, "args": {"allocated": 10.0, "reserved": 20.0}},
        {
            "name": "block 0",
            "cat": "forward",
            "ph": "X",
            "ts": 5.0,
            "dur": 2.5,
            "pid": 1,
            "tid": 2,
            "args": {"bytes": 4096},
        },
    ]


def test_events_at_one_time_keep_their_order() -> None:
    slices = [Slice(name=name, category="c", stream=0, start_us=1, duration_us=0) for name in "cab"]
    trace = build_trace(slices, [], process_name="p", stream_names={0: "compute"})
    assert [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"] == ["c", "a", "b"]


def test_the_file_is_json_with_one_event_a_line(tmp_path: Path) -> None:
    trace = build_trace([FORWARD, COPY], [MEMORY], process_name='a "name"', stream_names=NAMES)
    write_trace(tmp_path / "trace.json", trace)
    text = (tmp_path / "trace.json").read_text()
    assert json.loads(text) == trace
    assert len(text.splitlines()) == len(trace["traceEvents"]) + 2


def test_a_trace_without_events_is_a_file_too(tmp_path: Path) -> None:
    trace = build_trace([], [], process_name="idle", stream_names={})
    write_trace(tmp_path / "trace.json", trace)
    assert json.loads((tmp_path / "trace.json").read_text()) == trace


def test_what_json_cannot_hold_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    good = build_trace([FORWARD], [], process_name="p", stream_names=NAMES)
    write_trace(path, good)
    odd = Slice(name="n", category="c", stream=0, start_us=0, duration_us=1, args={"speed": math.nan})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_trace(path, build_trace([odd], [], process_name="p", stream_names=NAMES))
    assert json.loads(path.read_text()) == good
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("start_us", "duration_us"), [(math.nan, 1), (math.inf, 1), (0, -1e-9), (0, math.inf), (0, math.nan)]
)
def test_impossible_times_are_refused(start_us: float, duration_us: float) -> None:
    with pytest.raises(ValueError, match="slice 'n': start"):
        Slice(name="n", category="c", stream=0, start_us=start_us, duration_us=duration_us)


@pytest.mark.parametrize(("time_us", "value"), [(math.inf, 1.0), (0.0, math.nan)])
def test_counters_must_be_finite(time_us: float, value: float) -> None:
    with pytest.raises(ValueError, match="counter 'n'"):
        Counter(name="n", time_us=time_us, values={"a": 1.0, "b": value})


def test_streams_need_a_name() -> None:
    with pytest.raises(ValueError, match=r"slice 'weights': stream 7 has no name; named are \[0\]"):
        build_trace([COPY], [], process_name="p", stream_names={0: "compute"})
