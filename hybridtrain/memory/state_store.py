"""State of parameters beside weight and gradient: master weight, optimizer state, predictor state."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, prod

import torch
from torch import Tensor, nn

from hybridtrain.memory.formats import (
    DynamicInt8State,
    PlainState,
    StateFormat,
    StoredWeight,
    TensorSpec,
    WeightFormats,
    parts,
    state_format,
    weight_part,
)
from hybridtrain.memory.shards import Shards, overlap
from hybridtrain.memory.slices import StateSlice, StateSpec
from hybridtrain.memory.tier import Ticket, TierBuffer
from hybridtrain.memory.tier_tensor import Piece, Stored, TierTensor, lay_out, new_stored, padded, write_slice
from hybridtrain.models.block_model import Unit
from hybridtrain.plan.memory_plan import Cell, PhasePlan, UpdateDevice
from hybridtrain.plan.placement import Codec, Placement
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass

_SQUEEZED_ELEMENTS = 1 << 22
"""Elements converted to or from 8-bit codes at a time: temporaries of 16 MiB."""


@dataclass(slots=True)
class StateSlot:
    """One state tensor of a parameter, in any format."""

    spec: StateSpec
    storage: StateFormat
    specs: tuple[TensorSpec, ...]
    placement: Placement
    tensors: tuple[Stored, ...] = ()
    """Stored tensors, one per spec; empty before step 1."""
    is_fresh: bool = True
    """Whether it was never written, so that an offloaded one is set instead of fetched."""

    @property
    def is_elementwise(self) -> bool:
        """Whether it has one value per element of the parameter."""
        return self.spec.shape is None

    def pieces(self, part: slice, *, writes: bool = True) -> list[Piece]:
        """Return its pieces for a slice of the parameter."""
        return [
            Piece(tensor, self.storage.part(i, part), writes=writes, fill=spec.zero if self.is_fresh else None)
            for i, (spec, tensor) in enumerate(zip(self.specs, self.tensors, strict=True))
        ]

    def reset(self) -> None:
        """Reset the values to those before the first update; offloaded tensors keep their memory."""
        self.is_fresh = True
        if self.placement is Placement.DEVICE:
            self.tensors = ()

    def slice_of(self, tensors: Sequence[Tensor], num_elements: int) -> StateSlice:
        """Return a slice of ``num_elements`` whose stored tensors are on the device, or on the host."""
        return StateSlice(self.storage, tuple(tensors), num_elements)


@dataclass(slots=True)
class ParameterState:
    """State of one parameter."""

    parameter: nn.Parameter
    master_weight: Stored | None
    """Master weight in the weight's format; flat if this rank has a range of it."""
    slots: tuple[StateSlot, ...]
    """State of the optimizer."""
    extra: tuple[StateSlot, ...] = ()
    """Extra state of the plan, for predictors that record a weight's trajectory."""
    arriving: list[Ticket] = field(default_factory=list)
    """Fetches in progress; waited for before use."""
    leaving: list[TierBuffer] = field(default_factory=list)
    """Source buffers, freed after the fetch."""
    own: slice | None = None
    """Range of the parameter's elements with state here; None: all."""

    @property
    def count(self) -> int:
        """Elements with state here."""
        return self.parameter.numel() if self.own is None else self.own.stop - self.own.start

    def stored(self) -> list[Stored]:
        """Return all tensors: optimizer state, extra state, master weight."""
        tensors = [tensor for slot in (*self.slots, *self.extra) for tensor in slot.tensors]
        return [*tensors, *([] if self.master_weight is None else [self.master_weight])]

    @property
    def num_bytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in self.stored())


