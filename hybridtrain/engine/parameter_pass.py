"""The pass over parameters, for updates and for all other access to weights and their state.

Work runs on the device in slices, streamed or not, or on the host's CPU. Temporaries are slices; only an optimizer that
needs a whole matrix makes one of a parameter's size. P elements of a flat slice.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridtrain.engine import update as updates
from hybridtrain.engine.random_key import random_key
from hybridtrain.engine.step import StepSettings
from hybridtrain.engine.update import Entry, Operands, Update, take_slices, write
from hybridtrain.memory import formats
from hybridtrain.memory.block_slots import Visit
from hybridtrain.memory.formats import StoredWeight, parts, weight_part
from hybridtrain.memory.grad_store import GradStore
from hybridtrain.memory.slices import StateSlice, WeightSlice
from hybridtrain.memory.state_store import ParameterState, StateSlot, StateStore
from hybridtrain.memory.stored_layout import block_number
from hybridtrain.memory.tier_tensor import Piece, SliceStream, Stored, TierTensor, piece_bytes
from hybridtrain.memory.weight_store import WeightStore
from hybridtrain.models.block_model import Unit
from hybridtrain.optim.optimizer import Optimizer
from hybridtrain.virtual_gpu.account.op_record import Stage
from hybridtrain.virtual_gpu.account.repeated_work import Work

HOST_SLICE_ELEMENTS = 1 << 21
"""Elements the CPU works on at a time where nothing is drawn. Temporaries of 8 MiB are used again; larger ones would be
mapped anew each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """Inputs and outputs of a pass outside of updates."""

    reads_second_moment: bool = False
    uses_extra: bool = True
    writes_extra: bool = False
    reads_stored: bool = False
    """Whether stored weights must be fetched, whatever their format."""
    loads_values: bool = True
    """Whether values are changed; otherwise stored tensors are only read and written."""
    writes_weights: bool = True
    rounds_to_nearest: bool = False
    """Round to nearest; otherwise weights without a master are rounded stochastically."""
    seed: int = 0
    """Key of stochastic rounding."""


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """A slice of one parameter, for a callback of ``ParameterPass.visit`` to read and change."""

    unit: str
    index: int
    """Index of the parameter in its unit."""
    part: slice
    """Range of its elements."""
    weight: WeightSlice
    """The weight; ``value`` is changed in place where the pass writes weights."""
    second_P: Tensor | None
    """Second moment, float32, without bias correction; None unless asked for."""
    extra: tuple[StateSlice, ...]
    """Extra state that the plan keeps beside the optimizer's; empty unless requested."""
    on_host: bool
    """Whether it is in host memory, and the CPU does the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """Work of a pass on slices of parameters, and the tensors it needs."""

    work: Callable[[Operands], None]
    settings: PassSettings
    reads: bool
    """Whether stored weights are fetched; otherwise a slot only receives new ones."""
    second_names: Sequence[str] = ()
    """Names of the optimizer state to fetch; updates need all of it."""
    update: Update | None = None
    grads: GradStore | None = None

    def slots(self, state: ParameterState) -> Sequence[StateSlot]:
        """Return the optimizer state to fetch."""
        return [slot for slot in state.slots if self.update or slot.spec.name in self.second_names]

    def extra_slots(self, state: ParameterState) -> Sequence[StateSlot]:
        """Return the extra state to fetch."""
        return state.extra if self.settings.uses_extra else ()

    def pieces(self, entry: Entry, part: slice) -> list[Piece]:
        """Return gradient, state, extra state, then the master weight, as far as they are needed."""
        state = entry.state
        pieces = [] if entry.grad is None else [Piece(entry.grad, part, writes=False)]
        slots = (slot for slot in self.slots(state) if slot.is_elementwise)
        pieces += [piece for slot in slots for piece in slot.pieces(part, writes=self.update is not None)]
        pieces += [
            piece for slot in self.extra_slots(state) for piece in slot.pieces(part, writes=self.settings.writes_extra)
        ]
        if state.master_weight is not None:
            pieces.append(Piece(state.master_weight, part, writes=self.settings.writes_weights))
        return pieces

    def written(self, state: ParameterState) -> None:
        """Mark the written state as initialized."""
        for slot in (*(state.slots if self.update else ()), *(state.extra if self.settings.writes_extra else ())):
            slot.is_fresh = False


@dataclass(frozen=True, slots=True)
class _Item:
    """One unit of work."""

    unit: Unit
    work: Callable[[Sequence[StoredWeight], Sequence[Tensor]], None]
    """Called with the unit's stored weights (own ranges of sharded ones) and the requested pieces."""
    key: tuple[int, ...] = ()
    """Key of its random numbers within the unit's; empty: it continues the previous item's stream."""


