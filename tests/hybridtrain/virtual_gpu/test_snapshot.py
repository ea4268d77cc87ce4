"""Memory snapshots: torch's own functions open them, and the viewer's backward replay meets every moment."""

import base64
import pickle
import pickletools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.cuda import _memory_viz

from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.allocator.allocator import AllocatorOutOfMemory, CachingAllocator, Segment
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.allocator.segments import AllocatorEvent, BlockState
from hybridtrain.virtual_gpu.allocator.snapshot import Frame, build_snapshot, write_snapshot

KIB, MIB = 2**10, 2**20
TORCH_VIEWS: dict[str, Callable[[object], str]] = {
    "trace": _memory_viz.trace,
    "segsum": _memory_viz.segsum,
    "trace_plot": _memory_viz.trace_plot,
    "segment_plot": _memory_viz.segment_plot,
}
CONFIGS = {
    "classic": (AllocatorConfig(), 150 * MIB),
    "expandable": (AllocatorConfig(expandable_segments=True), 150 * MIB),
    "unlimited": (AllocatorConfig(), None),
}

Moment = tuple[int, tuple[Segment, ...]]


def history_of(allocator: CachingAllocator) -> list[AllocatorEvent]:
    assert allocator.history is not None
    return allocator.history


def random_run(name: str) -> tuple[CachingAllocator, list[Moment]]:
    """Return an allocator after 300 calls, and after each the number of events and the segments."""
    config, capacity = CONFIGS[name]
    allocator = CachingAllocator(config, capacity, record_history=True)
    rng = random.Random(7)  # noqa: S311  no secrets here
    live: list[int] = []
    moments: list[Moment] = [(0, ())]
    for _ in range(300):
        call = rng.choices(["malloc", "free", "use", "complete", "empty"], weights=[50, 42, 6, 4, 2])[0]
        if call == "malloc":
            try:
                live.append(allocator.malloc(rng.choice([100, 3000, MIB, 5 * MIB, 31 * MIB]), rng.choice([0, 7])))
            except AllocatorOutOfMemory:
                continue
        elif call == "free" and live:
            allocator.free(live.pop(rng.randrange(len(live))))
        elif call == "use" and live:
            allocator.record_stream(rng.choice(live), 9)
        elif call == "complete":
            allocator.complete_stream(9)
        else:
            allocator.empty_cache()
        moments.append((len(history_of(allocator)), allocator.segments()))
    return allocator, moments


class Rewinder:
    """What the viewer's "Allocator State History" does: start at the segments, undo the trace backwards."""

    def __init__(self, snapshot: dict[str, Any], device: int) -> None:
        self.trace = snapshot["device_traces"][device]
        own = [segment for segment in snapshot["segments"] if segment["device"] == device]
        self.segments = {segment["address"]: (segment["total_size"], segment["stream"]) for segment in own}
        self.blocks: dict[int, tuple[int, bool]] = {}
        for segment in own:
            address = segment["address"]
            for block in segment["blocks"]:
                assert block["address"] == address
                if block["state"] != "inactive":
                    self.blocks[address] = (block["requested_size"], block["state"] == "active_pending_free")
                address += block["size"]

    def undo(self) -> None:
        entry = self.trace.pop()
        match entry["action"]:
            case "alloc":
                del self.blocks[entry["addr"]]
            case "free_requested":
                assert self.blocks[entry["addr"]] == (entry["size"], True)
                self.blocks[entry["addr"]] = (entry["size"], False)
            case "free_completed":
                assert entry["addr"] not in self.blocks
                self.blocks[entry["addr"]] = (entry["size"], True)
            case "segment_alloc":
                assert self.segments.pop(entry["addr"]) == (entry["size"], entry["stream"])
            case "segment_free":
                self.segments[entry["addr"]] = (entry["size"], entry["stream"])
            case "segment_map":
                self.cut(entry["addr"], entry["size"])
            case "segment_unmap":
                self.segments[entry["addr"]] = (entry["size"], entry["stream"])
                self.join()
            case action:
                assert action == "oom"

    def cut(self, address: int, size: int) -> None:
        start = max(start for start in self.segments if start <= address)
        length, stream = self.segments.pop(start)
        assert address + size <= start + length
        if start < address:
            self.segments[start] = (address - start, stream)
        if address + size < start + length:
            self.segments[address + size] = (start + length - address - size, stream)

    def join(self) -> None:
        joined: dict[int, tuple[int, int]] = {}
        last = 0
        for address, (size, stream) in sorted(self.segments.items()):
            if last in joined and last + joined[last][0] == address and joined[last][1] == stream:
                joined[last] = (joined[last][0] + size, stream)
            else:
                joined[address] = (size, stream)
                last = address
        self.segments = joined

    def check_blocks_lie_in_segments(self) -> None:
        """The viewer fails on a block without a segment around it."""
        for address in self.blocks:
            assert any(start <= address < start + size for start, (size, _) in self.segments.items())


