"""What the allocator holds, as values: the segments and blocks that a memory snapshot shows."""

from collections.abc import Iterator
from dataclasses import dataclass

from hybridtrain.virtual_gpu.allocator_blocks import BlockState, Heap, HeapBlock


@dataclass(frozen=True, slots=True)
class Block:
    """A run of bytes inside a segment."""

    address: int
    size: int
    requested_size: int
    """Bytes that were asked for; 0 for an inactive block."""
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
    """By address and without gaps; the sizes sum up to ``total_size``."""


def view_segments(heap: Heap, *, is_expandable: bool) -> tuple[Segment, ...]:
    """Return all segments by address."""
    return tuple(
        Segment(
            address=run[0].address,
            total_size=sum(block.size for block in run),
            stream=run[0].stream,
            is_small=run[0].pool.is_small,
            is_expandable=is_expandable,
            blocks=tuple(Block(cut.address, cut.size, cut.requested_size, cut.state) for cut in run),
        )
        for head in heap.heads.values()
        for run in _mapped_runs(head)
    )


def _mapped_runs(head: HeapBlock) -> Iterator[list[HeapBlock]]:
    """Yield the blocks from ``head`` on, cut where addresses have no memory."""
    run: list[HeapBlock] = []
    block: HeapBlock | None = head
    while block is not None:
        if block.state is not BlockState.UNMAPPED:
            run.append(block)
        elif run:
            yield run
            run = []
        block = block.next
    if run:
        yield run
