"""Weights as the forward pass reads them, and as they are stored: the same, or somewhere else, or in 8 bits.

Every block has fixed places: its slot is its number modulo the number of slots, so parameters are bound once, no memory
is allocated in steady state, and a graph that outlives a visit finds its weights again where they were.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from hybridtrain.dtypes import to_torch_dtype
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.formats import StoredWeight, code_format
from hybridtrain.memory.shards import Shards
from hybridtrain.memory.tier import HostBytes, Ticket, TierBuffer
from hybridtrain.memory.tier_tensor import ByteLayout, Stored, TierTensor, lay_out
from hybridtrain.memory.weight_slots import (
    Holds,
    MatrixSlot,
    StoredLayout,
    Values,
    WeightSlot,
    bind,
    block_number,
    packed_blocks,
    rebind,
    streamed_blocks,
    widen,
)
from hybridtrain.models.adapter import without_adapters
from hybridtrain.models.block_model import BlockModel, Unit
from hybridtrain.models.layers import Head
from hybridtrain.models.widening import set_widening
from hybridtrain.plan.memory_plan import PhasePlan, UpdateDevice, WidenBy, suited
from hybridtrain.plan.placement import Placement
from hybridtrain.virtual_gpu.account.observer import MemoryObserver
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass


class WeightMirror:
    """The stored weights of one unit, once more in host memory.

    Args:
        unit: Its name.
        weights: What is stored of each parameter, on the device.
        copies: The way to the host.
    """

    def __init__(self, unit: str, weights: Sequence[StoredWeight], copies: CopyEngine) -> None:
        self._weights = [list(weight) for weight in weights]
        self._copies = copies
        tensors = self._tensors()
        self._layout = lay_out((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        self._buffer = copies.allocate(self._layout.num_bytes, Placement.HOST, TensorClass.WEIGHT, unit)
        self.write()

    def write(self) -> None:
        """Take over what the device holds."""
        for tensor, field in zip(self._tensors(), self._layout.fields, strict=True):
            self._copies.wait(self._copies.store(tensor, self._buffer, field.offset))

    def parts(self) -> list[StoredWeight] | None:
        """Return what is stored of each parameter, in host memory; None in a dry run."""
        views = host_views(self._layout, self._buffer)
        if views is None:
            return None
        rest = iter(views)
        return [tuple(next(rest) for _ in weight) for weight in self._weights]

    def refresh(self, changed: Ticket) -> None:
        """Bring the device up to date once ``changed`` is done."""
        self._buffer.last_store = changed
        after = [self._copies.mark()]
        tickets = [
            self._copies.fetch(tensor, self._buffer, field.offset, after)
            for tensor, field in zip(self._tensors(), self._layout.fields, strict=True)
        ]
        for ticket in tickets:
            self._copies.wait(ticket)

    def close(self) -> None:
        """Give the host memory back."""
        self._copies.release(self._buffer)

    def _tensors(self) -> list[Tensor]:
        return [tensor for weight in self._weights for tensor in weight]


def host_views(layout: ByteLayout, buffer: TierBuffer) -> list[Tensor] | None:
    """Return the tensors of a buffer in host memory; None in a dry run."""
    if buffer.content is None:
        return None
    assert isinstance(buffer.content, HostBytes), "the processor works on host memory"
    with _disable_current_modes():  # host memory is not the ledger's
        return layout.views(buffer.content.tensor)


@dataclass(frozen=True, slots=True)
class Visit:
    """A block whose weights will be asked for."""

    block: int
    reads: bool = True
    """Whether what is stored must be fetched; an update that writes everything anew needs only the place."""
    is_whole: bool = False
    """Whether all of a block is used that is cut among ranks, so that it can be gathered ahead."""


class WeightStore:
    """Hands out the model's parts with their weights on the device.

    Args:
        model: Built with ``placeholder_scope`` for its packed blocks.
        plan: Where weights live and how they are stored.
        copies: The way to the other tiers.
        observer: Told what the slots are for.
        is_empty: Parts get memory one by one, by ``place``, while another store gives them up.
        shards: Whether streamed blocks are cut among ranks; None: they are whole.
    """

    def __init__(
        self,
        model: BlockModel,
        plan: PhasePlan,
        copies: CopyEngine,
        observer: MemoryObserver,
        *,
        is_empty: bool = False,
        shards: Shards | None = None,
    ) -> None:
        plan = suited(plan, len(model.part.blocks))
        self._shards = shards or Shards(copies)
        self._model = model
        self._copies = copies
        self._observer = observer
        self.compute_dtype = to_torch_dtype(plan.compute_dtype)
        self._codes = code_format(plan)
        self._is_frozen = plan.adapter_rank > 0
        """What is packed is never updated; what is trained beside it has memory of its own."""
        self._packed = frozenset(packed_blocks(plan, model.part.blocks))
        self._ranks = {block: rank for rank, block in enumerate(streamed_blocks(plan, model.part.blocks))}
        """Number of each streamed block among the streamed ones, which decides its slot."""
        self._prefetch_distance = plan.prefetch_distance
        self._gathered_ahead = plan.zero_prefetch
        self._placement = plan.weight.placement
        self._visits: list[Visit] = []
        self._position = -1
        self._buffers: dict[int, TierBuffer] = {}
        self._stored_slots: list[WeightSlot] = []
        self._value_slots: list[WeightSlot] = []
        self._matrix_slot: MatrixSlot | None = None
        self._homes: dict[int, WeightSlot] = {}
        self._updates_on_host = plan.update_on is UpdateDevice.HOST
        self._mirrors: dict[str, WeightMirror] = {}
        if self._packed:
            self._build(plan)
        for block in () if is_empty else sorted(self._packed):
            names = [name for name, _ in without_adapters(model.blocks[block])]
            bind(model.blocks[block], names, self._give_memory(block))

    def acquire_embedding(self) -> nn.Module:
        """Return the embedding with its weights on the device."""
        return self._model.embedding

    def acquire_head(self) -> Head:
        """Return the head with its weights on the device."""
        return self._model.head

    def is_packed(self, unit: str) -> bool:
        """Return whether the parameters that a unit trains are bound to slots."""
        return block_number(unit) in self._packed and not self._is_frozen

    def is_cut(self, unit: str) -> bool:
        """Return whether this rank stores its ranges of a unit alone."""
        return self._shards.cuts_weights and self._waits_below(unit)

    def stored_tensors(self, unit: str, parameters: Sequence[nn.Parameter]) -> list[tuple[Stored, ...]]:
        """Return what is stored of each parameter where it lives, for saving and loading."""
        block = block_number(unit)
        if not self.is_packed(unit):
            return [(parameter.data,) for parameter in parameters]
        if block in self._homes:
            return list(self._stored_layout.views(self._homes[block].flat))
        buffer = self._buffers[block]
        fields = self._row_layout.fields if self.is_cut(unit) else self._stored_layout.layout.fields
        return list(self._stored_layout.grouped(TierTensor(buffer, f.offset, f.shape, f.dtype) for f in fields))

    def reload(self) -> None:
        """Say that what is stored was replaced: slots hold nothing, host copies are made anew."""
        for slot in self._stored_slots:
            slot.block = None
        self._forget_values()
        for mirror in self._mirrors.values():
            mirror.write()

    def place(self, unit: Unit, *, keeps: bool) -> list[StoredWeight]:
        """Give a unit of another store memory; return it on the device, to be filled before ``initialized``.

        Args:
            unit: Its parameters are bound to the new memory.
            keeps: Whether parameters that have memory of their own stay as they are.
        """
        if self.is_packed(unit.name):
            rebind(self._model.blocks[block_number(unit.name)].parameters(), self._give_memory(block_number(unit.name)))
        elif not keeps:
            for parameter in unit.tensors:
                own = torch.empty(parameter.shape, dtype=self.compute_dtype, device=self._copies.transfer.device)
                self._observer.label(own, TensorClass.WEIGHT, unit.name)
                parameter.data = own
                set_widening(parameter, None)
        return self.acquire_stored(unit.name, unit.tensors, reads=False)

    def give_up(self, unit: str) -> None:
        """Give a unit's memory back; it is not asked for again."""
        block = block_number(unit)
        self._homes.pop(block, None)
        if block in self._buffers:
            self._copies.release(self._buffers.pop(block))
        if unit in self._mirrors:
            self._mirrors.pop(unit).close()

    def close(self) -> None:
        """Wait for the slots' copies before their memory goes."""
        for slot in self._stored_slots:
            slot.settle(self._copies)

    def plan_visits(self, visits: Sequence[Visit]) -> None:
        """Say which blocks will be asked for, in order, so that they can be fetched ahead."""
        packed = [visit for visit in visits if visit.block in self._packed]
        before = [None, *(visit.block for visit in packed)]
        self._visits = [visit for visit, last in zip(packed, before, strict=False) if visit.block != last]
        self._position = -1

    def acquire(self, block: int) -> nn.Module:
        """Return ``block`` with its weights on the device, and start fetching the ones that come next."""
        if block in self._packed:
            stored = self._load(Visit(block))
            if self._value_slots:
                self._widen(block, stored)
            self._prefetch()
        return self._model.blocks[block]  # a ModuleList's item

    def acquire_stored(self, unit: str, parameters: Sequence[nn.Parameter], *, reads: bool) -> list[StoredWeight]:
        """Return what is stored of each trained parameter of a unit, on the device, to be changed in place."""
        if not self.is_packed(unit):
            return [(parameter.data,) for parameter in parameters]
        return self._acquire_packed(block_number(unit), reads=reads)

    def acquire_frozen(self, unit: Unit) -> list[StoredWeight]:
        """Return the place of each frozen parameter of a unit on the device, to be filled before ``write_frozen``."""
        block = block_number(unit.name)
        if block in self._packed:
            return self._acquire_packed(block, reads=False)
        for _, parameter in unit.frozen:
            self._observer.label(parameter, TensorClass.WEIGHT, unit.name)
        return [(parameter.data,) for _, parameter in unit.frozen]

    def write_frozen(self, unit: Unit) -> None:
        """Say that frozen parameters got their values."""
        self._write_back_packed(block_number(unit.name))

    def _acquire_packed(self, block: int, *, reads: bool) -> list[StoredWeight]:
        slot = self._load(Visit(block, reads), Holds.OWN)
        if slot.leaving is not None:  # it is about to change
            self._copies.wait(slot.leaving)
            slot.leaving = None
        self._prefetch()
        return list(self._stored_layout.views(slot.flat))

    def initialized(self, unit: str, parameters: Sequence[nn.Parameter]) -> None:
        """Say that what is stored of a unit got its first values."""
        self.write_back(unit)
        if self._updates_on_host and not self._waits_below(unit):
            weights = self.acquire_stored(unit, parameters, reads=True)
            self._mirrors[unit] = WeightMirror(unit, weights, self._copies)

    def write_back(self, unit: str) -> None:
        """Say that what is stored of a unit was changed on the device."""
        if not self._is_frozen:
            self._write_back_packed(block_number(unit))

    def _waits_below(self, unit: str) -> bool:
        """Return whether what a unit trains is stored below the device."""
        return block_number(unit) in self._buffers and not self._is_frozen

    def _write_back_packed(self, block: int) -> None:
        self._forget_values(block)
        if block in self._buffers:
            slot = self._stored_slot(block)
            assert slot.block == block, "a changed block is still in its slot"
            if slot.row is not None:
                self._shards.pack(slot.row, self._stored_layout.views(slot.flat))
                slot.holds = Holds.OWN
            slot.leaving = self._copies.store(slot.flat if slot.row is None else slot.row, self._buffers[block])

    def host_parts(self, unit: str) -> list[StoredWeight] | None:
        """Return what is stored of each parameter in host memory, where an update on the host works; None if dry."""
        if not self._waits_below(unit):
            return self._mirrors[unit].parts()
        views = host_views(self._stored_layout.layout, self._buffers[block_number(unit)])
        return None if views is None else list(self._stored_layout.grouped(views))

    def refresh(self, unit: str, changed: Ticket) -> None:
        """Say that what is stored in host memory changes until ``changed``; the device is brought up to date."""
        block = block_number(unit)
        if not self._is_frozen:
            self._forget_values(block)
        if not self._waits_below(unit):
            self._mirrors[unit].refresh(changed)
            return
        self._buffers[block].last_store = changed
        for slot in self._stored_slots:
            if slot.block == block:
                slot.block = None

    def _build(self, plan: PhasePlan) -> None:
        shapes = [tuple(parameter.shape) for _, parameter in without_adapters(self._model.blocks[0])]
        self._shapes = shapes
        self._values = lay_out((shape, self.compute_dtype) for shape in shapes)
        self._stored_layout = StoredLayout.of(shapes, self.compute_dtype, self._codes)
        if self._codes is not None and plan.widen_by is WidenBy.MATRIX:
            largest = max(torch.Size(shape).numel() for shape in shapes if len(shape) > 1)
            flat = self._slot(largest * self.compute_dtype.itemsize, "values.0").flat
            self._matrix_slot = MatrixSlot(self._codes, flat)
        elif self._codes is not None:
            self._value_slots = [
                self._slot(self._values.num_bytes, f"values.{i}") for i in range(plan.max_active_layers)
            ]
        if self._ranks:
            num_slots = plan.max_active_layers if self._codes is None else plan.prefetch_distance + 1
            self._stored_slots = [self._slot(self._stored_layout.num_bytes, f"slot.{i}") for i in range(num_slots)]
        if self._ranks and self._shards.cuts_weights:
            stored = self._stored_layout.views(self._stored_slots[0].flat)
            self._row_layout = self._shards.row_layout(stored)
            for number, slot in enumerate(self._stored_slots):
                slot.row = self._slot(self._row_layout.num_bytes, f"row.{number}").flat

    def _give_memory(self, block: int) -> list[Values]:
        """Make the place where a block is stored; return what its parameters are bound to."""
        if block in self._ranks:
            layout = self._row_layout if self._shards.cuts_weights else self._stored_layout
            self._buffers[block] = self._copies.allocate(
                layout.num_bytes, self._placement, TensorClass.WEIGHT, f"block.{block}"
            )
        else:
            self._homes[block] = self._slot(self._stored_layout.num_bytes, f"block.{block}")
            self._homes[block].block = block
        if self._matrix_slot is not None:
            home = self._homes[block] if block in self._homes else self._stored_slot(block)
            stored = zip(self._stored_layout.views(home.flat), self._shapes, strict=True)
            return [self._matrix_slot.values(weight, shape, self.compute_dtype) for weight, shape in stored]
        slots = self._value_slots or self._stored_slots
        rank = block if self._value_slots else self._ranks[block]
        return [(view, None) for view in self._values.views(slots[rank % len(slots)].flat)]

    def _slot(self, num_bytes: int, name: str) -> WeightSlot:
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._copies.transfer.device)
        self._observer.label(flat, TensorClass.WEIGHT, name)
        return WeightSlot(flat)

    def _load(self, visit: Visit, wanted: Holds = Holds.WHOLE) -> WeightSlot:
        """Return the slot with what is stored of a block, of one that is cut at least the own ranges if that is it."""
        self._advance(visit)
        block = visit.block
        if block in self._homes:
            return self._homes[block]
        slot = self._stored_slot(block)
        if slot.block != block:
            self._fetch(visit)
        if slot.arriving is not None:
            self._copies.wait(slot.arriving)
            slot.arriving = None
        if slot.row is not None and (slot.gather is not None or slot.holds.value < wanted.value):
            self._fill(slot, slot.row, wanted)
        return slot

    def _fill(self, slot: WeightSlot, row: Tensor, wanted: Holds) -> None:
        """Bring the ranges of a cut block to their place."""
        stored = self._stored_layout.views(slot.flat)
        if slot.gather is not None:
            gather, slot.gather, wanted = slot.gather, None, Holds.WHOLE
            self._shards.end_gather(gather, stored)
        elif wanted is Holds.OWN:
            self._shards.unpack(row, stored)
        else:
            self._shards.gather_row(row, stored)
        slot.holds = wanted

    def _advance(self, visit: Visit) -> None:
        if self._position < 0 or self._visits[self._position].block != visit.block:
            following = self._position + 1
            is_planned = following < len(self._visits) and self._visits[following].block == visit.block
            self._position = following if is_planned else -1

    def _prefetch(self) -> None:
        if self._position < 0:
            return
        current = self._visits[self._position].block
        claimed = [self._stored_slot(current)] if current in self._ranks else []
        # Their content is needed sooner than what could replace it.
        ahead = (visit for visit in self._visits[self._position + 1 :] if visit.block in self._ranks)
        for number, visit in enumerate(islice(ahead, self._prefetch_distance)):
            slot = self._stored_slot(visit.block)
            if slot.block != visit.block and not any(slot is other for other in claimed):
                self._fetch(visit)
            claimed.append(slot)
            if number < self._gathered_ahead and visit.is_whole and slot.block == visit.block:
                self._gather_ahead(slot)

    def _gather_ahead(self, slot: WeightSlot) -> None:
        """Start to gather a cut block, unless it is there or on its way."""
        if slot.row is not None and slot.gather is None and slot.holds is not Holds.WHOLE:
            slot.gather = self._shards.gather_ahead(slot.row, [] if slot.arriving is None else [slot.arriving])

    def _stored_slot(self, block: int) -> WeightSlot:
        return self._stored_slots[self._ranks[block] % len(self._stored_slots)]

    def _fetch(self, visit: Visit) -> None:
        slot = self._stored_slot(visit.block)
        if slot.gather is not None:  # of a visit that did not come
            self._copies.end(slot.gather)
            slot.gather = None
        slot.block, slot.holds = visit.block, Holds.ROW if visit.reads else Holds.OWN
        target = slot.flat if slot.row is None else slot.row
        if visit.reads:
            after = [self._copies.mark(), *([] if slot.leaving is None else [slot.leaving])]
            slot.arriving = self._copies.fetch(target, self._buffers[visit.block], after=after)
            slot.leaving = None

    def _forget_values(self, block: int | None = None) -> None:
        """Say that what is stored of a block changes; None: of all."""
        for slot in self._value_slots:
            if block in {None, slot.block}:
                slot.block = None
        if self._matrix_slot is not None:
            self._matrix_slot.forget()

    def _widen(self, block: int, stored: WeightSlot) -> None:
        """Turn codes into values of the compute dtype, unless they are there already."""
        slot = self._value_slots[block % len(self._value_slots)]
        if slot.block == block:
            return
        slot.block = block
        assert self._codes is not None, "only codes are widened"
        parameters = (parameter for _, parameter in without_adapters(self._model.blocks[block]))
        widen(self._codes, self._stored_layout.views(stored.flat), parameters)
