"""The one pass over parameters: what an update does, and whatever else reads or changes weights and their state.

Everything is worked on where it lives: on the device in slices, streamed through it in slices, or on the host by the
processor. Nothing of a parameter's size is held beyond what the stores hold, but for parameters that an optimizer must
see in one piece. P elements of a flat slice.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridtrain.engine.random_key import random_key
from hybridtrain.engine.step import StepSettings
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.formats import SLICE_ELEMENTS, ExactWeight, StoredWeight, weight_part
from hybridtrain.memory.grad_store import GradStore
from hybridtrain.memory.shards import Shards
from hybridtrain.memory.slices import StateSlice, WeightSlice
from hybridtrain.memory.state_store import ParameterState, StateSlot, StateStore
from hybridtrain.memory.tier import Ticket
from hybridtrain.memory.tier_tensor import Piece, SliceStream, Stored, TierTensor, piece_bytes
from hybridtrain.memory.weight_slots import block_number
from hybridtrain.memory.weight_store import Visit, WeightStore
from hybridtrain.models.block_model import Unit
from hybridtrain.optim.optimizer import Optimizer, Role, UpdateStep
from hybridtrain.virtual_gpu.account.observer import MemoryObserver, Stage
from hybridtrain.virtual_gpu.account.repeated_work import Work

_CLIP_EPS = 1e-6
"""torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6; the same here, to the bit."""
RESIDENT_SLICE_ELEMENTS = 1 << 24
"""Elements updated at a time where nothing is streamed and fp32 temporaries are needed: 64 MiB each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """What a pass outside of updates needs and changes."""

    reads_second_moment: bool = False
    uses_extra: bool = True
    writes_extra: bool = False
    reads_stored: bool = False
    """What is stored of the weights is needed itself, whatever its format."""
    loads_values: bool = True
    """Without it only what is stored is read and written."""
    writes_weights: bool = True
    rounds_to_nearest: bool = False
    """Weights without a master are otherwise rounded stochastically."""
    seed: int = 0
    """Keys stochastic rounding."""


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """A slice of one parameter, for a callback of ``ParameterPass.visit`` to read and change."""

    unit: str
    index: int
    """Of the parameter in its unit."""
    part: slice
    """Range of its elements."""
    weight: WeightSlice
    """``value`` is changed in place where the pass writes weights."""
    second_P: Tensor | None
    """Second moment, float32, without bias correction; None unless asked for."""
    extra: tuple[StateSlice, ...]
    """What the plan keeps beside the optimizer's state; empty unless asked for."""
    on_host: bool
    """Whether this is host memory, and the processor works."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One parameter of a unit in one pass."""

    index: int
    """In its unit."""
    state: ParameterState
    grad: Stored
    step: UpdateStep


@dataclass(frozen=True, slots=True)
class _Item:
    """What is worked on at a time."""

    unit: Unit
    work: Callable[[Sequence[StoredWeight], Sequence[Tensor]], None]
    """Given what is stored of the unit's weights, of cut ones the own ranges, and the pieces asked for."""
    key: tuple[int, ...] = ()
    """Of its random numbers, within the unit's; empty: it draws on after the one before."""


