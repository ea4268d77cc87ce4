"""Memory snapshots of the virtual GPU, for https://pytorch.org/memory_viz and ``torch.cuda._memory_viz``.

The viewer is strict, and every rule here keeps one of its pages from failing: pickle protocol 4 at most; only
built-in types; segments that are what the trace leads to, as it is replayed backwards from them; and once an
entry has a category, one with the category "unknown". Sizes are bytes, times are microseconds.
"""

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from hybridtrain.atomic_write import replace_file
from hybridtrain.virtual_gpu.allocator.allocator import Segment
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.allocator.segments import Action, AllocatorEvent, BlockState


class Frame(TypedDict):
    """One stack frame."""

    filename: str
    line: int
    name: str


class SnapshotBlock(TypedDict):
    """A run of bytes in a segment."""

    address: int
    size: int
    requested_size: int
    state: str
    frames: list[Frame]


class SnapshotSegment(TypedDict):
    """Reserved memory in one piece, with blocks that cover it without gaps."""

    device: int
    address: int
    total_size: int
    allocated_size: int
    active_size: int
    requested_size: int
    stream: int
    segment_type: Literal["small", "large"]
    segment_pool_id: tuple[int, int]
    is_expandable: bool
    frames: list[Frame]
    blocks: list[SnapshotBlock]


class TraceEntry(TypedDict):
    """One event. ``size`` is what was requested, or the size of the segment; ``oom`` has no address."""

    action: Action
    addr: NotRequired[int]
    device_free: NotRequired[int]
    size: int
    stream: int
    time_us: int
    compile_context: str
    user_metadata: str
    pool_id: tuple[int, int]
    frames: list[Frame]
    category: NotRequired[str]


class AllocatorSettings(TypedDict):
    """Settings shown by the viewer; -1 stands for an unlimited ``max_split_size``, as torch writes it."""

    PYTORCH_CUDA_ALLOC_CONF: str
    max_split_size: int
    garbage_collection_threshold: float
    expandable_segments: bool
    pinned_num_register_threads: int
    release_lock_on_cudamalloc: bool
    pinned_use_cuda_host_register: bool
    graph_capture_record_stream_reuse: bool
    roundup_power2_divisions: dict[str, int]


class Annotation(TypedDict):
    """A named moment on the time axis."""

    device: int
    time_us: int
    name: str
    stage: str


class Snapshot(TypedDict):
    """The whole file."""

    segments: list[SnapshotSegment]
    device_traces: list[list[TraceEntry]]
    allocator_settings: AllocatorSettings
    external_annotations: list[Annotation]


UNKNOWN_CATEGORY = "unknown"
_PICKLE_PROTOCOL = 4  # the viewer refuses 5
_DEFAULT_POOL = (0, 0)


