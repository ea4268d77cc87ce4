"""Expandable segments: address ranges into which memory is mapped and from which it is taken, page by page.

One range per stream and pool, a little larger than the card; blocks without memory are ``UNMAPPED``. Rules:
``find_expandable_block``, ``map_block`` and ``unmap_block`` of ``c10/cuda/CUDACachingAllocator.cpp``, torch
main of 2026.
"""

from hybridtrain.virtual_gpu.allocator_blocks import BlockState, FreePool, Heap, HeapBlock
from hybridtrain.virtual_gpu.allocator_events import AllocatorEvent, record

RANGE_WITHOUT_CAPACITY_BYTES = 2**40


class ExpandableSegments:
    """Maps and unmaps pages of the ranges in one heap."""

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
            assert hole is not None, "_find_room found room that is not there"
            block = self._map(hole, min(hole.size, size - block.size))
        pool.remove(block)
        return block

    def unmap(self, block: HeapBlock) -> None:
        """Give back the whole pages inside a cached block; what is left at its ends stays cached."""
        pool, page = block.pool, block.pool.page_bytes
        start, stop = -(-block.address // page) * page, block.end // page * page
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
    """Return the bytes a cached block could have if the addresses behind it were mapped."""
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
