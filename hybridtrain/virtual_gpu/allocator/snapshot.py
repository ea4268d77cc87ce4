"""Memory snapshots of the virtual GPU, for https://pytorch.org/memory_viz and ``torch.cuda._memory_viz``.

The viewer requires: pickle protocol 4 at most; built-in types only; segments that match the trace; and, if categories
are used, one "unknown". Sizes are bytes, times are microseconds.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridtrain.atomic_write import replace_file
from hybridtrain.virtual_gpu.allocator.allocator import Block, Segment
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.allocator.segments import AllocatorEvent, BlockState

Frame = dict[str, str | int]
"""One stack frame: filename, line, name."""
Snapshot = dict[str, Any]
"""The whole file; its entries are named as in ``torch.cuda.memory._snapshot``."""
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
        segments: Its present segments.
        device: Index of the device in the viewer.
        config: Settings to show; None: the defaults.
        categories: Name of the tensor class per ordinal of an ``alloc``; it colours the timeline. Allocations
            without one are "unknown"; None: no categories at all.
        frames: Stack frames per ordinal, innermost first; None: none.
        times_us: Time per ordinal; None: the ordinal itself.

    Raises:
        ValueError: The history does not match the segments, so it is incomplete.
    """
    end = _replay(history)
    _require_same_end(end, segments)
    lists: dict[tuple[tuple[str, int, str], ...], list[Frame]] = {(): []}

    def frames_at(ordinal: int | None) -> list[Frame]:
        """Return an event's frames; equal lists are shared, so that pickle writes them once."""
        given = () if frames is None or ordinal is None else frames(ordinal)
        key = tuple((str(frame["filename"]), int(frame["line"]), str(frame["name"])) for frame in given)
        if key not in lists:
            lists[key] = [{"filename": file, "line": line, "name": name} for file, line, name in key]
        return lists[key]

    def segment_entry(segment: Segment) -> dict[str, Any]:
        allocs = [end.in_use.get(block.address) for block in segment.blocks]
        found = [frames_at(None if alloc is None else alloc.ordinal) for alloc in allocs]
        blocks = [_block_entry(block) | {"frames": one} for block, one in zip(segment.blocks, found, strict=True)]
        own = frames_at(end.segment_ordinals.get(segment.address))
        return _segment_entry(segment, device) | {"frames": own, "blocks": blocks}

    category_of = categories.get if isinstance(categories, Mapping) else categories
    trace = [_trace_entry(event, category_of, times_us) | {"frames": frames_at(event.ordinal)} for event in history]
    return {
        "segments": [segment_entry(segment) for segment in segments],
        "device_traces": [*([] for _ in range(device)), trace],
        "allocator_settings": _settings(AllocatorConfig() if config is None else config),
        "external_annotations": [],
    }


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write the pickle that every version of the viewer opens. The file is written atomically."""
    replace_file(path, pickle.dumps(snapshot, protocol=_PICKLE_PROTOCOL))


@dataclass(slots=True)
class _EndState:
    """The state at the end of a history."""

    reserved_bytes: int = 0
    in_use: dict[int, AllocatorEvent] = field(default_factory=dict)
    """Latest ``alloc`` of each address that is in use."""
    pending: set[int] = field(default_factory=set)
    """Addresses in ``in_use`` whose free was requested."""
    segment_ordinals: dict[int, int] = field(default_factory=dict)


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
            f"segments hold {len(by_segments)} in {reserved_bytes}; record the history from the allocator's start, "
            f"and take the segments at its end."
        )


def _trace_entry(
    event: AllocatorEvent, category_of: Callable[[int], str | None] | None, times_us: Callable[[int], int] | None
) -> dict[str, Any]:
    """Return one event. ``size`` is what was requested, or the size of the segment; ``oom`` has no address."""
    time = int(event.ordinal if times_us is None else times_us(event.ordinal))
    entry: dict[str, Any] = {
        "action": event.action,
        "size": int(event.size),
        "stream": int(event.stream),
        "time_us": time,
    }
    entry |= {"compile_context": "N/A", "user_metadata": "", "pool_id": _DEFAULT_POOL}
    entry["device_free" if event.action == "oom" else "addr"] = int(event.address)
    if category_of is not None and event.action in {"alloc", "segment_alloc", "segment_map"}:
        # Segments belong to no tensor class. One precedes every allocation, so "unknown" is always there.
        category = category_of(event.ordinal) if event.action == "alloc" else None
        entry["category"] = str(category or UNKNOWN_CATEGORY)
    return entry


def _segment_entry(segment: Segment, device: int) -> dict[str, Any]:
    in_use = [block for block in segment.blocks if block.state is not BlockState.INACTIVE]
    allocated = [block for block in in_use if block.state is BlockState.ACTIVE_ALLOCATED]
    entry: dict[str, Any] = {"device": device, "address": int(segment.address), "total_size": int(segment.total_size)}
    entry["allocated_size"] = int(sum(block.size for block in allocated))
    entry["active_size"] = int(sum(block.size for block in in_use))
    entry["requested_size"] = int(sum(block.requested_size for block in in_use))
    kind = "small" if segment.is_small else "large"
    entry |= {"stream": int(segment.stream), "segment_type": kind, "segment_pool_id": _DEFAULT_POOL}
    return entry | {"is_expandable": segment.is_expandable}


def _block_entry(block: Block) -> dict[str, Any]:
    sizes = {"address": int(block.address), "size": int(block.size), "requested_size": int(block.requested_size)}
    return sizes | {"state": block.state.value}


def _settings(config: AllocatorConfig) -> dict[str, Any]:
    """Return the settings that the viewer shows; -1 stands for an unlimited ``max_split_size``, as torch writes it."""
    intervals = (str(2**exponent) for exponent in range(16))  # MiB, 1 to 32768: torch keeps divisions per interval
    return {
        "PYTORCH_CUDA_ALLOC_CONF": config.to_environment(),
        "max_split_size": -1 if config.max_split_size is None else config.max_split_size,
        "garbage_collection_threshold": config.garbage_collection_threshold,
        "expandable_segments": config.expandable_segments,
        "pinned_num_register_threads": 1,
        **dict.fromkeys(
            ("release_lock_on_cudamalloc", "pinned_use_cuda_host_register", "graph_capture_record_stream_reuse"), False
        ),
        "roundup_power2_divisions": dict.fromkeys(intervals, config.roundup_power2_divisions),
    }
