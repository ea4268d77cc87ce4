"""Memory snapshots that a real card wrote (``torch.cuda.memory._dump_snapshot``), read without executing code.

A snapshot has the segments with their blocks, and the last events before it: all, or as many as its ring buffer held.
``state_before`` undoes the events, so that they can be replayed from their start. All sizes are bytes.
"""

import io
import pickle
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from hybridtrain.errors import DataError
from hybridtrain.plain_file import read_plain
from hybridtrain.units import MIB
from hybridtrain.virtual_gpu.allocator.allocator import Block, Segment
from hybridtrain.virtual_gpu.allocator.allocator_config import SMALL_SEGMENT_BYTES, AllocatorConfig, round_size
from hybridtrain.virtual_gpu.allocator.segments import Action, AllocatorEvent, BlockState

_STATES = {
    "active_allocated": BlockState.ACTIVE_ALLOCATED,
    "active_pending_free": BlockState.ACTIVE_PENDING_FREE,
    "active_awaiting_free": BlockState.ACTIVE_PENDING_FREE,  # its name until torch 2.1
    "inactive": BlockState.INACTIVE,
}
_KEPT = frozenset(get_args(Action)) - {"oom"}
_SKIPPED = frozenset({"oom", "snapshot", "workspace_snapshot", "user_defined"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedDevice:
    """One device of a snapshot: its segments, and the recorded events."""

    segments: tuple[Segment, ...]
    events: tuple[AllocatorEvent, ...]
    """Events, oldest first; ordinals count from 0."""
    config: AllocatorConfig

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.total_size for segment in self.segments)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of blocks in use, rounding included, without blocks that wait for a stream."""
        blocks = (block for segment in self.segments for block in segment.blocks)
        return sum(block.size for block in blocks if block.state is BlockState.ACTIVE_ALLOCATED)


def read_snapshot(path: Path) -> list[RecordedDevice]:
    """Read each device with memory or events from a snapshot.

    Only containers, numbers and strings are unpickled; anything else is rejected before it can run.

    Raises:
        DataError: not a snapshot, or one with private pools, unsupported settings or events.
        OSError: it cannot be read.
    """
    stored = read_plain(path)
    try:
        return _devices(_PlainUnpickler(io.BytesIO(stored)).load())
    except Exception as error:  # an unpickler raises whatever it meets, MemoryError where a length is damaged
        raise DataError(
            f"{path}: not a memory snapshot that can be replayed ({type(error).__name__}: {error}); give a pickle of "
            f"torch.cuda.memory._dump_snapshot without private pools (no CUDA graphs)."
        ) from error


def state_before(device: RecordedDevice) -> tuple[Segment, ...]:
    """Return the segments as they were before the first event, by undoing every event from the end.

    A freed block's size is its rounded request, in large segments plus a remainder of up to 1 MiB, which the allocator
    would not split off.

    Raises:
        ValueError: the events do not lead to the segments.
    """
    past = _Past(device)
    for event in reversed(device.events):
        past.undo(event)
    return past.segments()


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it references {module_name}.{global_name}")


def _devices(content: Mapping[str, Any]) -> list[RecordedDevice]:
    config = _config(content.get("allocator_settings", {}))
    traces: Sequence[Sequence[Mapping[str, Any]]] = content.get("device_traces", ())
    numbers = {segment["device"] for segment in content["segments"]} | {n for n, trace in enumerate(traces) if trace}
    found = []
    for number in sorted(numbers):
        segments = [segment for segment in content["segments"] if segment["device"] == number]
        if any(tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0) for segment in segments):
            raise ValueError("private pools")
        found.append(
            RecordedDevice(
                segments=tuple(sorted(map(_segment, segments), key=lambda segment: segment.address)),
                events=_events(traces[number] if number < len(traces) else ()),
                config=config,
            )
        )
    return found


def _config(settings: Mapping[str, Any]) -> AllocatorConfig:
    divisions = set(settings.get("roundup_power2_divisions", {}).values()) or {0}
    if len(divisions) > 1:
        raise ValueError("roundup_power2_divisions differ by size")
    limit = settings.get("max_split_size", -1)
    return AllocatorConfig(
        expandable_segments=settings.get("expandable_segments", False),
        max_split_size=None if limit in {-1, 2**64 - 1} else limit // MIB * MIB,
        garbage_collection_threshold=settings.get("garbage_collection_threshold", 0.0),
        roundup_power2_divisions=divisions.pop(),
    )


def _segment(entry: Mapping[str, Any]) -> Segment:
    address, blocks = entry["address"], []
    for block in entry["blocks"]:
        size, state = block["size"], _STATES[block["state"]]
        requested = 0 if state is BlockState.INACTIVE else block["requested_size"]
        blocks.append(Block(address, size, requested, state))
        address += size
    if address != entry["address"] + entry["total_size"]:
        raise ValueError(f"blocks end at {address:#x}, not at their segment's end")
    return Segment(
        address=entry["address"],
        total_size=entry["total_size"],
        stream=entry["stream"],
        is_small=entry["segment_type"] == "small",
        is_expandable=entry.get("is_expandable", False),
        blocks=tuple(blocks),
    )


def _events(trace: Sequence[Mapping[str, Any]]) -> tuple[AllocatorEvent, ...]:
    unknown = {entry["action"] for entry in trace} - _KEPT - _SKIPPED
    if unknown:
        raise ValueError(f"events {', '.join(sorted(unknown))}")
    kept = (entry for entry in trace if entry["action"] in _KEPT)
    return tuple(
        AllocatorEvent(ordinal, entry["action"], entry["addr"], entry["size"], entry["stream"])
        for ordinal, entry in enumerate(kept)
    )


@dataclass(slots=True)
class _Past:
    """Segments and blocks in use at a moment, going backwards."""

    device: RecordedDevice
    heads: dict[int, Segment] = field(init=False)
    """Classic segments by address."""
    mapped_bytes: int = field(init=False)
    """Mapped bytes of expandable ranges, which are undone completely or not at all."""
    in_use: dict[int, Block] = field(init=False)
    addresses: list[int] = field(init=False)
    """Sorted addresses of the blocks in use."""

    def __post_init__(self) -> None:
        segments = self.device.segments
        self.heads = {segment.address: segment for segment in segments if not segment.is_expandable}
        self.mapped_bytes = sum(segment.total_size for segment in segments if segment.is_expandable)
        self.in_use = {
            block.address: block
            for segment in segments
            for block in segment.blocks
            if block.state is not BlockState.INACTIVE
        }
        self.addresses = sorted(self.in_use)

    def undo(self, event: AllocatorEvent) -> None:
        """Undo one event."""
        match event.action:
            case "alloc":
                self._require(event, event.address in self.in_use)
                del self.in_use[event.address]
                del self.addresses[bisect_left(self.addresses, event.address)]
            case "free_requested":
                self._require(event, event.address in self.in_use)
                self._set_state(event.address, BlockState.ACTIVE_ALLOCATED)
            case "free_completed":
                self._require(event, event.address not in self.in_use)
                size = round_size(event.size, self.device.config.roundup_power2_divisions)
                self.in_use[event.address] = Block(event.address, size, event.size, BlockState.ACTIVE_PENDING_FREE)
                insort(self.addresses, event.address)
                self._add_rest(event.address)
                before = bisect_left(self.addresses, event.address) - 1
                if before >= 0:
                    self._add_rest(self.addresses[before])
            case "segment_alloc":
                self._require(event, self.heads.pop(event.address, None) is not None)
            case "segment_free":
                self._require(event, event.address not in self.heads)
                self.heads[event.address] = Segment(
                    event.address, event.size, event.stream, event.size == SMALL_SEGMENT_BYTES, False, ()
                )  # fmt: skip
            case "segment_map" | "segment_unmap":
                self.mapped_bytes -= event.size if event.action == "segment_map" else -event.size

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments, the space between blocks in use as cached blocks."""
        if self.mapped_bytes or (self.in_use and not self.heads):
            raise ValueError(f"{self.mapped_bytes} bytes of expandable ranges were mapped before the first event")
        addresses = list(self.addresses)
        found = []
        for head in sorted(self.heads.values(), key=lambda segment: segment.address):
            end, blocks = head.address, list[Block]()
            while addresses and addresses[0] < head.address + head.total_size:
                block = self.in_use[addresses.pop(0)]
                if block.address > end:
                    blocks.append(Block(end, block.address - end, 0, BlockState.INACTIVE))
                blocks.append(block)
                end = block.address + block.size
            if end < head.address + head.total_size:
                blocks.append(Block(end, head.address + head.total_size - end, 0, BlockState.INACTIVE))
            found.append(replace(head, blocks=tuple(blocks)))
        if addresses:
            raise ValueError(f"a block at {addresses[0]:#x} is outside of all segments")
        return tuple(found)

    def _require(self, event: AllocatorEvent, holds: bool) -> None:
        if not holds:
            raise ValueError(
                f"event {event.ordinal}, {event.action} at {event.address:#x}, does not lead to the segments"
            )

    def _set_state(self, address: int, state: BlockState) -> None:
        self.in_use[address] = replace(self.in_use[address], state=state)

    def _add_rest(self, address: int) -> None:
        """Give the block at an address what lies behind it, if no free block of that size can be there."""
        heads = sorted(self.heads)
        index = bisect_right(heads, address) - 1
        if index < 0:
            return
        head, block = self.heads[heads[index]], self.in_use[address]
        after = bisect_right(self.addresses, address)
        end = min([head.address + head.total_size, *self.addresses[after : after + 1]])
        rest = end - address - block.size
        if rest > 0 and not self.device.config.splits(block.size, rest, is_small=head.is_small):
            self.in_use[address] = replace(block, size=block.size + rest)