@pytest.mark.parametrize("name", CONFIGS)
def test_backward_replay_meets_every_recorded_moment(name: str, tmp_path: Path) -> None:
    allocator, moments = random_run(name)
    snapshot = build_snapshot(history_of(allocator), allocator.segments(), device=1, config=allocator.config)
    write_snapshot(tmp_path / "run.pickle", snapshot)
    rewinder = Rewinder(pickle.loads((tmp_path / "run.pickle").read_bytes()), device=1)  # noqa: S301  own file
    assert len(rewinder.trace) > 300
    for num_events, segments in reversed(moments):
        while len(rewinder.trace) > num_events:
            rewinder.check_blocks_lie_in_segments()
            rewinder.undo()
        assert rewinder.segments == {segment.address: (segment.total_size, segment.stream) for segment in segments}
        assert rewinder.blocks == {
            block.address: (block.requested_size, block.state is BlockState.ACTIVE_PENDING_FREE)
            for segment in segments
            for block in segment.blocks
            if block.state is not BlockState.INACTIVE
        }
    assert rewinder.segments == {}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("view", TORCH_VIEWS)
def test_functions_of_torch_open_the_file(name: str, view: str, tmp_path: Path) -> None:
    allocator, _ = random_run(name)
    path = tmp_path / "run.pickle"
    write_snapshot(path, build_snapshot(history_of(allocator), allocator.segments(), config=allocator.config))
    text = TORCH_VIEWS[view](pickle.loads(path.read_bytes()))  # noqa: S301  own file
    if view == "trace":
        assert text.startswith(f"Device 0 ----------------\n{len(history_of(allocator))} entries\n")
    elif view == "segsum":
        assert f"segments: {len(allocator.segments())}\n" in text
    else:
        encoded = re.search(r'"base64": "([^"]+)"', text)
        assert encoded is not None
        assert pickle.loads(base64.b64decode(encoded[1])) == pickle.loads(path.read_bytes())  # noqa: S301


def small_run() -> CachingAllocator:
    """Return an allocator with seven events: a segment, two allocations, a free, a segment, an allocation."""
    allocator = CachingAllocator(record_history=True)
    first = allocator.malloc(1000)
    allocator.malloc(2000)
    allocator.free(first)
    allocator.malloc(12 * MIB, stream=5)
    return allocator


def small_snapshot(categories: dict[int, str] | Callable[[int], str | None] | None = None) -> dict[str, list[Any]]:
    allocator = small_run()
    return dict(build_snapshot(history_of(allocator), allocator.segments(), categories=categories))  # type: ignore[arg-type]


def test_entries_tell_what_happened() -> None:
    allocator = small_run()
    first, second = allocator.segments()
    snapshot = build_snapshot(history_of(allocator), allocator.segments(), times_us=lambda ordinal: 1000 + 10 * ordinal)
    entries = snapshot["device_traces"][0]
    base = first.address
    assert [(entry["action"], entry["addr"], entry["size"], entry["stream"]) for entry in entries] == [
        ("segment_alloc", base, 2 * MIB, 0),
        ("alloc", base, 1000, 0),
        ("alloc", base + 1024, 2000, 0),
        ("free_requested", base, 1000, 0),
        ("free_completed", base, 1000, 0),
        ("segment_alloc", second.address, 12 * MIB, 5),
        ("alloc", second.address, 12 * MIB, 5),
    ]
    assert [entry["time_us"] for entry in entries] == [1000, 1010, 1020, 1030, 1040, 1050, 1060]
    assert all(entry["pool_id"] == (0, 0) for entry in entries)


