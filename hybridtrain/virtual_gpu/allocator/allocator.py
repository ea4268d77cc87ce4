"""A model of torch's CUDA caching allocator for one device: equal blocks, segments, retries and out-of-memory errors.

It turns a sequence of allocations and frees into allocated, active and reserved bytes without a GPU. Rules:
``malloc``, ``alloc_found_block``, ``free`` and ``free_block`` of ``c10/cuda/CUDACachingAllocator.cpp``, torch
main of 2026. Where the driver places new segments is a parameter: of equal blocks torch takes the lowest. Not modelled:
private pools (CUDA graphs, ``MemPool``).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hybridtrain.errors import OutOfMemoryError
from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.allocator.allocator_config import (
    MIN_BLOCK_BYTES,
    SMALL_LIMIT_BYTES,
    AllocatorConfig,
    round_size,
)
from hybridtrain.virtual_gpu.allocator.segments import (
    AllocatorEvent,
    BlockState,
    FreePool,
    HeapBlock,
    Placement,
    SegmentCache,
    record,
    rising,
)

_EXBIBYTE = 2**60
_LEAST = MIN_BLOCK_BYTES
# Looked up once: an enum's member costs a call each time.
_ALLOCATED = BlockState.ACTIVE_ALLOCATED
_INACTIVE = BlockState.INACTIVE


class AllocatorOutOfMemory(OutOfMemoryError):  # noqa: N818  an outcome that planners report, named like one
    """A request exceeds the capacity, even with all cached segments released. Fields are bytes."""

    def __init__(
        self, *, requested_bytes: int, reserved_bytes: int, allocated_bytes: int, capacity_bytes: int | None
    ) -> None:
        self.requested_bytes = requested_bytes
        self.reserved_bytes = reserved_bytes
        self.allocated_bytes = allocated_bytes
        self.capacity_bytes = capacity_bytes
        limit = "less than 1 EiB" if capacity_bytes is None else format_bytes(capacity_bytes)
        super().__init__(
            f"virtual GPU: no room for {format_bytes(requested_bytes)}, with {format_bytes(allocated_bytes)} "
            f"allocated and {format_bytes(reserved_bytes)} reserved; the limit is {limit}; shrink "
            "the step, or use expandable_segments when much more is reserved than allocated."
        )


@dataclass(frozen=True, slots=True)
class Block:
    """A block inside a segment."""

    address: int
    size: int
    requested_size: int
    """Requested bytes; 0 for an inactive block."""
    state: BlockState


@dataclass(frozen=True, slots=True)
class Segment:
    """Reserved memory in one piece: a classic segment, or a contiguous mapped part of an expandable range."""

    address: int
    total_size: int
    stream: int
    is_small: bool
    is_expandable: bool
    blocks: tuple[Block, ...]
    """Blocks by address, without gaps; their sizes add up to ``total_size``."""


class CachingAllocator(SegmentCache):
    """One device's allocator. All figures are bytes unless they count.

        >>> allocator = CachingAllocator(capacity_bytes=64 * 2**20)
        >>> block = allocator.malloc(3 * 2**20)
        >>> allocator.allocated_bytes, allocator.reserved_bytes  # a segment of 20 MiB, cut
        (3145728, 20971520)
        >>> allocator.free(block)
        >>> allocator.allocated_bytes, allocator.reserved_bytes  # cached
        (0, 20971520)

    Args:
        config: Settings; the defaults are torch's.
        capacity_bytes: Cap on the reserved bytes, as ``torch.cuda.set_per_process_memory_fraction`` sets it;
            None: no cap. CUDA's context and other libraries' memory lie outside.
        record_history: Keep every event, for snapshots.
        place: Placement of new segments; None: rising addresses.
    """

    def __init__(
        self,
        config: AllocatorConfig | None = None,
        capacity_bytes: int | None = None,
        *,
        record_history: bool = False,
        place: Placement | None = None,
    ) -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise ValueError(f"capacity_bytes: {capacity_bytes} is negative; use None for no cap.")
        history: list[AllocatorEvent] | None = [] if record_history else None
        super().__init__(config or AllocatorConfig(), capacity_bytes, history, place or rising())
        self.allocated_bytes = 0
        """Sizes of blocks in use, with rounding and unsplit remainders."""
        self.requested_bytes = 0
        """Requested bytes; fall when the free completes, as in torch."""
        self.active_bytes = 0
        """Allocated bytes, plus freed blocks that wait for another stream."""
        self.inactive_split_bytes = 0
        """Cached blocks whose segment cannot be released; without expandable ranges, as in torch."""
        self.peak_allocated_bytes = 0
        self.peak_requested_bytes = 0
        self.peak_active_bytes = 0
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self._divisions = self.config.roundup_power2_divisions
        self._waiting: defaultdict[int, list[HeapBlock]] = defaultdict(list)

    def malloc(self, size: int, stream: int = 0) -> int:
        """Allocate ``size`` bytes; return the block's address, or 0 (no block) for a size of 0.

        Raises:
            AllocatorOutOfMemory: The capacity is exceeded even with an empty cache.
        """
        if not 0 < size < _EXBIBYTE:
            return self._malloc_odd_size(size)
        rounded = round_size(size, self._divisions) if self._divisions else (size + _LEAST - 1) & -_LEAST
        pool = self.small if rounded <= SMALL_LIMIT_BYTES else self.large
        block = self.take(pool, rounded, stream)
        if block is None:
            block = self._obtain(pool, rounded, stream, size)
        if block.size != rounded or block.previous is not None or block.next is not None:
            self._cut(block, rounded)
        block.state = _ALLOCATED
        block.requested_size = size
        if self.history is not None:
            record(self.history, "alloc", block.address, size, stream)
        taken = block.size
        self.requested_bytes += size
        self.allocated_bytes += taken
        self.active_bytes += taken
        self.peak_requested_bytes = max(self.peak_requested_bytes, self.requested_bytes)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_active_bytes = max(self.peak_active_bytes, self.active_bytes)
        return block.address

    def free(self, address: int) -> None:
        """Free a block: at once, unless other streams used it.

        Raises:
            ValueError: No block in use starts at ``address``.
        """
        if address == 0:
            return
        block = self.heap.blocks.get(address)
        if block is None or block.state is not _ALLOCATED:
            block = self._block_in_use(address)  # raises
        self.allocated_bytes -= block.size
        if self.history is not None:
            record(self.history, "free_requested", address, block.requested_size, block.stream)
        if not block.uses:
            self._complete_free(block)
            return
        block.state = BlockState.ACTIVE_PENDING_FREE
        block.pending_events = len(block.uses)
        for stream in sorted(block.uses):
            self._waiting[stream].append(block)
        block.uses = None

    def record_stream(self, address: int, stream: int) -> None:
        """Record that ``stream`` uses a block; freeing it then waits for that stream.

        Raises:
            ValueError: No block in use starts at ``address``.
        """
        if address == 0:
            return
        block = self._block_in_use(address)
        if stream != block.stream:
            block.uses = {stream, *(block.uses or ())}

    def complete_stream(self, stream: int) -> None:
        """Complete all work on ``stream``; blocks that waited only for it become free.

        Torch does so at its next ``malloc``, which does not affect peaks.
        """
        for block in self._waiting.pop(stream, ()):
            block.pending_events -= 1
            if block.pending_events == 0:
                self._complete_free(block)

    def empty_cache(self) -> None:
        """Wait for all streams and release all cached memory."""
        for stream in sorted(self._waiting):
            self.complete_stream(stream)
        self.release_cached()

    def reset_peaks(self) -> None:
        """Set every peak to the present value."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_requested_bytes = self.requested_bytes
        self.peak_active_bytes = self.active_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def adopt(self, segments: Iterable[Segment]) -> None:
        """Take over another allocator's classic segments, before the first request.

        A block that was freed and waits for a stream counts as allocated: its stream is unknown.
        """
        for segment in segments:
            pool = self.small if segment.is_small else self.large
            block = self.heap.adopt_segment(
                segment.address, segment.total_size, segment.stream, pool, BlockState.INACTIVE
            )
            for cut in segment.blocks:
                rest = self.heap.split(block, cut.size) if cut.size < block.size else None
                if cut.state is _INACTIVE:
                    pool.insert(block)
                    self.inactive_split_bytes += cut.size if len(segment.blocks) > 1 else 0
                else:
                    block.state, block.requested_size = _ALLOCATED, cut.requested_size
                    self.allocated_bytes += cut.size
                    self.requested_bytes += cut.requested_size
                block = rest or block
            self.reserved_bytes += segment.total_size
        self.active_bytes = self.allocated_bytes
        self.reset_peaks()

    def layout(self) -> dict[int, tuple[int, BlockState]] | None:
        """Return size and state of every block by address; None if later behaviour depends on more.

        Allocators with equal layouts serve equal requests equally.
        """
        if self.ages_blocks or any(self._waiting.values()):
            return None
        return {address: (block.size, block.state) for address, block in self.heap.blocks.items()}

    def segments(self) -> tuple[Segment, ...]:
        """Return the reserved segments, by address."""
        return tuple(
            Segment(
                address=run[0].address,
                total_size=sum(block.size for block in run),
                stream=run[0].stream,
                is_small=run[0].pool.is_small,
                is_expandable=self.config.expandable_segments,
                blocks=tuple(Block(cut.address, cut.size, cut.requested_size, cut.state) for cut in run),
            )
            for head in self.heap.heads.values()
            for run in _mapped_runs(head)
        )

    def _malloc_odd_size(self, size: int) -> int:
        if size == 0:
            return 0
        if size < 0:
            raise ValueError(f"size: {size} is negative; bytes are 0 or more.")
        raise self._out_of_memory(size)  # torch refuses before it searches or counts

    def _block_in_use(self, address: int) -> HeapBlock:
        block = self.heap.blocks.get(address)
        if block is None or block.state is not _ALLOCATED:
            raise ValueError(
                f"address {address:#x}: no block in use starts here; pass an address that malloc "
                "returned, and free it only once."
            )
        return block

    def _obtain(self, pool: FreePool, size: int, stream: int, requested: int) -> HeapBlock:
        """Return a block in new memory, giving cached memory back first when the capacity is reached."""
        self.collect_garbage()
        block = self.grow(pool, size, stream)
        if block is None and self.release_oversize(pool, size, stream):
            block = self.grow(pool, size, stream)
        if block is None:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self.grow(pool, size, stream)
        if block is None:
            self.num_ooms += 1
            assert self.capacity_bytes is not None, "out of memory without a capacity"
            # Below 0 when expandable pages ended above the capacity; a card then reports nothing free.
            free_bytes = max(0, self.capacity_bytes - self.reserved_bytes)
            record(self.history, "oom", free_bytes, size, stream)
            raise self._out_of_memory(requested)
        return block

    def _out_of_memory(self, requested: int) -> AllocatorOutOfMemory:
        return AllocatorOutOfMemory(
            requested_bytes=requested,
            reserved_bytes=self.reserved_bytes,
            allocated_bytes=self.allocated_bytes,
            capacity_bytes=self.capacity_bytes,
        )

    def _cut(self, block: HeapBlock, size: int) -> None:
        """Give the bytes of a block beyond ``size`` back to its pool, where the rules allow a split."""
        was_split = block.previous is not None or block.next is not None
        remaining = block.size - size
        leaves_cache = block.size
        if remaining and self.config.splits(size, remaining, is_small=block.pool.is_small):
            block.pool.insert(self.heap.split(block, size))
            leaves_cache = size if was_split else -remaining
        elif not was_split:
            return
        if not self.config.expandable_segments:
            self.inactive_split_bytes -= leaves_cache

    def _complete_free(self, block: HeapBlock) -> None:
        size = block.size
        if self.history is not None:
            record(self.history, "free_completed", block.address, block.requested_size, block.stream)
        self.requested_bytes -= block.requested_size
        self.active_bytes -= size
        block.requested_size = 0
        block.state = _INACTIVE
        joined = self.heap.coalesce(block)
        joined.pool.insert(joined)
        if not self.config.expandable_segments:
            neighbours = joined.size - size
            self.inactive_split_bytes += (joined.size if joined.is_split else 0) - neighbours


def _mapped_runs(head: HeapBlock) -> Iterator[list[HeapBlock]]:
    """Yield the blocks from ``head`` on, cut where addresses have no memory."""
    run: list[HeapBlock] = []
    block: HeapBlock | None = head
    while block is not None:
        if block.state is not BlockState.UNMAPPED:
            run.append(block)
        if run and (block.state is BlockState.UNMAPPED or block.next is None):
            yield run
            run = []
        block = block.next