class ParameterPass:
    """Passes over all parameters of a model, or those of some units.

    Args:
        units: All of the model.
        weights: Theirs.
        states: Theirs.
        optimizer: Whose updates it does.
        copies: The way to the other tiers.
        observer: Told what new tensors are for.
        on_host: Whether the processor does the work, on state and gradients in host memory.
        shards: Which range of each parameter this rank works on; None: all.
        numbers: Of units in the whole model, by which random numbers are keyed; None: ``units`` are the whole model.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        weights: WeightStore,
        states: StateStore,
        optimizer: Optimizer,
        copies: CopyEngine,
        observer: MemoryObserver,
        *,
        on_host: bool = False,
        shards: Shards | None = None,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        self._shards = shards or Shards(copies)
        self.units = tuple(units)
        self.optimizer = optimizer
        self.last: PassSettings | None = None
        """Of the last visit that changed weights."""
        self._numbers = numbers or {unit.name: number for number, unit in enumerate(self.units)}
        self._weights = weights
        self._states = states
        self._copies = copies
        self._observer = observer
        self._on_host = on_host

    # ---- updates

    @torch.no_grad()
    def norm(self, grads: GradStore) -> Tensor:
        """Return the global L2 norm, a scalar of the device."""
        with self._observer.region(Stage.UPDATE, ""):
            return grads.norm()

    @torch.no_grad()
    def clip_factor(self, norm: Tensor) -> Tensor:
        """Return what gradients of this global norm are multiplied with, a scalar of the device."""
        with self._observer.region(Stage.UPDATE, ""):
            return torch.clamp(self.optimizer.max_grad_norm / (norm + _CLIP_EPS), max=1.0)

    @torch.no_grad()
    def update(self, grads: GradStore, settings: StepSettings, units: Sequence[Unit] | None = None) -> None:
        """Update units, all by default, and release their gradients.

        A single unit is updated within its visit: its weights are on the device and no visits are planned anew.
        """
        reads = self._states.formats.reads_weight
        if units is None:
            self._plan_visits(reads=reads)
        chosen = self.units if units is None else units
        with self._copies.transfer.keyed_random():
            if self._on_host:
                for unit in chosen:
                    self._update_on_host(unit, grads, settings)
                return
            items = self._update_items(chosen, grads, settings)
            self._run(items, self._update_slot_bytes(chosen, grads), settings.seed, reads=reads)

    def _update_items(
        self, chosen: Sequence[Unit], grads: GradStore, settings: StepSettings
    ) -> Iterator[tuple[_Item, list[Piece]]]:
        """Yield the work on each unit, parameters with weight decay first, with what it streams."""
        for unit in chosen:
            with self._observer.region(Stage.UPDATE, unit.name):
                states = self._states.acquire(unit)
            entries = [
                _Entry(index, state, grad, self._step(state, settings))
                for index, (state, grad) in enumerate(zip(states, grads.take(unit.name), strict=True))
            ]
            groups = [[e for e in entries if (e.state.parameter.dim() >= 2) is decays] for decays in (True, False)]
            del entries
            while groups:
                yield from self._group_items(unit, groups.pop(0), settings)
            if self._shards.cuts_state:  # what others updated is gathered, also where nothing is this rank's
                yield _Item(unit, _nothing), []

    def _group_items(
        self, unit: Unit, group: list[_Entry], settings: StepSettings
    ) -> Iterator[tuple[_Item, list[Piece]]]:
        exact = [entry for entry in group if self._is_exact(unit, entry) and entry.state.count]
        if exact:
            yield _Item(unit, partial(self._update_exact, exact, settings)), []
        for entry in (entry for entry in group if not self._is_exact(unit, entry)):
            if self.optimizer.needs_whole(_role(unit, entry.state)):
                yield _Item(unit, partial(self._update_whole, entry, settings)), []
                continue
            for part, key in self._keyed_parts(unit, entry):
                yield (
                    _Item(unit, partial(self._update_slice, entry, part, settings), key),
                    _update_pieces(entry, part, settings),
                )
            _written(entry.state, settings)

    def _keyed_parts(self, unit: Unit, entry: _Entry) -> Iterator[tuple[slice, tuple[int, ...]]]:
        """Yield the slices that are updated here; the first of a share draws from a key of its own, if there are."""
        for share, held in self._shards.held(entry.state.parameter.numel()):
            usual = SLICE_ELEMENTS if _is_streamed(entry) else RESIDENT_SLICE_ELEMENTS
            for part in _parts(held.stop - held.start, self._height(unit, entry.state, usual)):
                is_keyed = self._shards.shares > 1 and not part.start
                key = (entry.index, share) if is_keyed else ()
                yield slice(held.start + part.start, held.start + part.stop), key

    def _height(self, unit: Unit, state: ParameterState, usual: int | None = None) -> int:
        """Return the elements of a parameter that are worked on at a time: all, where its codes share a range."""
        is_coded = self._states.formats.codes.is_coded and _role(unit, state).in_block and state.parameter.dim() > 1
        return (
            state.parameter.numel() if is_coded and self._states.formats.codes.needs_whole else usual or SLICE_ELEMENTS
        )

    def _step(self, state: ParameterState, settings: StepSettings) -> UpdateStep:
        """Return the settings for one parameter: matrices decay, norms and biases do not."""
        weight_decay = self.optimizer.weight_decay if state.parameter.dim() >= 2 else 0.0
        keeps_value = settings.hook is not None and settings.hook.moves_weights
        return UpdateStep(settings.number - self._states.born_after, settings.lr, weight_decay, keeps_value)

    def _is_exact(self, unit: Unit, entry: _Entry) -> bool:
        """Return whether everything is fp32 and on the device, so that a fused kernel can work on it directly.

        An extra tensor that is rounded by chance waits for its turn, so that it draws the same numbers wherever it
        lives.
        """
        state, formats = entry.state, self._states.formats
        if not self.optimizer.offers_groups or self.optimizer.needs_whole(_role(unit, state)):
            return False
        companion = [] if state.companion is None else [state.companion]
        moments = [tensor for slot in state.slots for tensor in slot.tensors]
        extra = [tensor for slot in state.extra for tensor in slot.tensors]
        return (
            all(isinstance(tensor, Tensor) and tensor.dtype != torch.bfloat16 for tensor in extra)
            and all(isinstance(t, Tensor) and t.dtype == torch.float32 for t in [entry.grad, *moments, *companion])
            and len(moments) == len(state.slots)
            and formats.values.in_place
            and formats.values is formats.codes
            and (bool(companion) or state.parameter.dtype == torch.float32)
        )

    def _update_slot_bytes(self, chosen: Sequence[Unit], grads: GradStore) -> int:
        """Return what the largest piece of work takes in a slot."""
        return max(
            (
                self._states.streamed_bytes(state, height) + grads.streamed_bytes(unit.name, index, height)
                for unit in chosen
                for index, state in enumerate(self._states.of(unit.name))
                if not self.optimizer.needs_whole(_role(unit, state))
                for height in (self._height(unit, state),)
            ),
            default=0,
        )

    def _update_slice(
        self,
        entry: _Entry,
        part: slice,
        settings: StepSettings,
        weights: Sequence[StoredWeight],
        tensors: Sequence[Tensor],
    ) -> None:
        stored = weight_part(weights[entry.index], part)
        compute = partial(self._compute_slice, entry, part, settings, stored, tensors)
        key = entry.step, part.stop - part.start, entry.state.companion is None
        operands = [*stored, *tensors, *([] if settings.factor is None else [settings.factor])]
        has_hook = settings.hook is not None  # which may do as it likes
        self._observer.repeat(Work(compute, operands, lambda: None if has_hook else key))

    def _compute_slice(
        self, entry: _Entry, part: slice, settings: StepSettings, stored: StoredWeight, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        grad_P, *rest = tensors
        companion_P = rest.pop() if entry.state.companion is not None else None
        grad_P = _scaled(grad_P, settings.factor)
        count = part.stop - part.start
        state = _take_slices(entry.state.slots, rest, count)
        extra = _take_slices(entry.state.extra if settings.hook else (), rest, count)
        self._apply(self._slice(stored, companion_P), grad_P, state, extra, part, entry.step, settings)
        return ()

    def _apply(
        self,
        weight: WeightSlice,
        grad_P: Tensor,
        state: Sequence[StateSlice],
        extra: Sequence[StateSlice],
        part: slice,
        step: UpdateStep,
        settings: StepSettings,
    ) -> None:
        """Update, let the hook work, store."""
        self.optimizer.update(weight, grad_P, state, step)
        if settings.hook is not None:
            settings.hook(self.optimizer, weight, grad_P, state, extra, part, step)
        self._write(weight)
        self._observer.cast(grad_P.dtype, torch.float32, grad_P.numel())

    def _write(self, weight: WeightSlice, *, nearest: bool = False) -> None:
        weight.write(nearest=nearest)
        kept = weight.stored[0]
        if weight.storage.reads_weight:
            self._observer.cast(kept.dtype, torch.float32, kept.numel())
        self._observer.cast(torch.float32, kept.dtype, kept.numel())

    def _slice(self, weight: StoredWeight, companion_P: Tensor | None, shape: tuple[int, ...] = ()) -> WeightSlice:
        return WeightSlice(self._states.formats.of(weight), weight, companion_P, shape)

    def _update_exact(
        self, entries: Sequence[_Entry], settings: StepSettings, weights: Sequence[StoredWeight], _: Sequence[Tensor]
    ) -> None:
        """Update fp32 tensors in one fused call, nothing temporary."""
        storage = self._states.formats.values
        companions = [None if e.state.companion is None else _tensor(e.state.companion) for e in entries]
        values = [storage.load(weights[e.index], companion) for e, companion in zip(entries, companions, strict=True)]
        grads = [_tensor(entry.grad) for entry in entries]
        if settings.factor is not None:
            torch._foreach_mul_(grads, settings.factor)
        moments = [[_tensor(tensor) for slot in entry.state.slots for tensor in slot.tensors] for entry in entries]
        self.optimizer.update_group(values, grads, moments, entries[0].step)
        if settings.hook is not None:
            for entry, value, grad in zip(entries, values, grads, strict=True):
                for part in _parts(value.numel(), RESIDENT_SLICE_ELEMENTS):
                    weight = WeightSlice(ExactWeight(), (value.view(-1)[part],), None)
                    state, extra = (_resident_slices(slots, part) for slots in (entry.state.slots, entry.state.extra))
                    settings.hook(self.optimizer, weight, grad.view(-1)[part], state, extra, part, entry.step)
        for entry, value, companion in zip(entries, values, companions, strict=True):
            storage.store(value, weights[entry.index], companion)
            self._observer.cast(torch.float32, weights[entry.index][0].dtype, value.numel())

    def _update_whole(
        self, entry: _Entry, settings: StepSettings, weights: Sequence[StoredWeight], _: Sequence[Tensor]
    ) -> None:
        """Update a parameter in one piece: what waits elsewhere comes whole; extra state goes by in slices."""
        state, step = entry.state, entry.step
        grad = _scaled(self._fetch(entry.grad), settings.factor)
        companion = None if state.companion is None else self._fetch(state.companion)
        brought = [[self._fetch(t, self._fill(slot, i)) for i, t in enumerate(slot.tensors)] for slot in state.slots]
        slices = [
            slot.slice_of([tensor.view(-1) for tensor in tensors], tensors[0].numel())
            for slot, tensors in zip(state.slots, brought, strict=True)
        ]
        shape = tuple(state.parameter.shape)
        weight = self._slice(weights[entry.index], companion, shape)

        def compute() -> tuple[Tensor, ...]:
            self._observer.cast(grad.dtype, torch.float32, grad.numel())
            self.optimizer.update(weight, grad, slices, step)
            self._write(weight)
            return ()

        key = None if settings.hook is not None else (step, shape)
        operands = [grad, *weights[entry.index], *(tensor for tensors in brought for tensor in tensors)]
        self._observer.repeat(Work(compute, [*operands, *([] if companion is None else [companion])], lambda: key))
        del operands
        if settings.hook is not None:
            parts = list(_parts(state.parameter.numel()))
            pieces = [[piece for slot in state.extra for piece in slot.pieces(part)] for part in parts]
            stream = SliceStream(self._copies, self._observer)
            slot_bytes = max((piece_bytes(item) for item in pieces), default=0)
            for part, tensors in zip(parts, stream.run(pieces, slot_bytes), strict=True):
                extra = _take_slices(state.extra, list(tensors), part.stop - part.start)
                piece = weight.part(part)
                settings.hook(self.optimizer, piece, grad.view(-1)[part], slices, extra, part, step)
                self._write(piece)
            if weight.storage.needs_whole:
                self._write(weight)
        homes = [state.companion, *(tensor for slot in state.slots for tensor in slot.tensors)]
        found = [companion, *(tensor for tensors in brought for tensor in tensors)]
        for home, tensor in zip(homes, found, strict=True):
            if isinstance(home, TierTensor) and tensor is not None:
                self._copies.wait(self._copies.store(tensor, home.buffer, home.offset))
        _written(state, settings)

    @staticmethod
    def _fill(slot: StateSlot, index: int) -> int | None:
        return slot.specs[index].zero if slot.is_fresh else None

    def _fetch(self, stored: Stored, fill: int | None = None) -> Tensor:
        """Return a whole tensor on the device."""
        if isinstance(stored, Tensor):
            return stored
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device=self._copies.transfer.device)
        if fill is not None:
            return tensor.fill_(fill)
        self._copies.wait(self._copies.fetch(tensor, stored.buffer, stored.offset, after=[self._copies.mark()]))
        return tensor

    def _update_on_host(self, unit: Unit, grads: GradStore, settings: StepSettings) -> None:
        with self._observer.region(Stage.UPDATE, unit.name):
            states, taken = self._states.acquire(unit), grads.take(unit.name)
            num_bytes = sum(grad.numel() * grad.dtype.itemsize for grad in taken)
            num_bytes += sum(s.parameter.numel() * s.parameter.dtype.itemsize + 2 * _num_bytes(s) for s in states)
            factor: Tensor | None = None

            def work(index: int, weight: WeightSlice) -> None:
                nonlocal factor
                state, grad_P = states[index], _on_host(taken[index])
                if settings.factor is not None:
                    factor = settings.factor.cpu() if factor is None else factor
                    grad_P = _scaled(grad_P, factor)
                slices = [_host_slice(slot, state) for slot in state.slots]
                extra = [_host_slice(slot, state) for slot in state.extra] if settings.hook else []
                everything = slice(0, grad_P.numel())
                self._apply(weight, grad_P, slices, extra, everything, self._step(state, settings), settings)

            after = [tensor.buffer.last_store for tensor in taken if isinstance(tensor, TierTensor)]
            order = sorted(range(len(states)), key=lambda index: states[index].parameter.dim() < 2)
            done = self._work_on_host(unit, states, order, num_bytes, after, settings.seed, work)
            for state in states:
                _written(state, settings)
            self._weights.refresh(unit.name, done)

    # ---- anything else

    @torch.no_grad()
    def visit(self, work: Callable[[ParameterSlice], None], settings: PassSettings) -> None:
        """Call ``work`` on every slice: predicted steps, their undoing, snapshots."""
        assert not self._shards.cuts_state, "a rank that holds ranges alone is not asked for whole parameters"
        if settings.writes_weights and settings.loads_values:
            self.last = settings
        # A slot that is not written anew must hold what is stored afterwards.
        reads = self._states.formats.reads_weight or settings.reads_stored or not settings.writes_weights
        self._plan_visits(reads=reads)
        with self._copies.transfer.keyed_random():
            if self._on_host:
                for unit in self.units:
                    with self._observer.region(Stage.UPDATE, unit.name):
                        self._visit_on_host(unit, work, settings)
                return
            slot_bytes = max(
                (
                    piece_bytes(self._visit_pieces(state, next(self._visit_parts(unit, state)), settings))
                    for unit in self.units
                    for state in self._visited_states(unit, settings)
                ),
                default=0,
            )
            self._run(
                self._visit_items(work, settings), slot_bytes, settings.seed,
                reads=reads, writes=settings.writes_weights,
            )  # fmt: skip
            if settings.writes_extra:
                for unit in self.units:
                    _extra_written(self._states.of(unit.name))

    def _visit_items(
        self, work: Callable[[ParameterSlice], None], settings: PassSettings
    ) -> Iterator[tuple[_Item, list[Piece]]]:
        for unit in self.units:
            with self._observer.region(Stage.UPDATE, unit.name):
                states = self._visited_states(unit, settings)
            for index, state in enumerate(states):
                for part in self._visit_parts(unit, state):
                    visited = partial(self._visit_slice, unit, index, part, work, settings)
                    yield _Item(unit, visited), self._visit_pieces(state, part, settings)

    def _visit_parts(self, unit: Unit, state: ParameterState) -> Iterator[slice]:
        return _parts(state.parameter.numel(), self._height(unit, state))

    def _visited_states(self, unit: Unit, settings: PassSettings) -> list[ParameterState]:
        """Return the states of a unit; moments that never were are made only where someone looks at them."""
        if settings.reads_second_moment or settings.uses_extra:
            return self._states.acquire(unit, wants_moments=settings.reads_second_moment)
        return self._states.settled(unit.name)

    def _second_slots(self, state: ParameterState, settings: PassSettings) -> list[StateSlot]:
        names = self.optimizer.second_moment_names if settings.reads_second_moment else ()
        return [slot for slot in state.slots if slot.spec.name in names]

    def _visit_pieces(self, state: ParameterState, part: slice, settings: PassSettings) -> list[Piece]:
        """Return the stored second moment, the extra state, then the companion, as far as they are needed."""
        slots = [slot for slot in self._second_slots(state, settings) if slot.is_elementwise]
        pieces = [piece for slot in slots for piece in slot.pieces(part, writes=False)]
        if settings.uses_extra:
            pieces += [piece for slot in state.extra for piece in slot.pieces(part, writes=settings.writes_extra)]
        if state.companion is not None:
            pieces.append(Piece(state.companion, part, writes=settings.writes_weights))
        return pieces

    def _visit_slice(
        self,
        unit: Unit,
        index: int,
        part: slice,
        work: Callable[[ParameterSlice], None],
        settings: PassSettings,
        weights: Sequence[StoredWeight],
        tensors: Sequence[Tensor],
    ) -> None:
        state, rest, count = self._states.of(unit.name)[index], list(tensors), part.stop - part.start
        companion_P = rest.pop() if state.companion is not None else None
        piece = self._slice(weight_part(weights[index], part), companion_P)
        seconds = [
            _take_slices((slot,), rest, count)[0] if slot.is_elementwise else _whole_slice(slot)
            for slot in self._second_slots(state, settings)
        ]
        extra = _take_slices(state.extra if settings.uses_extra else (), rest, count)
        self._visited(unit, index, part, piece, seconds, extra, work, settings)

    def _visited(
        self,
        unit: Unit,
        index: int,
        part: slice,
        weight: WeightSlice,
        seconds: Sequence[StateSlice],
        extra: Sequence[StateSlice],
        work: Callable[[ParameterSlice], None],
        settings: PassSettings,
    ) -> None:
        if settings.loads_values:
            _ = weight.value
        second_P = self.optimizer.second_moment(seconds, part) if settings.reads_second_moment else None
        work(ParameterSlice(unit.name, index, part, weight, second_P, tuple(extra), self._on_host))
        if settings.writes_weights:
            self._write(weight, nearest=settings.rounds_to_nearest)

    def _visit_on_host(self, unit: Unit, work: Callable[[ParameterSlice], None], settings: PassSettings) -> None:
        states = self._visited_states(unit, settings)
        stored = [t for state in states for t in state.stored() if isinstance(t, TierTensor)]
        num_bytes = sum(2 * state.parameter.numel() * state.parameter.dtype.itemsize for state in states)
        num_bytes += sum(tensor.numel() * tensor.dtype.itemsize for tensor in stored)

        def on_parameter(index: int, weight: WeightSlice) -> None:
            state = states[index]
            seconds = [_host_slice(slot, state, fills=False) for slot in self._second_slots(state, settings)]
            extra = [_host_slice(slot, state) for slot in state.extra] if settings.uses_extra else []
            everything = slice(0, state.parameter.numel())
            self._visited(unit, index, everything, weight, seconds, extra, work, settings)

        after = [tensor.buffer.last_store for tensor in stored]
        done = self._work_on_host(unit, states, range(len(states)), num_bytes, after, settings.seed, on_parameter)
        if settings.writes_extra:
            _extra_written(states)
        if settings.writes_weights:
            self._weights.refresh(unit.name, done)

    # ---- drivers

    def _plan_visits(self, *, reads: bool) -> None:
        numbers = (block_number(unit.name) for unit in self.units)
        self._weights.plan_visits([Visit(block, reads) for block in numbers if block >= 0])

    def _run(
        self,
        items: Iterable[tuple[_Item, list[Piece]]],
        slot_bytes: int,
        seed: int,
        *,
        reads: bool,
        writes: bool = True,
    ) -> None:
        """Do the work on the device, with the pieces of the next item on their way."""
        queue: deque[_Item] = deque()

        def pieces() -> Iterator[list[Piece]]:
            for item, wanted in items:
                queue.append(item)
                handed = [wanted]
                del item, wanted  # gradients are not to live on here
                yield handed.pop()

        current: Unit | None = None
        weights: list[StoredWeight] = []
        for tensors in SliceStream(self._copies, self._observer).run(pieces(), slot_bytes):
            item = queue.popleft()
            with self._observer.region(Stage.UPDATE, item.unit.name):
                if item.unit is not current:
                    if current is not None and writes:
                        self._write_back(current)
                    current = item.unit
                    self._copies.transfer.seed(random_key(seed, self._numbers[current.name]))
                    stored = self._weights.acquire_stored(current.name, current.tensors, reads=reads)
                    weights = [self._shards.own_weight(weight) for weight in stored]
                if item.key:
                    self._copies.transfer.seed(random_key(seed, self._numbers[item.unit.name], *item.key))
                item.work(weights, tensors)
            del item, tensors
        if current is not None and writes:
            self._write_back(current)

    def _write_back(self, unit: Unit) -> None:
        """Say that a unit's weights were changed, once all ranks have what each of them changed."""
        if self._shards.cuts_state and not self._weights.is_cut(unit.name):
            with self._observer.region(Stage.UPDATE, unit.name):
                self._shards.gather(self._weights.acquire_stored(unit.name, unit.tensors, reads=True))
        self._weights.write_back(unit.name)

    def _work_on_host(
        self,
        unit: Unit,
        states: Sequence[ParameterState],
        order: Iterable[int],
        num_bytes: int,
        after: Sequence[Ticket | None],
        seed: int,
        work: Callable[[int, WeightSlice], None],
    ) -> Ticket:
        """Let the processor work on whole parameters once what it reads has arrived; return when it will be done."""
        done = self._copies.host_work(num_bytes, after)
        weights = self._weights.host_parts(unit.name)
        if weights is not None:
            with _disable_current_modes():
                torch.default_generator.manual_seed(random_key(seed, self._numbers[unit.name]))
                for index in order:
                    companion = states[index].companion
                    flat = tuple(part.view(-1) for part in weights[index])
                    shape = tuple(states[index].parameter.shape)
                    work(index, self._slice(flat, None if companion is None else _on_host(companion), shape))
        return done