def test_segments_tell_what_is_held() -> None:
    snapshot = small_snapshot()
    small, large = snapshot["segments"]
    assert [(block["size"], block["requested_size"], block["state"]) for block in small.pop("blocks")] == [
        (1024, 0, "inactive"),
        (2048, 2000, "active_allocated"),
        (2 * MIB - 3072, 0, "inactive"),
    ]
    del small["address"], small["frames"]
    assert small == {
        "device": 0,
        "total_size": 2 * MIB,
        "allocated_size": 2048,
        "active_size": 2048,
        "requested_size": 2000,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
    }
    assert (large["segment_type"], large["stream"]) == ("large", 5)


def test_the_trace_stands_at_the_place_of_the_device() -> None:
    allocator = small_run()
    snapshot = build_snapshot(history_of(allocator), allocator.segments(), device=2)
    assert [len(trace) for trace in snapshot["device_traces"]] == [0, 0, 7]
    assert [segment["device"] for segment in snapshot["segments"]] == [2, 2]


def test_a_block_that_waits_for_a_stream_is_pending() -> None:
    allocator = CachingAllocator(record_history=True)
    address = allocator.malloc(1000)
    allocator.record_stream(address, 3)
    allocator.free(address)
    snapshot = build_snapshot(history_of(allocator), allocator.segments())
    assert [entry["action"] for entry in snapshot["device_traces"][0]][-1] == "free_requested"
    segment = snapshot["segments"][0]
    assert segment["blocks"][0]["state"] == "active_pending_free"
    assert (segment["allocated_size"], segment["active_size"], segment["requested_size"]) == (0, 1024, 1000)


def test_free_completed_follows_its_request_directly() -> None:
    # The viewer joins such a pair to one event; apart, it shows a block that waits for a stream.
    allocator = CachingAllocator(record_history=True)
    for address in [allocator.malloc(size) for size in (1000, 5 * MIB, 2000)]:
        allocator.free(address)
    actions = [(event.action, event.address) for event in history_of(allocator)]
    frees = [place for place, (action, _) in enumerate(actions) if action == "free_requested"]
    assert len(frees) == 3
    for place in frees:
        assert actions[place + 1] == ("free_completed", actions[place][1])


def test_out_of_memory_has_free_bytes_and_no_address() -> None:
    allocator = CachingAllocator(capacity_bytes=20 * MIB, record_history=True)
    allocator.malloc(12 * MIB)
    with pytest.raises(AllocatorOutOfMemory):
        allocator.malloc(10 * MIB - 100)
    entry = build_snapshot(history_of(allocator), allocator.segments())["device_traces"][0][-1]
    assert entry["action"] == "oom"
    assert (entry["device_free"], entry["size"]) == (8 * MIB, 10 * MIB)
    assert "addr" not in entry


@pytest.mark.parametrize("as_function", [False, True])
def test_categories_are_plain_text_and_unknown_is_among_them(*, as_function: bool) -> None:
    names: dict[int, str] = {1: TensorClass.WEIGHT, 2: TensorClass.GRAD, 6: TensorClass.BOUNDARY}
    trace = small_snapshot(names.get if as_function else names)["device_traces"][0]
    assert [entry.get("category") for entry in trace] == [
        "unknown",
        "weight",
        "grad",
        None,
        None,
        "unknown",
        "boundary",
    ]
    assert {type(entry["category"]) for entry in trace if "category" in entry} == {str}


def test_allocations_without_a_category_are_unknown() -> None:
    trace = small_snapshot({1: "weight"})["device_traces"][0]
    assert [entry["category"] for entry in trace if entry["action"] == "alloc"] == ["weight", "unknown", "unknown"]


def test_without_categories_no_entry_has_one() -> None:
    assert not any("category" in entry for entry in small_snapshot()["device_traces"][0])


