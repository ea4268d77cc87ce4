"""Device memory of packed blocks' stored weights: own memory for resident blocks, shared slots for streamed ones.

A streamed block always uses the same slot (its number modulo the number of slots), so nothing is allocated in steady
state, and autograd graphs that outlive a visit find their weights again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridtrain.memory.copy_engine import CopyEngine, Gather
from hybridtrain.memory.formats import StoredWeight
from hybridtrain.memory.shards import Shards
from hybridtrain.memory.stored_layout import StoredLayout
from hybridtrain.memory.tier import HostBytes, Ticket, TierBuffer
from hybridtrain.memory.tier_tensor import Stored, TierTensor
from hybridtrain.plan.memory_plan import PhasePlan
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass


class SlotContent(Enum):
    """Which part of a sharded block a slot contains."""

    ROW = 0
    """Only this rank's row."""
    OWN = 1
    """This rank's ranges, in place."""
    WHOLE = 2


@dataclass(slots=True)
class WeightSlot:
    """Device memory that streamed blocks use in turn."""

    flat: Tensor
    """uint8."""
    block: int | None = None
    """The block that it contains, or whose copy is in progress."""
    arriving: Ticket | None = None
    leaving: Ticket | None = None
    row: Tensor | None = None
    """This rank's row in transfer, uint8, for sharded weights."""
    holds: SlotContent = SlotContent.WHOLE
    """The part of a sharded block that it contains."""
    gather: Gather | None = None
    """All-gather of all ranks' rows of the block, started before its use."""

    @classmethod
    def new(cls, copies: CopyEngine, num_bytes: int, name: str, block: int | None = None) -> "WeightSlot":
        """Return a slot with memory of its own."""
        return cls(copies.empty((num_bytes,), torch.uint8, TensorClass.WEIGHT, name), block)


@dataclass(frozen=True, slots=True)
class Visit:
    """A coming use of a block's weights."""

    block: int
    reads: bool = True
    """Whether stored weights must be fetched; an update that overwrites them needs only the memory."""
    is_whole: bool = False
    """Whether a sharded block is used whole, so that it can be gathered ahead."""


