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
from hybridtrain.memory.formats import StoredWeight
from hybridtrain.memory.tier import HostBytes, Ticket, TierBuffer
from hybridtrain.memory.tier_tensor import ByteLayout, Stored, TierTensor, lay_out
from hybridtrain.memory.weight_slots import (
    WeightSlot,
    bind,
    block_number,
    code_layout,
    grouped,
    packed_blocks,
    rebind,
    streamed_blocks,
    widen,
)
from hybridtrain.models.block_model import BlockModel, Unit
from hybridtrain.models.layers import Head
from hybridtrain.plan.memory_plan import PhasePlan, UpdateDevice
from hybridtrain.plan.placement import Codec, Placement
from hybridtrain.virtual_gpu.observer import MemoryObserver
from hybridtrain.virtual_gpu.tensor_class import TensorClass


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


class WeightStore:
    """Hands out the model's parts with their weights on the device.

    Args:
        model: Built with ``placeholder_scope`` for its packed blocks.
        plan: Where weights live and how they are stored.
        copies: The way to the other tiers.
        observer: Told what the slots are for.
        is_empty: Parts get memory one by one, by ``place``, while another store gives them up.
    """

    def __init__(
        self,
        model: BlockModel,
        plan: PhasePlan,
        copies: CopyEngine,
        observer: MemoryObserver,
        *,
        is_empty: bool = False,
    ) -> None:
        self._model = model
        self._copies = copies
        self._observer = observer
        self.compute_dtype = to_torch_dtype(plan.compute_dtype)
        self._is_int8 = plan.weight.codec is Codec.INT8_BLOCKS
        self._packed = frozenset(packed_blocks(plan, len(model.blocks)))
        self._ranks = {block: rank for rank, block in enumerate(streamed_blocks(plan, len(model.blocks)))}
        """Number of each streamed block among the streamed ones, which decides its slot."""
        self._prefetch_distance = plan.prefetch_distance
        self._placement = plan.weight.placement
        self._visits: list[Visit] = []
        self._position = -1
        self._buffers: dict[int, TierBuffer] = {}
        self._stored_slots: list[WeightSlot] = []
        self._value_slots: list[WeightSlot] = []
        self._homes: dict[int, WeightSlot] = {}
        self._updates_on_host = plan.update_on is UpdateDevice.HOST
        self._mirrors: dict[str, WeightMirror] = {}
        if self._packed:
            self._build(plan)
        for block in () if is_empty else sorted(self._packed):
            names = [name for name, _ in model.blocks[block].named_parameters()]
            bind(model.blocks[block], names, self._give_memory(block))

    def acquire_embedding(self) -> nn.Module:
        """Return the embedding with its weights on the device."""
        return self._model.embedding

    def acquire_head(self) -> Head:
        """Return the head with its weights on the device."""
        return self._model.head

    def is_packed(self, unit: str) -> bool:
        """Return whether a unit's parameters are bound to slots."""
        return block_number(unit) in self._packed

    def stored_tensors(self, unit: str, parameters: Sequence[nn.Parameter]) -> list[tuple[Stored, ...]]:
        """Return what is stored of each parameter where it lives, for saving and loading."""
        block = block_number(unit)
        if block in self._homes:
            return list(grouped(self._stored_layout.views(self._homes[block].flat)))
        if block not in self._buffers:
            return [(parameter.data,) for parameter in parameters]
        buffer = self._buffers[block]
        tensors = [TierTensor(buffer, f.offset, f.shape, f.dtype) for f in self._stored_layout.fields]
        return list(grouped(tensors))

    def reload(self) -> None:
        """Say that what is stored was replaced: slots hold nothing, host copies are made anew."""
        for slot in (*self._stored_slots, *self._value_slots):
            slot.block = None
        for mirror in self._mirrors.values():
            mirror.write()

    def place(self, unit: Unit, *, keeps: bool) -> list[StoredWeight]:
        """Give a unit of another store memory; return it on the device, to be filled before ``initialized``.

        Args:
            unit: Its parameters are bound to the new memory.
            keeps: Whether parameters that have memory of their own stay as they are.
        """
        if self.is_packed(unit.name):
            rebind(self._model.blocks[block_number(unit.name)], self._give_memory(block_number(unit.name)))
        elif not keeps:
            for parameter in unit.tensors:
                own = torch.empty(parameter.shape, dtype=self.compute_dtype, device=self._copies.transfer.device)
                self._observer.label(own, TensorClass.WEIGHT, unit.name)
                parameter.data = own
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
        self._visits = [visit for index, visit in enumerate(packed) if not index or packed[index - 1] != visit]
        self._position = -1

    def acquire(self, block: int) -> nn.Module:
        """Return ``block`` with its weights on the device, and start fetching the ones that come next."""
        if block in self._packed:
            stored = self._load(Visit(block))
            if self._is_int8:
                self._widen(block, stored)
            self._prefetch()
        return self._model.blocks[block]  # a ModuleList's item

    def acquire_stored(self, unit: str, parameters: Sequence[nn.Parameter], *, reads: bool) -> list[StoredWeight]:
        """Return what is stored of each parameter of a unit, on the device, to be changed in place."""
        block = block_number(unit)
        if block not in self._packed:
            return [(parameter.data,) for parameter in parameters]
        slot = self._load(Visit(block, reads))
        if slot.leaving is not None:  # it is about to change
            self._copies.wait(slot.leaving)
            slot.leaving = None
        self._prefetch()
        return list(grouped(self._stored_layout.views(slot.flat)))

    def initialized(self, unit: str, parameters: Sequence[nn.Parameter]) -> None:
        """Say that what is stored of a unit got its first values."""
        self.write_back(unit)
        if self._updates_on_host and block_number(unit) not in self._buffers:
            weights = self.acquire_stored(unit, parameters, reads=True)
            self._mirrors[unit] = WeightMirror(unit, weights, self._copies)

    def write_back(self, unit: str) -> None:
        """Say that what is stored of a unit was changed on the device."""
        block = block_number(unit)
        for value_slot in self._value_slots:
            if value_slot.block == block:
                value_slot.block = None
        if block in self._buffers:
            slot = self._stored_slot(block)
            assert slot.block == block, "a changed block is still in its slot"
            slot.leaving = self._copies.store(slot.flat, self._buffers[block])

    def host_parts(self, unit: str) -> list[StoredWeight] | None:
        """Return what is stored of each parameter in host memory, where an update on the host works; None if dry."""
        block = block_number(unit)
        if block not in self._buffers:
            return self._mirrors[unit].parts()
        views = host_views(self._stored_layout, self._buffers[block])
        return None if views is None else list(grouped(views))

    def refresh(self, unit: str, changed: Ticket) -> None:
        """Say that what is stored in host memory changes until ``changed``; the device is brought up to date."""
        block = block_number(unit)
        for slot in self._value_slots:
            if slot.block == block:
                slot.block = None
        if block not in self._buffers:
            self._mirrors[unit].refresh(changed)
            return
        self._buffers[block].last_store = changed
        for slot in self._stored_slots:
            if slot.block == block:
                slot.block = None

    def _build(self, plan: PhasePlan) -> None:
        shapes = [tuple(parameter.shape) for parameter in self._model.blocks[0].parameters()]
        self._values = lay_out((shape, self.compute_dtype) for shape in shapes)
        self._stored_layout = code_layout(shapes, self.compute_dtype) if self._is_int8 else self._values
        if self._is_int8:
            self._value_slots = [self._slot(self._values, f"values.{i}") for i in range(plan.max_active_layers)]
        if self._ranks:
            num_slots = plan.prefetch_distance + 1 if self._is_int8 else plan.max_active_layers
            self._stored_slots = [
                self._slot(self._stored_layout, f"slot.{i}") for i in range(min(num_slots, len(self._ranks)))
            ]

    def _give_memory(self, block: int) -> list[Tensor]:
        """Make the place where a block is stored; return the values that its parameters are bound to."""
        if block in self._ranks:
            self._buffers[block] = self._copies.allocate(
                self._stored_layout.num_bytes, self._placement, TensorClass.WEIGHT, f"block.{block}"
            )
        else:
            self._homes[block] = self._slot(self._stored_layout, f"block.{block}")
            self._homes[block].block = block
        slots = self._value_slots or self._stored_slots
        rank = block if self._value_slots else self._ranks[block]
        return self._values.views(slots[rank % len(slots)].flat)

    def _slot(self, layout: ByteLayout, name: str) -> WeightSlot:
        flat = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._copies.transfer.device)
        self._observer.label(flat, TensorClass.WEIGHT, name)
        return WeightSlot(flat)

    def _load(self, visit: Visit) -> WeightSlot:
        """Return the slot with what is stored of a block."""
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
        return slot

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
        for visit in islice(ahead, self._prefetch_distance):
            slot = self._stored_slot(visit.block)
            if slot.block != visit.block and not any(slot is other for other in claimed):
                self._fetch(visit)
            claimed.append(slot)

    def _stored_slot(self, block: int) -> WeightSlot:
        return self._stored_slots[self._ranks[block] % len(self._stored_slots)]

    def _fetch(self, visit: Visit) -> None:
        slot = self._stored_slot(visit.block)
        slot.block = visit.block
        if visit.reads:
            after = [self._copies.mark(), *([] if slot.leaving is None else [slot.leaving])]
            slot.arriving = self._copies.fetch(slot.flat, self._buffers[visit.block], after=after)
            slot.leaving = None

    def _widen(self, block: int, stored: WeightSlot) -> None:
        """Turn codes into values of the compute dtype, unless they are there already."""
        slot = self._value_slots[block % len(self._value_slots)]
        if slot.block == block:
            return
        slot.block = block
        widen(self._stored_layout.views(stored.flat), self._model.blocks[block].parameters())
