"""Replays of a real card's allocator history in the model: equal requests from an equal start.

Two questions. **With the driver's addresses** every event must equal the record. **With our own addresses**, as in a
plan, equal blocks may be chosen in another order, so reserved bytes may differ. Releases of cached memory are taken
from the record, as snapshots do not contain their causes.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridtrain.virtual_gpu.allocator.allocator import CachingAllocator, Segment
from hybridtrain.virtual_gpu.allocator.allocator_config import round_size
from hybridtrain.virtual_gpu.allocator.recorded_snapshot import RecordedDevice, state_before
from hybridtrain.virtual_gpu.allocator.segments import (
    FIRST_ADDRESS,
    AllocatorEvent,
    BlockState,
    Placement,
    falling,
    rising,
)

_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a replay, in bytes."""

    allocated_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int
    """Peak during the events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReplay:
    """Comparison of one device's record with the model."""

    recorded: Outcome
    at_their_addresses: Outcome
    rising: Outcome
    """Replay with our own addresses, each segment above all earlier ones."""
    falling: Outcome
    """Replay with our own addresses, each segment below all earlier ones."""
    start_reserved_bytes: int
    """Reserved bytes before the first event; 0: the record is complete."""
    num_allocs: int
    num_segments: int
    """Bytes reserved or mapped during the record."""
    num_events: int
    num_same_events: int
    """Events with recorded action, address, size and stream at the recorded position, with the driver's addresses."""
    same_end: bool
    """Whether all segments and blocks equal the record at the end, with the driver's addresses."""


def matching_blocks(device: RecordedDevice) -> tuple[int, int]:
    """Return the number of blocks in use whose size matches the model's, and the number of all.

    A block's size is its rounded request plus the remainder that is not split off.
    """
    config, lawful, total = device.config, 0, 0
    for segment in device.segments:
        for block in segment.blocks:
            if block.state is BlockState.INACTIVE:
                continue
            rounded = round_size(block.requested_size, config.roundup_power2_divisions)
            rest = block.size - rounded
            total += 1
            lawful += rest == 0 or (rest > 0 and not config.splits(rounded, rest, is_small=segment.is_small))
    return lawful, total


def replay_device(device: RecordedDevice) -> SnapshotReplay:
    """Replay one device's events from their start.

    Raises:
        ValueError: the events do not match the segments, or start inside an expandable range.
    """
    start = state_before(device)
    top = max((segment.address + segment.total_size for segment in start), default=FIRST_ADDRESS)
    bottom = min((segment.address for segment in start), default=FIRST_ADDRESS)
    exact = _Run(device, start, None)
    actions = [event.action for event in device.events]
    return SnapshotReplay(
        recorded=_recorded(device, start),
        at_their_addresses=exact.outcome(),
        rising=_Run(device, start, lambda: rising(top)).outcome(),
        falling=_Run(device, start, lambda: falling(bottom)).outcome(),
        start_reserved_bytes=sum(segment.total_size for segment in start),
        num_allocs=actions.count("alloc"),
        num_segments=actions.count("segment_alloc") + actions.count("segment_map"),
        num_events=len(actions),
        num_same_events=sum(map(_is_same, device.events, exact.allocator.history or ())),
        same_end=_plain(exact.allocator.segments()) == _plain(device.segments),
    )


def _is_same(recorded: AllocatorEvent, ours: AllocatorEvent) -> bool:
    return recorded[1:] == ours[1:]


def _recorded(device: RecordedDevice, start: Sequence[Segment]) -> Outcome:
    reserved = peak = sum(segment.total_size for segment in start)
    for event in device.events:
        reserved += event.size * _RESERVES.get(event.action, 0)
        peak = max(peak, reserved)
    return Outcome(
        allocated_bytes=device.allocated_bytes, reserved_bytes=device.reserved_bytes, peak_reserved_bytes=peak
    )


def _plain(segments: Sequence[Segment]) -> list[tuple[object, ...]]:
    """Return all that a snapshot says of segments, by address."""
    return sorted(
        (segment.address, segment.total_size, segment.stream, segment.is_small, *segment.blocks) for segment in segments
    )


class _Run:
    """Runs the model on a record's requests."""

    def __init__(self, device: RecordedDevice, start: Sequence[Segment], place: Callable[[], Placement] | None) -> None:
        self._elsewhere = None if place is None else place()
        self._due: deque[AllocatorEvent] = deque()
        """Segments of the card that the model has not reserved."""
        self._addresses = {
            block.address: block.address
            for segment in start
            for block in segment.blocks
            if block.state is not BlockState.INACTIVE
        }
        self._pending: dict[int, int] = {}
        """Recorded address of a freed block -> the stream that it waits for."""
        self._num_waits = 0
        self.allocator = CachingAllocator(device.config, place=self._place, record_history=True)
        self.allocator.adopt(start)
        self._free_pending(start)
        before = None
        for event, after in zip(device.events, (*device.events[1:], None), strict=True):
            self._apply(event, before, after)
            before = event.action

    def outcome(self) -> Outcome:
        """Return the replay's end state."""
        return Outcome(
            allocated_bytes=self.allocator.allocated_bytes,
            reserved_bytes=self.allocator.reserved_bytes,
            peak_reserved_bytes=self.allocator.peak_reserved_bytes,
        )

    def _place(self, size: int, alignment: int) -> int:
        if self._elsewhere is not None:
            return self._elsewhere(size, alignment)
        # A segment that the card did not take lies nowhere near: what follows from it is no longer as recorded.
        return self._due.popleft().address if self._due else 1 << 62

    def _apply(self, event: AllocatorEvent, before: str | None, after: AllocatorEvent | None) -> None:
        allocator = self.allocator
        match event.action:
            case "segment_alloc" | "segment_map":
                self._due.append(event)
            case "segment_free" | "segment_unmap" if event.action != before:
                allocator.empty_cache()
            case "alloc":
                self._addresses[event.address] = allocator.malloc(event.size, event.stream)
                self._due.clear()
            case "free_requested":
                self._free(event.address, waits=after is None or after[1:3] != ("free_completed", event.address))
            case "free_completed" if event.address in self._pending:
                allocator.complete_stream(self._pending.pop(event.address))

    def _free_pending(self, start: Sequence[Segment]) -> None:
        """Free the blocks that waited for another stream when the record began."""
        pending = [b for segment in start for b in segment.blocks if b.state is BlockState.ACTIVE_PENDING_FREE]
        for block in pending:
            self._free(block.address, waits=True)
        self.allocator.reset_peaks()
        assert self.allocator.history is not None, "it is recorded"
        self.allocator.history.clear()

    def _free(self, recorded: int, *, waits: bool) -> None:
        """Free a block; one that waits for another stream gets a stream of its own to wait for."""
        address = self._addresses.pop(recorded)
        if waits:
            self._num_waits += 1
            self._pending[recorded] = -self._num_waits
            self.allocator.record_stream(address, -self._num_waits)
        self.allocator.free(address)