def test_equal_frames_are_one_object_and_blocks_show_those_of_their_allocation() -> None:
    def frames(ordinal: int) -> list[Frame]:
        return [{"filename": "model.py", "line": 10 if ordinal in {2, 6} else ordinal, "name": "forward"}]

    allocator = small_run()
    snapshot = build_snapshot(history_of(allocator), allocator.segments(), frames=frames)
    trace = snapshot["device_traces"][0]
    assert trace[2]["frames"] == [{"filename": "model.py", "line": 10, "name": "forward"}]
    assert trace[2]["frames"] is trace[6]["frames"]
    small, large = snapshot["segments"]
    assert [block["frames"] for block in small["blocks"]] == [[], trace[2]["frames"], []]
    assert small["frames"] == frames(0)
    assert large["frames"] == frames(5)
    assert large["blocks"][0]["frames"] is trace[6]["frames"]


# The operations that the viewer's own reader of pickles knows, by the names of the module pickletools.
KNOWN_TO_THE_VIEWER = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "DICT", "LIST", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"),
}


def test_the_pickle_has_only_what_the_viewer_reads(tmp_path: Path) -> None:
    # Numbers that come out of numpy, and names out of an enumeration, must not reach the file as such.
    allocator = CachingAllocator(capacity_bytes=40 * MIB, record_history=True)
    allocator.malloc(np.int64(3000))  # type: ignore[arg-type]
    allocator.malloc(np.int64(2000))  # type: ignore[arg-type]
    allocator.malloc(np.int64(5 * MIB))  # type: ignore[arg-type]
    with pytest.raises(AllocatorOutOfMemory):
        allocator.malloc(np.int64(30 * MIB))  # type: ignore[arg-type]
    snapshot = build_snapshot(
        history_of(allocator),
        allocator.segments(),
        config=AllocatorConfig(max_split_size=32 * MIB, garbage_collection_threshold=0.5),
        categories=lambda _: TensorClass.ACTIVATION,
        frames=lambda ordinal: [{"filename": "a.py", "line": np.int64(ordinal), "name": "f"}],  # type: ignore[typeddict-item]
        times_us=lambda ordinal: np.int64(ordinal) * 7,  # type: ignore[arg-type, return-value]
    )
    write_snapshot(tmp_path / "run.pickle", snapshot)
    operations = {
        (operation.name, argument if operation.name == "PROTO" else None)
        for operation, argument, _ in pickletools.genops((tmp_path / "run.pickle").read_bytes())
    }
    assert {name for name, _ in operations} <= KNOWN_TO_THE_VIEWER
    assert ("PROTO", 4) in operations


def test_settings_are_complete() -> None:
    config = AllocatorConfig(expandable_segments=True, roundup_power2_divisions=4)
    settings = build_snapshot([], (), config=config)["allocator_settings"]
    divisions = settings.pop("roundup_power2_divisions")  # type: ignore[misc]
    assert divisions == {str(2**power): 4 for power in range(16)}
    assert settings == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,roundup_power2_divisions:4",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": True,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
    }
    limited = build_snapshot([], (), config=AllocatorConfig(max_split_size=64 * MIB))
    assert limited["allocator_settings"]["max_split_size"] == 64 * MIB


@pytest.mark.parametrize("lost", ["first event", "last event", "later segments", "pending free"])
def test_a_history_that_does_not_lead_to_the_segments_is_refused(lost: str) -> None:
    allocator = small_run()
    before = allocator.segments()
    history = history_of(allocator)
    if lost == "first event":
        history = history[1:]
    elif lost == "last event":
        history = history[:-1]
    elif lost == "later segments":
        allocator.malloc(40 * KIB)
    else:
        address = history[2].address
        allocator.record_stream(address, 1)
        allocator.free(address)
    with pytest.raises(ValueError, match="history: it leads to"):
        build_snapshot(history, before)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    snapshot = build_snapshot([], ())
    write_snapshot(path, snapshot)
    old = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    allocator = small_run()
    with pytest.raises(OSError, match="No space left"):
        write_snapshot(path, build_snapshot(history_of(allocator), allocator.segments()))
    assert path.read_bytes() == old
    assert [*tmp_path.iterdir()] == [path]