class BlockSlots:
    """Moves blocks' stored weights to the device, prefetched for planned visits, and back.

    ``streamed`` blocks are offloaded and share ``num_slots`` slots; ``layout`` describes a block's stored tensors.
    """

    def __init__(
        self, layout: StoredLayout, streamed: Sequence[int], num_slots: int, plan: PhasePlan, shards: Shards
    ) -> None:
        self.layout = layout
        self._ranks = {block: rank for rank, block in enumerate(streamed)}
        self._shards = shards
        self._copies = shards.copies
        self._prefetch_distance = plan.prefetch_distance
        self._gathered_ahead = plan.zero_prefetch
        self._placement = plan.weight.placement
        self._visits: list[Visit] = []
        self._position = -1
        self._homes: dict[int, WeightSlot] = {}
        self._buffers: dict[int, TierBuffer] = {}
        self._slots = [
            WeightSlot.new(self._copies, layout.num_bytes, f"slot.{i}") for i in range(num_slots if streamed else 0)
        ]
        self._buffer_layout = layout.layout
        if self._slots and shards.cuts_weights:
            self._buffer_layout = shards.row_layout(layout.views(self._slots[0].flat))
            for number, slot in enumerate(self._slots):
                slot.row = WeightSlot.new(self._copies, self._buffer_layout.num_bytes, f"row.{number}").flat

    def waits_below(self, block: int) -> bool:
        """Return whether a block is offloaded."""
        return block in self._buffers

    def make_room(self, block: int) -> WeightSlot:
        """Allocate a block's stored weights; return their device memory."""
        name = f"block.{block}"
        if block in self._ranks:
            size = self._buffer_layout.num_bytes
            self._buffers[block] = self._copies.allocate(size, self._placement, TensorClass.WEIGHT, name)
            return self._slot(block)
        self._homes[block] = WeightSlot.new(self._copies, self.layout.num_bytes, name, block)
        return self._homes[block]

    def give_up(self, block: int) -> None:
        """Free a block's memory."""
        self._homes.pop(block, None)
        if block in self._buffers:
            self._copies.release(self._buffers.pop(block))

    def close(self) -> None:
        """Wait for the slots' copies before their memory is freed."""
        for slot in self._slots:
            if slot.gather is not None:
                self._copies.end(slot.gather)
            for ticket in filter(None, (slot.arriving, slot.leaving)):
                self._copies.wait(ticket)

    def forget(self, block: int | None = None) -> None:
        """Invalidate the slot of a block whose stored weights were replaced; None: all slots."""
        for slot in self._slots:
            if block in {None, slot.block}:
                slot.block = None

    def stored(self, block: int) -> list[tuple[Stored, ...]]:
        """Return the stored tensors of each parameter where they live."""
        if block in self._homes:
            return [*self.layout.views(self._homes[block].flat)]
        buffer = self._buffers[block]
        return [*self.layout.grouped(TierTensor.of(buffer, field) for field in self._buffer_layout.fields)]

    def plan_visits(self, visits: Sequence[Visit]) -> None:
        """Plan the order of coming blocks, so that they can be prefetched."""
        before = [None, *(visit.block for visit in visits)]
        self._visits = [visit for visit, last in zip(visits, before, strict=False) if visit.block != last]
        self._position = -1

    def load(self, visit: Visit, wanted: SlotContent = SlotContent.WHOLE) -> WeightSlot:
        """Return the slot of a block once it contains its stored weights; of a sharded block, the wanted part."""
        block, following = visit.block, self._position + 1
        if self._position < 0 or self._visits[self._position].block != block:
            is_planned = following < len(self._visits) and self._visits[following].block == block
            self._position = following if is_planned else -1
        if block in self._homes:
            return self._homes[block]
        slot = self._slot(block)
        if slot.block != block:
            self._fetch(visit)
        if slot.arriving is not None:
            self._copies.wait(slot.arriving)
            slot.arriving = None
        if slot.row is not None and (slot.gather is not None or slot.holds.value < wanted.value):
            self._fill(slot, slot.row, wanted)
        return slot

    def load_to_change(self, visit: Visit) -> list[StoredWeight]:
        """Return the stored tensors of a block by parameter, to be changed in place before ``write_back``."""
        slot = self.load(visit, SlotContent.OWN)
        if slot.leaving is not None:  # it is about to change
            self._copies.wait(slot.leaving)
            slot.leaving = None
        self.prefetch()
        return self.layout.views(slot.flat)

    def write_back(self, block: int) -> None:
        """Write a block's changes on the device back to the tier below it."""
        if block not in self._buffers:
            return
        slot = self._slot(block)
        assert slot.block == block, "the changed block is no longer in its slot"
        if slot.row is not None:
            self._shards.pack(slot.row, self.layout.views(slot.flat))
            slot.holds = SlotContent.OWN
        slot.leaving = self._copies.store(slot.flat if slot.row is None else slot.row, self._buffers[block])

    def host_parts(self, block: int) -> list[StoredWeight] | None:
        """Return a block's stored tensors in host memory, by parameter; None in a dry run."""
        return host_parts(self.layout, self._buffers[block])

    def changed_on_host(self, block: int, changed: Ticket) -> None:
        """Record that the host changes a block's stored weights until the ticket ``changed``."""
        self._buffers[block].last_store = changed
        self.forget(block)

    def prefetch(self) -> None:
        """Start fetching the next blocks, and gathering sharded ones."""
        if self._position < 0:
            return
        current = self._visits[self._position].block
        claimed = [self._slot(current)] if current in self._ranks else []
        # Their content is needed sooner than what could replace it.
        ahead = (visit for visit in self._visits[self._position + 1 :] if visit.block in self._ranks)
        for number, visit in enumerate(islice(ahead, self._prefetch_distance)):
            slot = self._slot(visit.block)
            if slot.block != visit.block and not any(slot is other for other in claimed):
                self._fetch(visit)
            claimed.append(slot)
            may_gather = number < self._gathered_ahead and visit.is_whole and slot.block == visit.block
            if may_gather and slot.row is not None and slot.gather is None and slot.holds is not SlotContent.WHOLE:
                slot.gather = self._shards.gather_ahead(slot.row, [*filter(None, [slot.arriving])])

    def _slot(self, block: int) -> WeightSlot:
        return self._slots[self._ranks[block] % len(self._slots)]

    def _fetch(self, visit: Visit) -> None:
        slot = self._slot(visit.block)
        if slot.gather is not None:  # of a visit that did not come
            self._copies.end(slot.gather)
            slot.gather = None
        slot.block, slot.holds = visit.block, SlotContent.ROW if visit.reads else SlotContent.OWN
        if visit.reads:
            target = slot.flat if slot.row is None else slot.row
            after = [self._copies.mark(), *filter(None, [slot.leaving])]
            slot.arriving = self._copies.fetch(target, self._buffers[visit.block], after=after)
            slot.leaving = None

    def _fill(self, slot: WeightSlot, row: Tensor, wanted: SlotContent) -> None:
        stored = self.layout.views(slot.flat)
        if slot.gather is not None:
            gather, slot.gather, wanted = slot.gather, None, SlotContent.WHOLE
            self._shards.end_gather(gather, stored)
        elif wanted is SlotContent.OWN:
            self._shards.unpack(row, stored)
        else:
            self._shards.gather_row(row, stored)
        slot.holds = wanted


def host_parts(layout: StoredLayout, buffer: TierBuffer) -> list[StoredWeight] | None:
    """Return the stored tensors in a buffer of host memory, by parameter; None in a dry run."""
    if buffer.content is None:
        return None
    assert isinstance(buffer.content, HostBytes), "host tensors without memory"
    with _disable_current_modes():  # host memory is not the ledger's
        return layout.views(buffer.content.tensor)
