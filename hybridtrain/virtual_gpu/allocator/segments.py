"""Segments of device memory: blocks, pools of free blocks, and when segments are allocated or released.

Rules: ``get_free_block``, ``alloc_block``, ``find_expandable_block``, ``map_block``, ``unmap_block``,
``garbage_collect_cached_blocks``, ``release_available_cached_blocks`` and ``release_blocks`` of
``c10/cuda/CUDACachingAllocator.cpp``, torch main of 2026.

Invariant: when blocks are split or merged, the object at the lower address survives, so a segment's head is one object
for its lifetime.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple, Self

from hybridtrain.virtual_gpu.allocator.allocator_config import (
    SEGMENT_STEP_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorConfig,
    segment_size,
)

Action = Literal[
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom"
]
"""Names as in torch's memory snapshots."""


# A tuple and not a dataclass: up to two are built per call, and a frozen dataclass takes three times as long.
class AllocatorEvent(NamedTuple):
    """One event of the allocator."""

    ordinal: int
    """Index in the history, from 0; exporters' key for times, categories and stack frames."""
    action: Action
    address: int
    """Start of the block, segment or mapped range; for ``oom`` the bytes still free under the capacity."""
    size: int
    """Requested bytes of alloc and free; bytes of the segment or mapped range; rounded bytes of ``oom``."""
    stream: int


def record(history: list[AllocatorEvent] | None, action: Action, address: int, size: int, stream: int) -> None:
    """Append an event with the next ordinal, if history is recorded."""
    if history is not None:
        history.append(AllocatorEvent(len(history), action, address, size, stream))


FIRST_ADDRESS = 0x7F00_0000_0000
"""Address of the first segment; like real ones it has 47 bits, exact as a double in snapshot viewers."""

Placement = Callable[[int, int], int]
"""Driver's placement: (bytes, alignment) -> address of a new segment, without overlap."""


