"""Weights for the forward pass, and their storage: resident, offloaded, or in 8 bits.

Parameters of packed blocks are views of ``BlockSlots`` memory, or of memory that codes are dequantized into.
"""

from collections.abc import Sequence
from math import prod

from torch import nn

from hybridtrain.dtypes import to_torch_dtype
from hybridtrain.memory.block_slots import BlockSlots, Visit, WeightSlot, host_parts
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.formats import StoredWeight, code_format
from hybridtrain.memory.shards import Shards
from hybridtrain.memory.stored_layout import (
    MatrixSlot,
    StoredLayout,
    Values,
    bind,
    block_number,
    packed_blocks,
    rebind,
    streamed_blocks,
    widen,
)
from hybridtrain.memory.tier import Ticket
from hybridtrain.memory.tier_tensor import Stored, lay_out
from hybridtrain.models.adapter import without_adapters
from hybridtrain.models.block_model import BlockModel, Unit
from hybridtrain.models.widening import set_widening
from hybridtrain.plan.memory_plan import PhasePlan, UpdateDevice, WidenBy, suited
from hybridtrain.plan.placement import Placement
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass


class WeightMirror:
    """Host copy of one unit's stored weights."""

    def __init__(self, unit: str, weights: Sequence[StoredWeight], copies: CopyEngine) -> None:
        self._tensors = [tensor for weight in weights for tensor in weight]
        self._copies = copies
        layout = lay_out((tuple(tensor.shape), tensor.dtype) for tensor in self._tensors)
        self._layout = StoredLayout(layout, tuple(map(len, weights)))
        self._buffer = copies.allocate(layout.num_bytes, Placement.HOST, TensorClass.WEIGHT, unit)
        self.write()

    def write(self) -> None:
        """Copy the device's weights to the mirror."""
        for tensor, field in zip(self._tensors, self._layout.layout.fields, strict=True):
            self._copies.wait(self._copies.store(tensor, self._buffer, field.offset))

    def parts(self) -> list[StoredWeight] | None:
        """Return the stored tensors in host memory, by parameter; None in a dry run."""
        return host_parts(self._layout, self._buffer)

    def refresh(self, changed: Ticket) -> None:
        """Update the device once ``changed`` is done."""
        self._buffer.last_store = changed
        after = [self._copies.mark()]
        tickets = [
            self._copies.fetch(tensor, self._buffer, field.offset, after)
            for tensor, field in zip(self._tensors, self._layout.layout.fields, strict=True)
        ]
        for ticket in tickets:
            self._copies.wait(ticket)

    def close(self) -> None:
        """Release the host memory."""
        self._copies.release(self._buffer)


