"""An optimizer's update of one parameter: of a slice on any tier, of a whole matrix, or of many in one call.

P elements of a flat slice.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtrain.engine.step import StepSettings
from hybridtrain.memory.formats import ExactWeight, StoredWeight, parts
from hybridtrain.memory.slices import StateSlice, WeightSlice
from hybridtrain.memory.state_store import ParameterState, StateSlot, StateStore
from hybridtrain.memory.stored_layout import block_number
from hybridtrain.memory.tier_tensor import SliceStream, Stored, TierTensor, piece_bytes
from hybridtrain.models.block_model import Unit
from hybridtrain.optim.optimizer import Optimizer, Role, UpdateStep
from hybridtrain.virtual_gpu.account.observer import MemoryObserver
from hybridtrain.virtual_gpu.account.repeated_work import Work

RESIDENT_SLICE_ELEMENTS = 1 << 24
"""Elements updated at a time where fp32 temporaries are needed and nothing is streamed: 64 MiB each."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter of a unit in one pass."""

    index: int
    """Index in its unit."""
    state: ParameterState
    role: Role
    grad: Stored | None = None

    @classmethod
    def of(cls, unit: Unit, index: int, state: ParameterState, grad: Stored | None = None) -> "Entry":
        """Return the entry of a unit's parameter."""
        return cls(index, state, Role(tuple(state.parameter.shape), in_block=block_number(unit.name) >= 0), grad)

    @property
    def is_streamed(self) -> bool:
        """Whether some of its tensors are below the device."""
        return any(isinstance(tensor, TierTensor) for tensor in [self.grad, *self.state.stored()])


@dataclass(frozen=True, slots=True)
class Operands:
    """A slice of a parameter, or all of it, with its gradient and state, on the device or on the host."""

    unit: str
    entry: Entry
    part: slice
    weight: WeightSlice
    grad_P: Tensor | None
    state: Sequence[StateSlice]
    extra: Sequence[StateSlice]
    on_host: bool = False