class StateStore:
    """Owns the state of every parameter, allocated at the first update."""

    def __init__(self, plan: PhasePlan, formats: WeightFormats, shards: Shards) -> None:
        self.formats = formats
        self.shards = shards
        self.copies = shards.copies
        self._plan = plan
        self._states: defaultdict[str, list[ParameterState]] = defaultdict(list)
        self._away: list[tuple[ParameterState, str]] = []
        self._master_is_away = False
        self.born_after = 0
        """Step at which the state was zero: bias correction counts from there."""

    @torch.no_grad()
    def initialize(
        self, unit: str, parameter: nn.Parameter, initial: Tensor, weight: StoredWeight, specs: Sequence[StateSpec]
    ) -> None:
        """Write the fp32 ``initial`` value of a unit's next parameter to ``weight``, and store its master weight."""
        master: Stored | None = self.formats.of(weight).create(initial, weight)
        if isinstance(master, Tensor):
            if self.shards.cuts_state:
                master = master.view(-1)[self.shards.own(master.numel())].clone()
            self.copies.observer.label(master, TensorClass.MASTER, unit)
            if self._plan.master.placement is not Placement.DEVICE:
                master = self._store(master, self._plan.master.placement, TensorClass.MASTER, unit)
        self._add(unit, parameter, master, specs)

    @torch.no_grad()
    def initialize_slices(
        self,
        unit: str,
        parameter: nn.Parameter,
        slices: Iterable[tuple[slice, Tensor]],
        weight: StoredWeight,
        specs: Sequence[StateSpec],
    ) -> None:
        """Initialize from float32 values, slice by slice."""
        storage = self.formats.of(weight)
        master: Stored | None = None
        for part, value_P in slices:
            created_P = storage.create(value_P, weight_part(weight, part))
            if created_P is not None:
                if master is None:
                    shape, place = self._shape(parameter), self._plan.master.placement
                    master = new_stored(shape, created_P.dtype, place, TensorClass.MASTER, unit, self.copies)
                found, kept = overlap(part, self.shards.own(parameter.numel()))
                if kept.stop > kept.start:
                    write_slice(master, kept, created_P[found], self.copies)
        self._add(unit, parameter, master, specs)

    def _add(self, unit: str, parameter: nn.Parameter, master: Stored | None, specs: Sequence[StateSpec]) -> None:
        shape, cell = self._shape(parameter), self._plan.optim_state
        slots = tuple(self._slot(spec, shape, cell, parameter.numel()) for spec in specs)
        history = Cell(placement=cell.placement, codec=self._plan.history_codec)
        names = (f"history{number}" for number in range(self._plan.history_tensors))
        extra = tuple(self._slot(StateSpec(name), shape, history, parameter.numel()) for name in names)
        own = self.shards.own(parameter.numel()) if self.shards.cuts_state else None
        self._states[unit].append(ParameterState(parameter, master, slots, extra, own=own))

    def _shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        # Of what is held of a parameter's state.
        own = self.shards.own(parameter.numel())
        return (own.stop - own.start,) if self.shards.cuts_state else tuple(parameter.shape)

    def _slot(self, spec: StateSpec, shape: tuple[int, ...], cell: Cell, count: int) -> StateSlot:
        """Return a slot for state of a shape; ``count``: elements of the whole parameter, which decide the format."""
        if spec.shape is not None:  # next to nothing: it stays at hand, and exact
            small, on_host = PlainState(), self._plan.update_on is UpdateDevice.HOST
            return StateSlot(spec, small, small.specs(spec.shape), Placement.HOST if on_host else Placement.DEVICE)
        storage = state_format(cell.codec, count, signed=spec.signed)
        return StateSlot(spec, storage, storage.specs(shape), cell.placement)

    def acquire(self, unit: Unit, *, wants_moments: bool = True) -> list[ParameterState]:
        """Return the states of ``unit`` by parameter; allocates missing ones, without moments only extra state."""
        states = self._states[unit.name]
        for slots in ([state.slots for state in states if wants_moments], [state.extra for state in states]):
            self._allocate(unit.name, [slot for group in slots for slot in group if not slot.tensors])
        return self.settled(unit.name)

    def settled(self, unit: str) -> list[ParameterState]:
        """Return a unit's states after all their copies have finished; they may not exist yet."""
        states = self._states[unit]
        for state in states:
            while state.arriving:
                self.copies.wait(state.arriving.pop(0))
            while state.leaving:
                self.copies.release(state.leaving.pop(0))
        return states

    def of(self, unit: str) -> list[ParameterState]:
        """Return a unit's states without waiting for copies; they may not exist yet."""
        return self._states[unit]

    def streamed_bytes(self, state: ParameterState, num_elements: int) -> int:
        """Return the bytes of ``num_elements`` of a parameter's state in a stream's slot, padding included."""
        share = min(1.0, num_elements / max(state.count, 1))
        below = (slot for slot in (*state.slots, *state.extra) if slot.placement is not Placement.DEVICE)
        sizes = (prod(spec.shape) * spec.dtype.itemsize for slot in below for spec in slot.specs)
        total = sum(padded(ceil(size * share)) for size in sizes)
        if isinstance(state.master_weight, TierTensor):
            total += padded(ceil(state.master_weight.numel() * share) * state.master_weight.dtype.itemsize)
        return total

    def items(self) -> Iterator[tuple[str, list[ParameterState]]]:
        """Yield unit names and states, for saving and loading."""
        yield from self._states.items()

    def _allocate(self, unit: str, slots: Sequence[StateSlot]) -> None:
        """Give slots tensors of zeros on the device, or unset ones in one buffer below it."""
        for slot in slots:
            if slot.placement is Placement.DEVICE:
                slot.tensors = tuple(self._zeros(spec, unit) for spec in slot.specs)
                slot.is_fresh = False
        below = [slot for slot in slots if slot.placement is not Placement.DEVICE]
        if not below:
            return
        layout = lay_out((spec.shape, spec.dtype) for slot in below for spec in slot.specs)
        buffer = self.copies.allocate(layout.num_bytes, below[0].placement, TensorClass.OPTIM_STATE, unit)
        fields = iter(layout.fields)
        for slot in below:
            slot.tensors = tuple(TierTensor.of(buffer, next(fields)) for _ in slot.specs)
            slot.is_fresh = True

    def _zeros(self, spec: TensorSpec, unit: str) -> Tensor:
        tensor = torch.full(spec.shape, spec.zero, dtype=spec.dtype, device=self.copies.device)
        self.copies.observer.label(tensor, TensorClass.OPTIM_STATE, unit)
        return tensor

    # ---- through a phase that does not need it

    @torch.no_grad()
    def store_away(self, moments: Cell, master: Cell | None, *, step: int) -> None:
        """Move optimizer state and master weights off the device according to the new phase's cells.

        Args:
            moments: Placement HOST or DROPPED, or codec INT8_BLOCKS; others change nothing.
            master: Placement; only HOST moves it. None: it moves with the weights.
            step: Steps done so far; dropped state restarts from zero after it.
        """
        self._master_is_away = master is not None and master.placement is Placement.HOST
        resident, is_dropped = list(self._resident()), moments.placement is Placement.DROPPED
        if is_dropped:  # wherever it lives; buffers below the device are written anew
            for slot in (slot for states in self._states.values() for state in states for slot in state.slots):
                slot.reset()
            self.born_after = step
        for unit, state in resident:
            if self._master_is_away and isinstance(state.master_weight, Tensor):
                state.master_weight = self._store(state.master_weight, Placement.HOST, TensorClass.MASTER, unit)
            slots = [slot for slot in state.slots if slot.is_elementwise]  # rows and columns: there is nothing to gain
            if moments.placement is Placement.HOST:
                for slot in (*slots, *state.extra):
                    slot.tensors = tuple(
                        self._store(tensor, Placement.HOST, TensorClass.OPTIM_STATE, unit) for tensor in slot.tensors
                    )
            elif moments.codec is Codec.INT8_BLOCKS and not is_dropped:
                for slot in slots:
                    if isinstance(slot.storage, PlainState):  # 8-bit codes on the device, however small it is
                        storage = DynamicInt8State(slot.spec.signed)
                        self._convert(slot, storage, storage.specs(tuple(state.parameter.shape)), state, unit)
            self._away.append((state, unit))

    @torch.no_grad()
    def fetch_back(self) -> None:
        """Start fetching all state back in update order; each update waits for its own."""
        for state, unit in self._away:
            for slot in state.slots:
                count, shape = state.parameter.numel(), tuple(state.parameter.shape)
                home = self._slot(slot.spec, shape, self._plan.optim_state, count)
                if slot.tensors and home.storage != slot.storage:  # codes that were made on the way into PREDICT
                    self._convert(slot, home.storage, home.specs, state, unit)
            if self._master_is_away and state.master_weight is not None:
                state.master_weight = self._fetch(state, state.master_weight, TensorClass.MASTER, unit)
            for slot in (*state.slots, *state.extra):
                slot.tensors = tuple(self._fetch(state, t, TensorClass.OPTIM_STATE, unit) for t in slot.tensors)
        self._away.clear()
        self._master_is_away = False

    def leave_master(self) -> None:
        """Keep the master weights in place; they move with the weights."""
        self._master_is_away = False

    def _resident(self) -> Iterator[tuple[str, ParameterState]]:
        for unit, states in self._states.items():
            for state in states:
                if any(isinstance(tensor, Tensor) for slot in state.slots for tensor in slot.tensors):
                    yield unit, state

    def _store(self, stored: Stored, placement: Placement, tensor_class: TensorClass, unit: str) -> Stored:
        if isinstance(stored, TierTensor):
            return stored
        buffer = self.copies.allocate(stored.nbytes, placement, tensor_class, unit)
        self.copies.wait(self.copies.store(stored, buffer))
        return TierTensor(buffer, 0, tuple(stored.shape), stored.dtype)

    def _fetch(self, state: ParameterState, stored: Stored, tensor_class: TensorClass, unit: str) -> Stored:
        if isinstance(stored, Tensor):
            return stored
        tensor = self.copies.empty(stored.shape, stored.dtype, tensor_class, unit)
        state.arriving.append(self.copies.fetch(tensor, stored.buffer, stored.offset, [self.copies.mark()]))
        state.leaving.append(stored.buffer)
        return tensor

    def _convert(
        self, slot: StateSlot, storage: StateFormat, specs: tuple[TensorSpec, ...], state: ParameterState, unit: str
    ) -> None:
        tensors = tuple(self._zeros(spec, unit) for spec in specs)
        resident = [tensor for tensor in slot.tensors if isinstance(tensor, Tensor)]
        assert len(resident) == len(slot.tensors), "state below the device cannot change its format"
        count = state.parameter.numel()
        old, new = slot.slice_of(resident, count), StateSlice(storage, tensors, count)
        for part in parts(count, _SQUEEZED_ELEMENTS):
            new.part(part).store(old.part(part).load())
        slot.storage, slot.specs, slot.tensors = storage, specs, tensors