def _role(unit: Unit, state: ParameterState) -> Role:
    return Role(tuple(state.parameter.shape), in_block=block_number(unit.name) >= 0)


def _parts(count: int, height: int | None = None) -> Iterator[slice]:
    height = height or SLICE_ELEMENTS
    yield from (slice(start, min(start + height, count)) for start in range(0, count, height))


def _update_pieces(entry: _Entry, part: slice, settings: StepSettings) -> list[Piece]:
    """Return gradient, state, extra state where a hook works on it, then the companion if there is one."""
    state = entry.state
    pieces = [Piece(entry.grad, part, writes=False)]
    pieces += [piece for slot in state.slots for piece in slot.pieces(part)]
    if settings.hook is not None:
        pieces += [piece for slot in state.extra for piece in slot.pieces(part)]
    if state.companion is not None:
        pieces.append(Piece(state.companion, part))
    return pieces


def _nothing(_weights: Sequence[StoredWeight], _tensors: Sequence[Tensor]) -> None:
    pass


def _scaled(grad_P: Tensor, factor: Tensor | None) -> Tensor:
    """Return a gradient times a factor; one in float16 is widened, for what its loss scale hides is below its range."""
    if factor is None:
        return grad_P
    return (grad_P.float() if grad_P.dtype == torch.float16 else grad_P).mul_(factor)