class Update:
    """The updates of one step."""

    def __init__(self, states: StateStore, optimizer: Optimizer, settings: StepSettings) -> None:
        self._formats = states.formats
        self._copies = states.copies
        self._observer = states.copies.observer
        self._born_after = states.born_after
        self._optimizer = optimizer
        self._settings = settings
        self._hook = settings.hook
        self.factor = settings.factor
        """Factor of the gradients, a scalar on their device; None: 1."""

    def is_exact(self, entry: Entry) -> bool:
        """Return whether everything is fp32 and on the device, so that a fused kernel can work on it directly.

        An extra tensor with stochastic rounding is updated in order, so that it draws the same numbers in any
        placement.
        """
        state, formats = entry.state, self._formats
        if not self._optimizer.offers_groups or self._optimizer.needs_whole(entry.role):
            return False
        master = [] if state.master_weight is None else [state.master_weight]
        moments = [tensor for slot in state.slots for tensor in slot.tensors]
        extra = [tensor for slot in state.extra for tensor in slot.tensors]
        return (
            all(isinstance(tensor, Tensor) and tensor.dtype != torch.bfloat16 for tensor in extra)
            and all(isinstance(t, Tensor) and t.dtype == torch.float32 for t in [entry.grad, *moments, *master])
            and len(moments) == len(state.slots)
            and formats.values.in_place
            and formats.values is formats.codes
            and (bool(master) or state.parameter.dtype == torch.float32)
        )

    def key(self, entry: Entry, count: int) -> Hashable:
        """Return the hashable state key of a slice's update; None if a hook has none."""
        return None if self._hook else (self._step(entry), count, entry.state.master_weight is None)

    def of_slice(self, operands: Operands) -> None:
        """Update a slice, run the hook, store the weight."""
        assert operands.grad_P is not None, "an update without a gradient"
        weight, state, step = operands.weight, operands.state, self._step(operands.entry)
        grad_P = self._scaled(operands.grad_P)
        self._optimizer.update(weight, grad_P, state, step)
        self._hooked(weight, grad_P, state, operands.extra, operands.part, step)
        write(weight, self._observer)
        self._observer.cast(grad_P.dtype, torch.float32, grad_P.numel())

    def of_group(self, entries: Sequence[Entry], weights: Sequence[StoredWeight], _: Sequence[Tensor]) -> None:
        """Update fp32 tensors in one fused call, nothing temporary."""
        storage = self._formats.values
        masters = [None if e.state.master_weight is None else _tensor(e.state.master_weight) for e in entries]
        values = [storage.load(weights[e.index], master) for e, master in zip(entries, masters, strict=True)]
        grads = [_tensor(entry.grad) for entry in entries]
        if self.factor is not None:
            torch._foreach_mul_(grads, self.factor)
        moments = [[_tensor(tensor) for slot in entry.state.slots for tensor in slot.tensors] for entry in entries]
        step = self._step(entries[0])
        self._optimizer.update_group(values, grads, moments, step)
        for entry, value, grad in zip(entries, values, grads, strict=True):
            for part in parts(value.numel(), RESIDENT_SLICE_ELEMENTS) if self._hook is not None else ():
                weight = WeightSlice(ExactWeight(), (value.view(-1)[part],), None)
                state = [whole_slice(slot).part(part) for slot in entry.state.slots]
                extra = [whole_slice(slot).part(part) for slot in entry.state.extra]
                self._hooked(weight, grad.view(-1)[part], state, extra, part, step)
        for entry, value, master in zip(entries, values, masters, strict=True):
            storage.store(value, weights[entry.index], master)
            self._observer.cast(torch.float32, weights[entry.index][0].dtype, value.numel())

    def of_whole(self, entry: Entry, weights: Sequence[StoredWeight], _: Sequence[Tensor]) -> None:
        """Update a parameter in one piece; tensors below the device are fetched whole, extra state in slices."""
        state, step, hook = entry.state, self._step(entry), self._hook
        grad = self._scaled(self._brought(entry.grad))
        master = None if state.master_weight is None else self._brought(state.master_weight)
        homes = [(tensor, spec.zero if slot.is_fresh else None) for slot in state.slots
                 for spec, tensor in zip(slot.specs, slot.tensors, strict=True)]  # fmt: skip
        brought = [self._brought(*home) for home in homes]
        rest = [tensor.view(-1) for tensor in brought]
        slices = [slot.slice_of([rest.pop(0) for _ in slot.specs], slot.tensors[0].numel()) for slot in state.slots]
        weight = WeightSlice(self._formats.of(weights[entry.index]), weights[entry.index], master, entry.role.shape)

        def compute() -> tuple[Tensor, ...]:
            self._observer.cast(grad.dtype, torch.float32, grad.numel())
            self._optimizer.update(weight, grad, slices, step)
            write(weight, self._observer)
            return ()

        key = None if hook is not None else (step, entry.role.shape)
        held = [*brought, *([] if master is None else [master])]
        self._observer.repeat(Work(compute, [grad, *weights[entry.index], *held], lambda: key))
        if hook is not None:
            ranges = list(parts(state.parameter.numel()))
            pieces = [[piece for slot in state.extra for piece in slot.pieces(part)] for part in ranges]
            slot_bytes = max(map(piece_bytes, pieces), default=0)
            for part, tensors in zip(ranges, SliceStream(self._copies).run(pieces, slot_bytes), strict=True):
                piece, extra = weight.part(part), take_slices(state.extra, list(tensors), part.stop - part.start)
                self._hooked(piece, grad.view(-1)[part], slices, extra, part, step)
                write(piece, self._observer)
            if weight.storage.needs_whole:
                write(weight, self._observer)
        for home, tensor in zip([state.master_weight, *(home for home, _ in homes)], [master, *brought], strict=True):
            if isinstance(home, TierTensor) and tensor is not None:
                self._copies.wait(self._copies.store(tensor, home.buffer, home.offset))
        for slot in (*state.slots, *(state.extra if hook else ())):
            slot.is_fresh = False

    def _hooked(
        self, weight: WeightSlice, grad_P: Tensor, state: Sequence[StateSlice], extra: Sequence[StateSlice],
        part: slice, step: UpdateStep,
    ) -> None:  # fmt: skip
        if self._hook is not None:
            self._hook(self._optimizer, weight, grad_P, state, extra, part, step)

    def _step(self, entry: Entry) -> UpdateStep:
        """Return the settings for one parameter: matrices decay, norms and biases do not."""
        weight_decay = self._optimizer.weight_decay if entry.state.parameter.dim() >= 2 else 0.0
        keeps_value = self._hook is not None and self._hook.moves_weights
        return UpdateStep(self._settings.number - self._born_after, self._settings.lr, weight_decay, keeps_value)

    def _scaled(self, grad_P: Tensor) -> Tensor:
        """Return a gradient times the factor; one in float16 is widened: its loss scale hides what it cannot hold."""
        if self.factor is None:
            return grad_P
        if self.factor.device != grad_P.device:  # all of a pass is on the host
            self.factor = self.factor.to(grad_P.device)
        return (grad_P.float() if grad_P.dtype == torch.float16 else grad_P).mul_(self.factor)

    def _brought(self, stored: Stored | None, fill: int | None = None) -> Tensor:
        if not isinstance(stored, TierTensor):
            return _tensor(stored)
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device=self._copies.device)
        if fill is not None:
            return tensor.fill_(fill)
        self._copies.wait(self._copies.fetch(tensor, stored.buffer, stored.offset, after=[self._copies.mark()]))
        return tensor


def write(weight: WeightSlice, observer: MemoryObserver, *, nearest: bool = False) -> None:
    """Store the value of a weight."""
    weight.write(nearest=nearest)
    kept = weight.stored[0]
    if weight.storage.reads_weight:
        observer.cast(kept.dtype, torch.float32, kept.numel())
    observer.cast(torch.float32, kept.dtype, kept.numel())


def take_slices(slots: Sequence[StateSlot], tensors: list[Tensor], count: int) -> list[StateSlice]:
    """Take the slots' tensors from the front of ``tensors``; return their slices (small ones are whole)."""
    return [
        slot.slice_of([tensors.pop(0) for _ in slot.specs], count) if slot.is_elementwise else whole_slice(slot)
        for slot in slots
    ]


def whole_slice(slot: StateSlot) -> StateSlice:
    """Return all of a slot that is on the device."""
    tensors = [_tensor(tensor) for tensor in slot.tensors]
    return slot.slice_of(tensors, tensors[0].numel())


def _tensor(stored: Stored | None) -> Tensor:
    assert isinstance(stored, Tensor), "a whole update needs its tensors on the device"
    return stored