class WeightStore:
    """Provides the model's blocks with their weights on the device.

    The model is built with ``placeholder_scope`` for its packed blocks. If the store ``is_empty``, units get memory one
    by one by ``place``, while another store frees theirs.
    """

    def __init__(self, model: BlockModel, plan: PhasePlan, shards: Shards, *, is_empty: bool = False) -> None:
        plan = suited(plan, len(model.part.blocks))
        self._shards = shards
        self._model = model
        self._copies = shards.copies
        self.compute_dtype = to_torch_dtype(plan.compute_dtype)
        self.codes = code_format(plan)
        """Format of coded matrices; None: they are stored as values."""
        self._is_frozen = plan.adapter_rank > 0
        """Whether packed weights are frozen; adapters have memory of their own."""
        self._packed = frozenset(packed_blocks(plan, model.part.blocks))
        self._value_slots: list[WeightSlot] = []
        self._matrix_slot: MatrixSlot | None = None
        self._updates_on_host = plan.update_on is UpdateDevice.HOST
        self._mirrors: dict[str, WeightMirror] = {}
        self._shapes = [tuple(parameter.shape) for _, parameter in without_adapters(model.blocks[0])]
        """Shapes of a block's parameters."""
        self._values = lay_out((shape, self.compute_dtype) for shape in self._shapes)
        if self._packed and self.codes is not None:
            self._make_value_slots(plan)
        layout = StoredLayout.of(self._shapes, self.compute_dtype, self.codes)
        num_slots = plan.max_active_layers if self.codes is None else plan.prefetch_distance + 1
        self.places = BlockSlots(layout, streamed_blocks(plan, model.part.blocks), num_slots, plan, shards)
        for block in () if is_empty else sorted(self._packed):
            names = [name for name, _ in without_adapters(model.blocks[block])]
            bind(model.blocks[block], names, self._give_memory(block))

    def is_packed(self, unit: str) -> bool:
        """Return whether a unit's trained parameters are views of slots."""
        return block_number(unit) in self._packed and not self._is_frozen

    def is_cut(self, unit: str) -> bool:
        """Return whether this rank stores only its ranges of a unit."""
        return self._shards.cuts_weights and self._waits_below(unit)

    def stored_tensors(self, unit: str, parameters: Sequence[nn.Parameter]) -> list[tuple[Stored, ...]]:
        """Return the stored tensors of each parameter, on any tier, for checkpoints."""
        if not self.is_packed(unit):
            return [(parameter.data,) for parameter in parameters]
        return self.places.stored(block_number(unit))

    def reload(self) -> None:
        """Invalidate slots and refresh host copies after stored weights were replaced."""
        self.places.forget()
        self._forget_values()
        for mirror in self._mirrors.values():
            mirror.write()

    def place(self, unit: Unit, *, keeps: bool) -> list[StoredWeight]:
        """Allocate a unit's memory; return its device tensors, to be filled before ``initialized``.

        Its parameters become views of it; with ``keeps`` those with own memory stay.
        """
        if self.is_packed(unit.name):
            block = block_number(unit.name)
            rebind(self._model.blocks[block].parameters(), self._give_memory(block))
        elif not keeps:
            for parameter in unit.tensors:
                parameter.data = self._copies.empty(parameter.shape, self.compute_dtype, TensorClass.WEIGHT, unit.name)
                set_widening(parameter, None)
        return self.acquire_stored(unit.name, unit.tensors, reads=False)

    def give_up(self, unit: str) -> None:
        """Free a unit's memory."""
        self.places.give_up(block_number(unit))
        if unit in self._mirrors:
            self._mirrors.pop(unit).close()

    def plan_visits(self, visits: Sequence[Visit]) -> None:
        """Plan the order of coming blocks, so that they can be prefetched."""
        self.places.plan_visits([visit for visit in visits if visit.block in self._packed])

    def acquire(self, block: int) -> nn.Module:
        """Return ``block`` with its weights on the device, and start fetching the next blocks."""
        if block in self._packed:
            stored = self.places.load(Visit(block))
            if self._value_slots:
                self._widen(block, stored)
            self.places.prefetch()
        return self._model.blocks[block]  # a ModuleList's item

    def acquire_stored(self, unit: str, parameters: Sequence[nn.Parameter], *, reads: bool) -> list[StoredWeight]:
        """Return the stored tensors of each trained parameter of a unit, on the device, to be changed in place."""
        if not self.is_packed(unit):
            return [(parameter.data,) for parameter in parameters]
        return self.places.load_to_change(Visit(block_number(unit), reads))

    def acquire_frozen(self, unit: Unit) -> list[StoredWeight]:
        """Return the device memory of each frozen parameter of a unit, to be filled before ``write_back``."""
        if block_number(unit.name) in self._packed:
            return self.places.load_to_change(Visit(block_number(unit.name), reads=False))
        for _, parameter in unit.frozen:
            self._copies.observer.label(parameter, TensorClass.WEIGHT, unit.name)
        return [(parameter.data,) for _, parameter in unit.frozen]

    def initialized(self, unit: str, parameters: Sequence[nn.Parameter]) -> None:
        """Write back a unit's initial values, and copy them to the host for host updates."""
        self.write_back(unit)
        if self._updates_on_host and not self._waits_below(unit):
            weights = self.acquire_stored(unit, parameters, reads=True)
            self._mirrors[unit] = WeightMirror(unit, weights, self._copies)

    def write_back(self, unit: str, *, frozen: bool = False) -> None:
        """Write back a unit's stored weights that changed on the device: the trained or the frozen ones."""
        if frozen or not self._is_frozen:
            self._forget_values(block_number(unit))
            self.places.write_back(block_number(unit))

    def host_parts(self, unit: str) -> list[StoredWeight] | None:
        """Return the stored tensors of each parameter in host memory, for updates there; None in a dry run."""
        return self.places.host_parts(block_number(unit)) if self._waits_below(unit) else self._mirrors[unit].parts()

    def refresh(self, unit: str, changed: Ticket) -> None:
        """Update the device with stored weights that the host changes until ``changed``."""
        if not self._is_frozen:
            self._forget_values(block_number(unit))
        if self._waits_below(unit):
            self.places.changed_on_host(block_number(unit), changed)
        else:
            self._mirrors[unit].refresh(changed)

    def _waits_below(self, unit: str) -> bool:
        return self.places.waits_below(block_number(unit)) and not self._is_frozen

    def _make_value_slots(self, plan: PhasePlan) -> None:
        """Allocate the memory that codes are widened into: of the largest matrix, or of some blocks."""
        assert self.codes is not None, "widening of weights that are not codes"
        if plan.widen_by is WidenBy.MATRIX or plan.multiplies_codes:
            size = max(prod(shape) for shape in self._shapes if len(shape) > 1) * self.compute_dtype.itemsize
            self._matrix_slot = MatrixSlot(self.codes, WeightSlot.new(self._copies, size, "values.0").flat)
            return
        size = self._values.num_bytes
        self._value_slots = [WeightSlot.new(self._copies, size, f"values.{i}") for i in range(plan.max_active_layers)]

    def _give_memory(self, block: int) -> list[Values]:
        """Allocate a block's place; return the tensors that its parameters are bound to."""
        place = self.places.make_room(block)
        if self._matrix_slot is not None:
            stored = zip(self.places.layout.views(place.flat), self._shapes, strict=True)
            return [self._matrix_slot.values(weight, shape, self.compute_dtype) for weight, shape in stored]
        if self._value_slots:
            place = self._value_slots[block % len(self._value_slots)]
        return [(view, None) for view in self._values.views(place.flat)]

    def _forget_values(self, block: int | None = None) -> None:
        """Invalidate the widened values of a block; None: of all."""
        for slot in self._value_slots:
            if block in {None, slot.block}:
                slot.block = None
        if self._matrix_slot is not None:
            self._matrix_slot.holder = None

    def _widen(self, block: int, stored: WeightSlot) -> None:
        slot = self._value_slots[block % len(self._value_slots)]
        if slot.block == block:
            return
        slot.block = block
        assert self.codes is not None, "widening of weights that are not codes"
        parameters = (parameter for _, parameter in without_adapters(self._model.blocks[block]))
        widen(self.codes, self.places.layout.views(stored.flat), parameters)