def _take_slices(slots: Iterable[StateSlot], tensors: list[Tensor], count: int) -> list[StateSlice]:
    """Return the slices of slots, whose tensors come first in ``tensors`` and are taken from it."""
    return [slot.slice_of([tensors.pop(0) for _ in slot.specs], count) for slot in slots]


def _resident_slices(slots: Iterable[StateSlot], part: slice) -> list[StateSlice]:
    return [_whole_slice(slot).part(part) for slot in slots]


def _whole_slice(slot: StateSlot) -> StateSlice:
    tensors = [_tensor(tensor) for tensor in slot.tensors]
    return slot.slice_of(tensors, tensors[0].numel())


def _host_slice(slot: StateSlot, state: ParameterState, *, fills: bool = True) -> StateSlice:
    """Return all of a slot in host memory, or what is small enough to stay on the device."""
    tensors = [_on_host(tensor) for tensor in slot.tensors]
    if fills and slot.is_fresh:
        for spec, tensor in zip(slot.specs, tensors, strict=True):
            tensor.fill_(spec.zero)
    return slot.slice_of(tensors, state.parameter.numel())


def _written(state: ParameterState, settings: StepSettings) -> None:
    for slot in state.slots:
        slot.is_fresh = False
    if settings.hook is not None:
        _extra_written([state])


def _extra_written(states: Iterable[ParameterState]) -> None:
    for state in states:
        for slot in state.extra:
            slot.is_fresh = False


def _is_streamed(entry: _Entry) -> bool:
    return any(isinstance(tensor, TierTensor) for tensor in [entry.grad, *entry.state.stored()])


def _on_host(stored: Stored) -> Tensor:
    """Return the flat tensor of something that waits in host memory."""
    assert isinstance(stored, TierTensor), "an update on the host finds everything there"
    return stored.on_host()


def _num_bytes(state: ParameterState) -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in state.stored())


def _tensor(stored: Stored) -> Tensor:
    assert isinstance(stored, Tensor), "only what is on the device is updated whole"
    return stored