class ParameterPass:
    """Passes over all parameters of a model, or those of some units.

    With ``on_host`` the CPU does the work, on state and gradients in host memory. ``numbers`` are the units' numbers in
    the whole model, which key random numbers; None: ``units`` are the whole model.
    """

    def __init__(
        self, units: Sequence[Unit], weights: WeightStore, states: StateStore, optimizer: Optimizer,
        *, on_host: bool = False, numbers: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.units = tuple(units)
        self.last: PassSettings | None = None
        """Settings of the last visit that changed weights."""
        self._numbers = numbers or {unit.name: number for number, unit in enumerate(self.units)}
        self._weights = weights
        self._states = states
        self._shards = states.shards
        self._copies = states.copies
        self._observer = states.copies.observer
        self._optimizer = optimizer
        self._on_host = on_host

    @torch.no_grad()
    def update(self, grads: GradStore, settings: StepSettings, units: Sequence[Unit] | None = None) -> None:
        """Update units, all by default, and release their gradients.

        A single unit is updated within its visit, while its weights are on the device.
        """
        has_hook, update = settings.hook is not None, Update(self._states, self._optimizer, settings)
        chosen = self.units if units is None else units
        needs = PassSettings(uses_extra=has_hook, writes_extra=has_hook, seed=settings.seed)
        reads = self._states.formats.reads_weight
        task = _Task(work=update.of_slice, settings=needs, reads=reads, update=update, grads=grads)
        slot_bytes = (
            self._states.streamed_bytes(entry.state, height) + grads.streamed_bytes(unit.name, entry.index, height)
            for unit in chosen
            for entry in self._entries(unit, self._states.of(unit.name))
            if not self._optimizer.needs_whole(entry.role)
            for height in (self._height(entry),)
        )
        self._run(task, chosen, slot_bytes, plans=units is None)

    @torch.no_grad()
    def visit(self, work: Callable[[ParameterSlice], None], settings: PassSettings) -> None:
        """Call ``work`` on every slice, for predicted steps, their rollback and snapshots."""
        assert not self._shards.cuts_state, "a sharded rank cannot visit whole parameters"
        if settings.writes_weights and settings.loads_values:
            self.last = settings
        optimizer = self._optimizer

        def visited(operands: Operands) -> None:
            entry, part, weight = operands.entry, operands.part, operands.weight
            if settings.loads_values:
                _ = weight.value
            second_P = optimizer.second_moment(operands.state, part) if settings.reads_second_moment else None
            extra = tuple(operands.extra)
            work(ParameterSlice(operands.unit, entry.index, part, weight, second_P, extra, operands.on_host))
            if settings.writes_weights:
                write(weight, self._observer, nearest=settings.rounds_to_nearest)

        # A slot that is not written anew must hold what is stored afterwards.
        reads = self._states.formats.reads_weight or settings.reads_stored or not settings.writes_weights
        names = optimizer.second_moment_names if settings.reads_second_moment else ()
        task = _Task(work=visited, settings=settings, reads=reads, second_names=names)
        slot_bytes = (
            piece_bytes(task.pieces(entry, next(self._parts(task, entry))[0]))
            for unit in self.units
            for entry in self._acquired(task, unit)
        )
        self._run(task, self.units, slot_bytes, plans=True)

    def _run(self, task: _Task, units: Sequence[Unit], slot_bytes: Iterator[int], *, plans: bool) -> None:
        if plans:
            numbers = (block_number(unit.name) for unit in self.units)
            self._weights.plan_visits([Visit(block, task.reads) for block in numbers if block >= 0])
        with self._copies.transfer.keyed_random():
            if not self._on_host:
                self._run_on_device(task, units, max(slot_bytes, default=0))
                return
            for unit in units:
                with self._observer.region(Stage.UPDATE, unit.name):
                    self._run_on_host(task, unit)

    # ---- what is worked on, in order

    def _entries(self, unit: Unit, states: Sequence[ParameterState], grads: Sequence[Stored] = ()) -> list[Entry]:
        return [Entry.of(unit, i, state, grads[i] if grads else None) for i, state in enumerate(states)]

    def _acquired(self, task: _Task, unit: Unit) -> list[Entry]:
        """Return a unit's parameters; missing moments are created only where the pass reads them."""
        wants_moments = task.update is not None or bool(task.second_names)
        if wants_moments or task.settings.uses_extra:
            states = self._states.acquire(unit, wants_moments=wants_moments)
        else:
            states = self._states.settled(unit.name)
        return self._entries(unit, states, () if task.grads is None else task.grads.take(unit.name))

    def _groups(self, task: _Task, unit: Unit) -> list[list[Entry]]:
        """Return a unit's parameters in the order of their turns: of an update those with weight decay first."""
        entries = self._acquired(task, unit)
        if task.update is None:
            return [entries]
        return [[e for e in entries if (e.state.parameter.dim() >= 2) is decays] for decays in (True, False)]

    def _items(self, task: _Task, units: Sequence[Unit]) -> Iterator[tuple[_Item, list[Piece]]]:
        for unit in units:
            with self._observer.region(Stage.UPDATE, unit.name):
                groups = self._groups(task, unit)
            while groups:
                yield from self._group_items(task, unit, groups.pop(0))
            if self._shards.cuts_state:  # what others updated is gathered, also where nothing is this rank's
                yield _Item(unit, lambda _weights, _tensors: None), []

    def _group_items(self, task: _Task, unit: Unit, group: list[Entry]) -> Iterator[tuple[_Item, list[Piece]]]:
        update = task.update
        if update is not None:
            exact = [entry for entry in group if update.is_exact(entry) and entry.state.count]
            if exact:
                yield _Item(unit, partial(update.of_group, exact)), []
            group = [entry for entry in group if not update.is_exact(entry)]
        for entry in group:
            if update is not None and self._optimizer.needs_whole(entry.role):
                yield _Item(unit, partial(update.of_whole, entry)), []
                continue
            for part, key in self._parts(task, entry):
                work = partial(self._work_on_slice, task, unit.name, entry, part)
                yield _Item(unit, work, key), task.pieces(entry, part)
            task.written(entry.state)

    def _parts(self, task: _Task, entry: Entry) -> Iterator[tuple[slice, tuple[int, ...]]]:
        """Yield the slices of a parameter; the first of a rank's share draws from a key of its own, if there are."""
        if task.update is None:
            yield from ((part, ()) for part in parts(entry.state.parameter.numel(), self._height(entry)))
            return
        usual = None if entry.is_streamed else updates.RESIDENT_SLICE_ELEMENTS
        for share, held in self._shards.held(entry.state.parameter.numel()):
            for part in parts(held.stop - held.start, self._height(entry, usual)):
                is_keyed = self._shards.shares > 1 and not part.start
                key = (entry.index, share) if is_keyed else ()
                yield slice(held.start + part.start, held.start + part.stop), key

    def _height(self, entry: Entry, usual: int | None = None) -> int:
        """Return the elements of a parameter that are worked on at a time: all, where its codes share a range."""
        codes, parameter = self._states.formats.codes, entry.state.parameter
        shares_range = codes.is_coded and codes.needs_whole and entry.role.in_block and parameter.dim() > 1
        return parameter.numel() if shares_range else usual or formats.SLICE_ELEMENTS

    def _work_on_slice(
        self, task: _Task, unit: str, entry: Entry, part: slice, weights: Sequence[StoredWeight],
        tensors: Sequence[Tensor],
    ) -> None:  # fmt: skip
        stored, count = weight_part(weights[entry.index], part), part.stop - part.start

        def compute() -> tuple[Tensor, ...]:
            rest = list(tensors)
            master_P = rest.pop() if entry.state.master_weight is not None else None
            grad_P = rest.pop(0) if entry.grad is not None else None
            state = take_slices(task.slots(entry.state), rest, count)
            extra = take_slices(task.extra_slots(entry.state), rest, count)
            weight = WeightSlice(self._states.formats.of(stored), stored, master_P)
            task.work(Operands(unit, entry, part, weight, grad_P, state, extra))
            return ()

        update = task.update
        factor = [] if update is None or update.factor is None else [update.factor]
        key = None if update is None else update.key(entry, count)
        self._observer.repeat(Work(compute, [*stored, *tensors, *factor], lambda: key))

    # ---- drivers

    def _run_on_device(self, task: _Task, units: Sequence[Unit], slot_bytes: int) -> None:
        # The pieces of the next item are on their way while one is at work.
        queue: deque[_Item] = deque()

        def pieces() -> Iterator[list[Piece]]:
            for item, wanted in self._items(task, units):
                queue.append(item)
                handed = [wanted]
                del item, wanted  # gradients are not to live on here
                yield handed.pop()

        current: Unit | None = None
        weights: list[StoredWeight] = []
        for tensors in SliceStream(self._copies).run(pieces(), slot_bytes):
            item = queue.popleft()
            with self._observer.region(Stage.UPDATE, item.unit.name):
                if item.unit is not current:
                    self._write_back(task, current)
                    current = item.unit
                    self._copies.transfer.seed(random_key(task.settings.seed, self._numbers[current.name]))
                    stored = self._weights.acquire_stored(current.name, current.tensors, reads=task.reads)
                    weights = [self._shards.own_weight(weight) for weight in stored]
                if item.key:
                    self._copies.transfer.seed(random_key(task.settings.seed, self._numbers[item.unit.name], *item.key))
                item.work(weights, tensors)
            del item, tensors
        self._write_back(task, current)

    def _write_back(self, task: _Task, unit: Unit | None) -> None:
        """Write back a unit's changed weights, once all ranks have the changed ranges of the others."""
        if unit is None or not task.settings.writes_weights:
            return
        if self._shards.cuts_state and not self._weights.is_cut(unit.name):
            with self._observer.region(Stage.UPDATE, unit.name):
                self._shards.gather(self._weights.acquire_stored(unit.name, unit.tensors, reads=True))
        self._weights.write_back(unit.name)

    def _run_on_host(self, task: _Task, unit: Unit) -> None:
        """Run the pass on the CPU, on a unit in host memory, once its inputs have arrived."""
        entries = [entry for group in self._groups(task, unit) for entry in group]
        arrive: list[Stored | None] = [entry.grad for entry in entries]
        num_bytes = sum(grad.numel() * grad.dtype.itemsize for grad in arrive if grad is not None)
        sizes = sum(e.state.parameter.numel() * e.state.parameter.dtype.itemsize for e in entries)
        if task.update is not None:
            num_bytes += sizes + 2 * sum(entry.state.num_bytes for entry in entries)
        else:
            arrive = [tensor for entry in entries for tensor in entry.state.stored()]
            below = (tensor for tensor in arrive if isinstance(tensor, TierTensor))
            num_bytes = 2 * sizes + sum(tensor.numel() * tensor.dtype.itemsize for tensor in below)
        tickets = [tensor.buffer.last_store for tensor in arrive if isinstance(tensor, TierTensor)]
        done = self._copies.host_work(num_bytes, tickets)
        weights = self._weights.host_parts(unit.name)
        if weights is not None:
            with _disable_current_modes():
                torch.default_generator.manual_seed(random_key(task.settings.seed, self._numbers[unit.name]))
                for entry in entries:
                    for operands in self._on_host_memory(task, unit.name, entry, weights[entry.index]):
                        task.work(operands)
        for entry in entries:
            task.written(entry.state)
        if task.settings.writes_weights:
            self._weights.refresh(unit.name, done)

    def _on_host_memory(self, task: _Task, unit: str, entry: Entry, stored: StoredWeight) -> Iterator[Operands]:
        state, count = entry.state, entry.state.parameter.numel()
        flat = stored[0].view(-1), *stored[1:]
        master = None if state.master_weight is None else _host_tensor(state.master_weight)
        weight = WeightSlice(self._states.formats.of(flat), flat, master, entry.role.shape)
        grad_P = None if entry.grad is None else _host_tensor(entry.grad)
        state_slots, extra_slots = task.slots(state), task.extra_slots(state)
        held = [_host_slice(slot, count) for slot in state_slots]
        extra = [_host_slice(slot, count) for slot in extra_slots]
        height = self._height(entry, None if _draws(entry, weight) else HOST_SLICE_ELEMENTS)
        if height >= count or (task.update is not None and self._optimizer.needs_whole(entry.role)):
            yield Operands(unit, entry, slice(0, count), weight, grad_P, held, extra, on_host=True)
            return
        for part in parts(count, height):
            grad_part_P = None if grad_P is None else grad_P.view(-1)[part]
            held_part, extra_part = _cut(state_slots, held, part), _cut(extra_slots, extra, part)
            yield Operands(unit, entry, part, weight.part(part), grad_part_P, held_part, extra_part, on_host=True)


def _cut(slots: Sequence[StateSlot], whole: Sequence[StateSlice], part: slice) -> list[StateSlice]:
    """Return a range of each slot's elements; small ones are whole."""
    return [piece.part(part) if slot.is_elementwise else piece for slot, piece in zip(slots, whole, strict=True)]


def _draws(entry: Entry, weight: WeightSlice) -> bool:
    """Return whether an update rounds stochastically, so that its slices decide which numbers it draws."""
    state = [tensor for slot in (*entry.state.slots, *entry.state.extra) for tensor in slot.tensors]
    rounds_weight = weight.master_weight is None and not weight.storage.in_place
    return rounds_weight or any(tensor.dtype == torch.bfloat16 for tensor in state)


def _host_slice(slot: StateSlot, count: int) -> StateSlice:
    tensors = [_host_tensor(tensor) for tensor in slot.tensors]
    for spec, tensor in zip(slot.specs, tensors, strict=True) if slot.is_fresh else ():
        tensor.fill_(spec.zero)
    return slot.slice_of(tensors, count)


def _host_tensor(stored: Stored) -> Tensor:
    assert isinstance(stored, TierTensor), "an update on the host needs its tensors in host memory"
    return stored.on_host()