def build_snapshot(
    history: Sequence[AllocatorEvent],
    segments: Sequence[Segment],
    *,
    device: int = 0,
    config: AllocatorConfig | None = None,
    categories: Mapping[int, str] | Callable[[int], str | None] | None = None,
    frames: Callable[[int], Sequence[Frame]] | None = None,
    times_us: Callable[[int], int] | None = None,
) -> Snapshot:
    """Return the snapshot of an allocator that recorded its whole history.

        >>> from hybridtrain.virtual_gpu import CachingAllocator
        >>> allocator = CachingAllocator(record_history=True)
        >>> block = allocator.malloc(2**20)
        >>> snapshot = build_snapshot(allocator.history, allocator.segments(), categories={1: "weight"})
        >>> [(entry["action"], entry["category"]) for entry in snapshot["device_traces"][0]]
        [('segment_alloc', 'unknown'), ('alloc', 'weight')]
        >>> write_snapshot(Path("snapshot.pickle"), snapshot)  # doctest: +SKIP

    Args:
        history: All events since the allocator was made.
        segments: What it holds now.
        device: Index of the card in the viewer.
        config: Settings to show; None: the defaults.
        categories: Name of the tensor class per ordinal of an ``alloc``; it colours the timeline. Allocations
            without one are "unknown"; None: no categories at all.
        frames: Stack frames per ordinal, innermost first; None: none.
        times_us: Time per ordinal; None: the ordinal itself.

    Raises:
        ValueError: The history does not lead to the segments, so a part of it is missing.
    """
    end = _replay(history)
    _require_same_end(end, segments)
    table = _FrameTable(frames)
    category_of = categories.get if isinstance(categories, Mapping) else categories
    trace = [_trace_entry(event, table, category_of, times_us) for event in history]
    return {
        "segments": [_segment_entry(segment, device, end, table) for segment in segments],
        "device_traces": [*([] for _ in range(device)), trace],
        "allocator_settings": _settings(AllocatorConfig() if config is None else config),
        "external_annotations": [],
    }


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write the pickle that every version of the viewer opens. The file appears whole or not at all."""
    replace_file(path, pickle.dumps(snapshot, protocol=_PICKLE_PROTOCOL))


def write_snapshot_json(path: Path, snapshot: Snapshot) -> None:
    """Write the snapshot as text for comparing; only newer versions of the viewer open it."""
    replace_file(path, (json.dumps(snapshot, indent=1, allow_nan=False) + "\n").encode())


@dataclass(slots=True)
class _EndState:
    """Where a history leads."""

    reserved_bytes: int = 0
    in_use: dict[int, AllocatorEvent] = field(default_factory=dict)
    """Last ``alloc`` per address whose free has not completed."""
    pending: set[int] = field(default_factory=set)
    """Addresses in ``in_use`` whose free was requested."""
    segment_ordinals: dict[int, int] = field(default_factory=dict)


class _FrameTable:
    """Stack frames per ordinal, each list built once: pickle writes a shared list once too."""

    def __init__(self, frames: Callable[[int], Sequence[Frame]] | None) -> None:
        self._frames = frames
        self._lists: dict[tuple[tuple[str, int, str], ...], list[Frame]] = {(): []}

    def at(self, ordinal: int | None) -> list[Frame]:
        """Return the frames of an event; none for None."""
        given = () if self._frames is None or ordinal is None else self._frames(ordinal)
        key = tuple((str(frame["filename"]), int(frame["line"]), str(frame["name"])) for frame in given)
        if key not in self._lists:
            self._lists[key] = [{"filename": file, "line": line, "name": name} for file, line, name in key]
        return self._lists[key]


def _replay(history: Sequence[AllocatorEvent]) -> _EndState:
    end = _EndState()
    for event in history:
        match event.action:
            case "alloc":
                end.in_use[event.address] = event
            case "free_requested":
                end.pending.add(event.address)
            case "free_completed":
                end.pending.discard(event.address)
                end.in_use.pop(event.address, None)
            case "segment_alloc" | "segment_map":
                end.reserved_bytes += event.size
                end.segment_ordinals[event.address] = event.ordinal
            case "segment_free" | "segment_unmap":
                end.reserved_bytes -= event.size
            case "oom":
                pass
    return end


def _require_same_end(end: _EndState, segments: Sequence[Segment]) -> None:
    by_history = {address: (event.size, event.stream, address in end.pending) for address, event in end.in_use.items()}
    by_segments = {
        block.address: (block.requested_size, segment.stream, block.state is BlockState.ACTIVE_PENDING_FREE)
        for segment in segments
        for block in segment.blocks
        if block.state is not BlockState.INACTIVE
    }
    reserved_bytes = sum(segment.total_size for segment in segments)
    if by_history != by_segments or end.reserved_bytes != reserved_bytes:
        raise ValueError(
            f"history: it leads to {len(by_history)} blocks in {end.reserved_bytes} reserved bytes, but the "
            f"segments hold {len(by_segments)} in {reserved_bytes}; both must be of one allocator and time; "
            "record the history from its start and take the segments at its end."
        )


def _trace_entry(
    event: AllocatorEvent,
    table: _FrameTable,
    category_of: Callable[[int], str | None] | None,
    times_us: Callable[[int], int] | None,
) -> TraceEntry:
    entry: TraceEntry = {
        "action": event.action,
        "size": int(event.size),
        "stream": int(event.stream),
        "time_us": int(event.ordinal if times_us is None else times_us(event.ordinal)),
        "compile_context": "N/A",
        "user_metadata": "",
        "pool_id": _DEFAULT_POOL,
        "frames": table.at(event.ordinal),
    }
    if event.action == "oom":
        entry["device_free"] = int(event.address)
    else:
        entry["addr"] = int(event.address)
    if category_of is not None:
        # Segments belong to no tensor class. One precedes every allocation, so "unknown" is always there.
        category = category_of(event.ordinal) if event.action == "alloc" else None
        if event.action in {"alloc", "segment_alloc", "segment_map"}:
            entry["category"] = str(category or UNKNOWN_CATEGORY)
    return entry


def _segment_entry(segment: Segment, device: int, end: _EndState, table: _FrameTable) -> SnapshotSegment:
    in_use = [block for block in segment.blocks if block.state is not BlockState.INACTIVE]
    allocated = [block for block in in_use if block.state is BlockState.ACTIVE_ALLOCATED]
    blocks: list[SnapshotBlock] = []
    for block in segment.blocks:
        alloc = end.in_use.get(block.address)
        blocks.append(
            {
                "address": int(block.address),
                "size": int(block.size),
                "requested_size": int(block.requested_size),
                "state": block.state.value,
                "frames": table.at(None if alloc is None else alloc.ordinal),
            }
        )
    return {
        "device": device,
        "address": int(segment.address),
        "total_size": int(segment.total_size),
        "allocated_size": int(sum(block.size for block in allocated)),
        "active_size": int(sum(block.size for block in in_use)),
        "requested_size": int(sum(block.requested_size for block in in_use)),
        "stream": int(segment.stream),
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": _DEFAULT_POOL,
        "is_expandable": segment.is_expandable,
        "frames": table.at(end.segment_ordinals.get(segment.address)),
        "blocks": blocks,
    }


def _settings(config: AllocatorConfig) -> AllocatorSettings:
    intervals = (str(2**exponent) for exponent in range(16))  # MiB, 1 to 32768: torch keeps divisions per interval
    return {
        "PYTORCH_CUDA_ALLOC_CONF": config.to_environment(),
        "max_split_size": -1 if config.max_split_size is None else config.max_split_size,
        "garbage_collection_threshold": config.garbage_collection_threshold,
        "expandable_segments": config.expandable_segments,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": dict.fromkeys(intervals, config.roundup_power2_divisions),
    }