def rising(start: int = FIRST_ADDRESS) -> Placement:
    """Return a driver that puts each segment above all earlier ones."""

    def place(size: int, alignment: int) -> int:
        nonlocal start
        address = -(-start // alignment) * alignment
        # The gap keeps two segments from looking like one: the snapshot viewer joins ranges that touch.
        start = address + size + SEGMENT_STEP_BYTES
        return address

    return place


def falling(end: int = FIRST_ADDRESS) -> Placement:
    """Return a driver that puts each segment below all earlier ones, as CUDA on Linux mostly does.

    Recorded snapshots show it (results/reserved.md). Of equal cached blocks the allocator takes the lowest address: the
    oldest under ``rising``, the newest under ``falling``.
    """

    def place(size: int, alignment: int) -> int:
        nonlocal end
        address = (end - size) // alignment * alignment
        end = address - SEGMENT_STEP_BYTES
        return address

    return place


class BlockState(StrEnum):
    """The state of a block; the first three are the names in torch's memory snapshots."""

    ACTIVE_ALLOCATED = "active_allocated"
    ACTIVE_PENDING_FREE = "active_pending_free"
    """Freed, but another stream may still use it."""
    INACTIVE = "inactive"
    """Cached."""
    UNMAPPED = "unmapped"
    """Addresses of an expandable range without physical memory."""


_UNMAPPED = BlockState.UNMAPPED


@dataclass(slots=True, eq=False)
class HeapBlock:
    """A block of addresses in one state, linked to its neighbours in the segment."""

    address: int
    size: int
    stream: int
    pool: "FreePool" = field(repr=False)
    state: BlockState
    requested_size: int = 0
    previous: Self | None = field(default=None, repr=False)
    next: Self | None = field(default=None, repr=False)
    free_since: int = 0
    """The pool's search counter when the block was inserted."""
    uses: set[int] | None = None
    """Other streams that used the block; usually None."""
    pending_events: int = 0
    """Streams that must complete before a freed block is free."""

    @property
    def end(self) -> int:
        """End address of the block."""
        return self.address + self.size

    @property
    def is_split(self) -> bool:
        """Whether its segment has other blocks."""
        return self.previous is not None or self.next is not None


class FreePool:
    """Free blocks of one size class, per stream: cached ones by (size, address), unmapped ones by address."""

    def __init__(self, *, is_small: bool, page_bytes: int) -> None:
        self.is_small = is_small
        self.page_bytes = page_bytes
        self.cached: dict[int, list[tuple[int, int]]] = {}
        self.unmapped: dict[int, list[int]] = {}
        self.searches = 0

    def insert(self, block: HeapBlock) -> None:
        """Insert an inactive or unmapped block."""
        if block.state is _UNMAPPED:
            insort(self.unmapped.setdefault(block.stream, []), block.address)
            return
        block.free_since = self.searches
        entries = self.cached.get(block.stream)
        if entries is None:
            entries = self.cached[block.stream] = []
        insort(entries, (block.size, block.address))

    def remove(self, block: HeapBlock) -> None:
        """Remove a block, whose size and state must be unchanged since its insertion."""
        if block.state is _UNMAPPED:
            addresses = self.unmapped[block.stream]
            del addresses[bisect_left(addresses, block.address)]
        else:
            entries = self.cached[block.stream]
            del entries[bisect_left(entries, (block.size, block.address))]

    def cached_addresses(self) -> list[int]:
        """Return the addresses of all cached blocks in the allocator's order: stream, size, address."""
        return [address for stream in sorted(self.cached) for _, address in self.cached[stream]]


class Heap:
    """Every block by address."""

    def __init__(self, place: Placement) -> None:
        self.blocks: dict[int, HeapBlock] = {}
        self.heads: dict[int, HeapBlock] = {}
        self._place = place

    def add_segment(self, size: int, stream: int, pool: FreePool, state: BlockState, alignment: int) -> HeapBlock:
        """Create a segment at a multiple of ``alignment``; return its single block, in no pool yet."""
        return self.adopt_segment(self._place(size, alignment), size, stream, pool, state)

    def adopt_segment(self, address: int, size: int, stream: int, pool: FreePool, state: BlockState) -> HeapBlock:
        """Create a segment at a known address; return its single block, in no pool yet."""
        block = HeapBlock(address, size, stream, pool, state)
        self.blocks[address] = self.heads[address] = block
        return block

    def drop_segment(self, head: HeapBlock) -> None:
        """Remove a segment that is a single block again."""
        assert not head.is_split, f"segment at {head.address:#x} is still split"
        del self.blocks[head.address], self.heads[head.address]

    def split(self, block: HeapBlock, size: int) -> HeapBlock:
        """Split ``block`` to ``size`` bytes; return the remainder, in the same state and in no pool."""
        rest = HeapBlock(block.address + size, block.size - size, block.stream, block.pool, block.state)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next = rest
        block.size = size
        self.blocks[rest.address] = rest
        return rest

    def coalesce(self, block: HeapBlock) -> HeapBlock:
        """Merge a block (in no pool) with neighbours of the same state, which leave their pool."""
        after = block.next
        if after is not None and after.state is block.state:
            after.pool.remove(after)
            self._absorb(block, after)
        before = block.previous
        if before is not None and before.state is block.state:
            before.pool.remove(before)
            self._absorb(before, block)
            return before
        return block

    def _absorb(self, lower: HeapBlock, upper: HeapBlock) -> None:
        lower.size += upper.size
        lower.next = upper.next
        if upper.next is not None:
            upper.next.previous = lower
        del self.blocks[upper.address]


RANGE_WITHOUT_CAPACITY_BYTES = 2**40


class ExpandableSegments:
    """Maps and unmaps pages of expandable ranges."""

    def __init__(self, heap: Heap, capacity_bytes: int | None, history: list[AllocatorEvent] | None) -> None:
        self.mapped_bytes = 0
        self._heap = heap
        self._history = history
        memory = RANGE_WITHOUT_CAPACITY_BYTES if capacity_bytes is None else capacity_bytes
        self._range_bytes = memory + memory // 8

    def allocate(self, pool: FreePool, size: int, stream: int) -> HeapBlock:
        """Return a mapped block of at least ``size`` bytes, in no pool, at the lowest address with room."""
        block = self._find_room(pool, size, stream)
        if block.state is BlockState.UNMAPPED:
            block = self._map(block, min(block.size, size))
        while block.size < size:
            hole = block.next
            assert hole is not None, "_find_room returned too little room"
            block = self._map(hole, min(hole.size, size - block.size))
        pool.remove(block)
        return block

    def unmap(self, block: HeapBlock) -> None:
        """Unmap the whole pages inside a cached block; its ends stay cached."""
        pool, page = block.pool, block.pool.page_bytes
        base = max(head for head in self._heap.heads if head <= block.address)  # pages are counted from there
        start = base - (base - block.address) // page * page
        stop = base + (block.end - base) // page * page
        if start >= stop:
            return
        pool.remove(block)
        if start > block.address:
            front, block = block, self._heap.split(block, start - block.address)
            pool.insert(front)
        if stop < block.end:
            pool.insert(self._heap.split(block, stop - block.address))
        block.state = BlockState.UNMAPPED
        self.mapped_bytes -= block.size
        record(self._history, "segment_unmap", block.address, block.size, block.stream)
        block = self._heap.coalesce(block)
        if block.is_split:
            pool.insert(block)
        else:
            self._heap.drop_segment(block)

    def _find_room(self, pool: FreePool, size: int, stream: int) -> HeapBlock:
        """Return the first of a run of cached and unmapped blocks that hold ``size`` bytes together."""
        for address in pool.unmapped.get(stream, ()):
            first = self._heap.blocks[address]
            if first.previous is not None and first.previous.state is BlockState.INACTIVE:
                first = first.previous
            if _has_room(first, size):
                return first
        num_pages = -(-max(self._range_bytes, size) // pool.page_bytes)
        block = self._heap.add_segment(
            num_pages * pool.page_bytes, stream, pool, BlockState.UNMAPPED, alignment=pool.page_bytes
        )
        pool.insert(block)
        return block

    def _map(self, hole: HeapBlock, size: int) -> HeapBlock:
        """Map the pages of the first ``size`` bytes and return the cached block that they became part of."""
        pool = hole.pool
        pool.remove(hole)
        mapped = -(-size // pool.page_bytes) * pool.page_bytes
        if mapped < hole.size:
            pool.insert(self._heap.split(hole, mapped))
        hole.state = BlockState.INACTIVE
        self.mapped_bytes += mapped
        record(self._history, "segment_map", hole.address, mapped, hole.stream)
        block = self._heap.coalesce(hole)
        pool.insert(block)
        return block


def size_after_growth(block: HeapBlock) -> int:
    """Return the size of a cached block if the addresses behind it were mapped."""
    after = block.next
    if after is not None and after.state is BlockState.UNMAPPED:
        return block.size + after.size
    return block.size


def _has_room(block: HeapBlock | None, size: int) -> bool:
    num_bytes = 0
    without_user = {BlockState.INACTIVE, BlockState.UNMAPPED}
    while num_bytes < size and block is not None and block.state in without_user:
        num_bytes += block.size
        block = block.next
    return num_bytes >= size


class SegmentCache:
    """Segments of one device and their free blocks. Waiting for streams is the caller's task."""

    def __init__(
        self,
        config: AllocatorConfig,
        capacity_bytes: int | None,
        history: list[AllocatorEvent] | None,
        place: Placement,
    ) -> None:
        self.config = config
        self.capacity_bytes = capacity_bytes
        """Cap on reserved bytes; a change applies from the next request on."""
        self.history = history
        self.heap = Heap(place)
        self.small = FreePool(is_small=True, page_bytes=SMALL_SEGMENT_BYTES)
        self.large = FreePool(is_small=False, page_bytes=config.large_segment_size)
        self.reserved_bytes = 0
        """Bytes allocated from the driver."""
        self.peak_reserved_bytes = 0
        """Largest ``reserved_bytes`` since the start or the last reset."""
        self._ranges: ExpandableSegments | None = None
        if config.expandable_segments:
            self._ranges = ExpandableSegments(self.heap, capacity_bytes, history)
        self._unlimited_reuse = config.max_split_size is None
        # Garbage collection needs a capacity to keep away from, and never touches expandable ranges.
        self.ages_blocks = (
            capacity_bytes is not None and config.garbage_collection_threshold > 0 and self._ranges is None
        )

    def take(self, pool: FreePool, size: int, stream: int) -> HeapBlock | None:
        """Take the best cached block for ``size`` bytes out of its pool; None if there is none."""
        if self.ages_blocks:
            pool.searches += 1
        entries = pool.cached.get(stream)
        if not entries:
            return None
        index = bisect_left(entries, (size, 0))
        if index == len(entries):
            return None
        if self._ranges is not None:
            index = self._least_growth(entries, index)
        block_size, address = entries[index]
        if not (self._unlimited_reuse or self.config.allows_reuse(size, block_size)):
            return None
        del entries[index]
        return self.heap.blocks[address]

    def grow(self, pool: FreePool, size: int, stream: int) -> HeapBlock | None:
        """Reserve memory and return its block, in no pool; None if the capacity is exceeded.

        As in torch, the capacity is compared with the classic segment size even when pages are mapped, so
        expandable segments may end above the capacity by less than a page.
        """
        num_bytes = segment_size(size, self.config.large_segment_size)
        if self.capacity_bytes is not None and self.reserved_bytes + num_bytes > self.capacity_bytes:
            return None
        if self._ranges is not None:
            block = self._ranges.allocate(pool, size, stream)
            self.reserved_bytes = self._ranges.mapped_bytes
        else:
            block = self.heap.add_segment(num_bytes, stream, pool, BlockState.INACTIVE, alignment=SEGMENT_STEP_BYTES)
            self.reserved_bytes += num_bytes
            record(self.history, "segment_alloc", block.address, num_bytes, stream)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def collect_garbage(self) -> None:
        """Release large, long-cached segments if more than the threshold is reserved."""
        if not self.ages_blocks or self.capacity_bytes is None:
            return
        excess = self.reserved_bytes - int(self.config.garbage_collection_threshold * self.capacity_bytes)
        if excess <= 0:
            return
        searches = self.large.searches
        blocks = [self.heap.blocks[address] for address in self.large.cached_addresses()]
        unsplit = [block for block in blocks if not block.is_split]
        while excess > 0 and unsplit:
            # A pass takes all blocks of at least average age, also beyond the excess: it should run rarely.
            mean_age = sum(searches - block.free_since for block in unsplit) / len(unsplit)
            for block in unsplit:
                if searches - block.free_since >= mean_age:
                    self._release(block)
                    excess -= block.size
            unsplit = [block for block in unsplit if searches - block.free_since < mean_age]

    def release_oversize(self, pool: FreePool, size: int, stream: int) -> bool:
        """Release just enough oversize blocks of the stream for ``size`` bytes; return whether it worked."""
        limit = self.config.max_split_size
        if limit is None or self._ranges is not None:
            return False
        entries = pool.cached.get(stream, [])
        index = bisect_left(entries, (size, 0))
        if index < len(entries):  # too large for ``take``, so an oversize block
            self._release(self.heap.blocks[entries[index][1]])
            return True
        released = 0
        while entries and released < size and entries[-1][0] >= limit:
            block = self.heap.blocks[entries[-1][1]]
            released += block.size
            self._release(block)
        return released >= size

    def release_cached(self) -> None:
        """Release all cached segments and all cached pages of expandable ranges."""
        for pool in (self.large, self.small):
            for address in pool.cached_addresses():
                block = self.heap.blocks[address]
                if self._ranges is not None:
                    self._ranges.unmap(block)
                elif not block.is_split:
                    self._release(block)
        if self._ranges is not None:
            self.reserved_bytes = self._ranges.mapped_bytes

    def _release(self, block: HeapBlock) -> None:
        block.pool.remove(block)
        self.heap.drop_segment(block)
        self.reserved_bytes -= block.size
        record(self.history, "segment_free", block.address, block.size, block.stream)

    def _least_growth(self, entries: list[tuple[int, int]], index: int) -> int:
        """Walk on to larger cached blocks while each could grow less than the one before it."""
        blocks = self.heap.blocks
        while index + 1 < len(entries):
            here, further = blocks[entries[index][1]], blocks[entries[index + 1][1]]
            if size_after_growth(further) >= size_after_growth(here):
                break
            index += 1
        return index
