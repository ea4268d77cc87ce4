"""Memory taken from the driver: which cached block serves a request, when more is taken, when it goes back.

Rules: ``get_free_block``, ``alloc_block``, ``garbage_collect_cached_blocks``,
``release_available_cached_blocks`` and ``release_blocks`` of ``c10/cuda/CUDACachingAllocator.cpp``, torch
main of 2026.
"""

from bisect import bisect_left

from hybridtrain.virtual_gpu.allocator_blocks import BlockState, FreePool, Heap, HeapBlock
from hybridtrain.virtual_gpu.allocator_config import (
    SEGMENT_STEP_BYTES,
    SMALL_LIMIT_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorConfig,
    segment_size,
)
from hybridtrain.virtual_gpu.allocator_events import AllocatorEvent, record
from hybridtrain.virtual_gpu.expandable_segments import ExpandableSegments, size_after_growth


class SegmentCache:
    """Segments of one device and the free blocks in them. It never waits for a stream: its caller does."""

    def __init__(
        self, config: AllocatorConfig, capacity_bytes: int | None, history: list[AllocatorEvent] | None
    ) -> None:
        self.heap = Heap()
        self.small = FreePool(is_small=True, page_bytes=SMALL_SEGMENT_BYTES)
        self.large = FreePool(is_small=False, page_bytes=config.large_segment_size)
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self._config = config
        self._capacity = capacity_bytes
        self._history = history
        self._ranges: ExpandableSegments | None = None
        if config.expandable_segments:
            self._ranges = ExpandableSegments(self.heap, capacity_bytes, history)
        self._unlimited_reuse = config.max_split_size is None
        # Garbage collection needs a capacity to keep away from, and never touches expandable ranges.
        self._garbage_limit: int | None = None
        if capacity_bytes is not None and config.garbage_collection_threshold > 0 and self._ranges is None:
            self._garbage_limit = int(config.garbage_collection_threshold * capacity_bytes)

    def pool_for(self, size: int) -> FreePool:
        """Return the pool that serves a rounded size."""
        return self.small if size <= SMALL_LIMIT_BYTES else self.large

    def take(self, pool: FreePool, size: int, stream: int) -> HeapBlock | None:
        """Return the best cached block for ``size`` bytes, taken out of its pool; None if none may serve."""
        if self._garbage_limit is not None:
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
        if not (self._unlimited_reuse or self._config.allows_reuse(size, block_size)):
            return None
        del entries[index]
        return self.heap.blocks[address]

    def grow(self, pool: FreePool, size: int, stream: int) -> HeapBlock | None:
        """Return a block in newly reserved memory, in no pool; None when the capacity does not allow it.

        As in torch, the capacity is compared with the classic segment size even when pages are mapped, so
        expandable segments may end above the capacity by less than a page.
        """
        num_bytes = segment_size(size, self._config.large_segment_size)
        if self._capacity is not None and self.reserved_bytes + num_bytes > self._capacity:
            return None
        if self._ranges is not None:
            block = self._ranges.allocate(pool, size, stream)
            self.reserved_bytes = self._ranges.mapped_bytes
        else:
            block = self.heap.add_segment(num_bytes, stream, pool, BlockState.INACTIVE, alignment=SEGMENT_STEP_BYTES)
            self.reserved_bytes += num_bytes
            record(self._history, "segment_alloc", block.address, num_bytes, stream)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def collect_garbage(self) -> None:
        """Release large segments that were cached for long, when more than the threshold is reserved."""
        if self._garbage_limit is None or self.reserved_bytes <= self._garbage_limit:
            return
        excess = self.reserved_bytes - self._garbage_limit
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
        """Release just enough oversize blocks of the stream for ``size`` bytes; tell whether it worked."""
        limit = self._config.max_split_size
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
        """Release every segment without a user, and every page of expandable ranges."""
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
        record(self._history, "segment_free", block.address, block.size, block.stream)

    def _least_growth(self, entries: list[tuple[int, int]], index: int) -> int:
        """Walk on to larger cached blocks while each could grow less than the one before it."""
        blocks = self.heap.blocks
        while index + 1 < len(entries):
            here, further = blocks[entries[index][1]], blocks[entries[index + 1][1]]
            if size_after_growth(further) >= size_after_growth(here):
                break
            index += 1
        return index
