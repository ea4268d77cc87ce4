"""Blocks of device addresses, linked inside their segment, and the pools that hold the free ones.

A reader must keep one rule: when blocks are cut or joined, the object at the lower address survives. So the
head of a segment is the same object for the segment's whole life.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from hybridtrain.virtual_gpu.allocator_config import SEGMENT_STEP_BYTES

FIRST_ADDRESS = 0x7F00_0000_0000
"""Where segments start; real addresses have 47 bits too, and a snapshot viewer reads them as doubles."""


class BlockState(StrEnum):
    """What a block is at the moment; the first three are the names in torch's memory snapshots."""

    ACTIVE_ALLOCATED = "active_allocated"
    ACTIVE_PENDING_FREE = "active_pending_free"
    """Freed, while another stream may still read it."""
    INACTIVE = "inactive"
    """Cached: memory without a user."""
    UNMAPPED = "unmapped"
    """Addresses of an expandable range without memory behind them."""


_UNMAPPED = BlockState.UNMAPPED


@dataclass(slots=True, eq=False)
class HeapBlock:
    """A run of addresses in one state. Neighbours belong to the same segment."""

    address: int
    size: int
    stream: int
    pool: "FreePool" = field(repr=False)
    state: BlockState
    requested_size: int = 0
    previous: Self | None = field(default=None, repr=False)
    next: Self | None = field(default=None, repr=False)
    free_since: int = 0
    """Count of the pool's searches when the block was last put into it."""
    uses: set[int] | None = None
    """Other streams that used the block; None is the usual case."""
    pending_events: int = 0
    """Streams that must complete before a freed block is free."""

    @property
    def end(self) -> int:
        """First address behind the block."""
        return self.address + self.size

    @property
    def is_split(self) -> bool:
        """Whether the segment holds other blocks too."""
        return self.previous is not None or self.next is not None


class FreePool:
    """Blocks without a user of one size class, per stream: cached by (size, address), unmapped by address."""

    def __init__(self, *, is_small: bool, page_bytes: int) -> None:
        self.is_small = is_small
        self.page_bytes = page_bytes
        self.cached: dict[int, list[tuple[int, int]]] = {}
        self.unmapped: dict[int, list[int]] = {}
        self.searches = 0

    def insert(self, block: HeapBlock) -> None:
        """Take in a block that is inactive or unmapped."""
        if block.state is _UNMAPPED:
            insort(self.unmapped.setdefault(block.stream, []), block.address)
            return
        block.free_since = self.searches
        entries = self.cached.get(block.stream)
        if entries is None:
            entries = self.cached[block.stream] = []
        insort(entries, (block.size, block.address))

    def remove(self, block: HeapBlock) -> None:
        """Take out a block whose size and state are still those it was inserted with."""
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
    """Every block by address. Segments get rising addresses, never used twice."""

    def __init__(self) -> None:
        self.blocks: dict[int, HeapBlock] = {}
        self.heads: dict[int, HeapBlock] = {}
        self._next_address = FIRST_ADDRESS

    def add_segment(self, size: int, stream: int, pool: FreePool, state: BlockState, alignment: int) -> HeapBlock:
        """Return the one block, in no pool yet, of a new segment at a multiple of ``alignment``."""
        address = -(-self._next_address // alignment) * alignment
        # The gap keeps two segments from looking like one: the snapshot viewer joins ranges that touch.
        self._next_address = address + size + SEGMENT_STEP_BYTES
        block = HeapBlock(address, size, stream, pool, state)
        self.blocks[address] = self.heads[address] = block
        return block

    def drop_segment(self, head: HeapBlock) -> None:
        """Forget a segment that is one block again."""
        assert not head.is_split, f"segment at {head.address:#x} is still cut"
        del self.blocks[head.address], self.heads[head.address]

    def split(self, block: HeapBlock, size: int) -> HeapBlock:
        """Cut ``block`` to ``size`` bytes and return the rest, of the same state and in no pool."""
        rest = HeapBlock(block.address + size, block.size - size, block.stream, block.pool, block.state)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next = rest
        block.size = size
        self.blocks[rest.address] = rest
        return rest

    def coalesce(self, block: HeapBlock) -> HeapBlock:
        """Join a block that is in no pool with its neighbours of the same state, which leave their pool."""
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
