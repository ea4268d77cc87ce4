"""The update: global norm, clipping, then AdamW unit by unit, wherever weights, state and gradients live."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtrain.engine.adamw import AdamWConfig, AdamWStep, follow_slow, update_values
from hybridtrain.engine.factored_update import FactoredUpdate
from hybridtrain.engine.host_update import HostUpdate
from hybridtrain.engine.random_key import random_key
from hybridtrain.engine.rounded_update import update_stored
from hybridtrain.engine.step_settings import StepSettings
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.grad_store import GradStore
from hybridtrain.memory.history_codec import part_of
from hybridtrain.memory.master_codec import StoredWeight, weight_part
from hybridtrain.memory.state_store import ParameterState, StateStore, history_pieces
from hybridtrain.memory.tier_tensor import Piece, SliceStream, Stored, TierTensor
from hybridtrain.memory.weight_store import Visit, WeightStore
from hybridtrain.models.block_model import Unit
from hybridtrain.plan.placement import Codec
from hybridtrain.virtual_gpu.observer import MemoryObserver, Stage

_CLIP_EPS = 1e-6
"""torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6; the same here, to the bit."""
SLICE_ELEMENTS = 1 << 24
"""Elements updated at a time where fp32 temporaries are needed: 64 MiB each."""
STREAM_SLICE_ELEMENTS = 1 << 23
"""The same where state passes through the device: at 32 MiB a tensor the bus is at its full rate."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One parameter of a unit in one update."""

    index: int
    """In its unit."""
    state: ParameterState
    grad: Stored
    step: AdamWStep


@dataclass(frozen=True, slots=True)
class _Work:
    """Parameters updated in one call: all whole ones of a kind, or a range of one."""

    unit: Unit
    entries: tuple[_Entry, ...]
    part: slice | None
    """Range of elements; None: whole tensors, all fp32 and on the device."""


class Update:
    """Applies gradients to weights under one optimizer configuration."""

    def __init__(
        self,
        units: Sequence[Unit],
        weights: WeightStore,
        states: StateStore,
        config: AdamWConfig,
        copies: CopyEngine,
        observer: MemoryObserver,
        *,
        on_host: bool = False,
    ) -> None:
        self.units = tuple(units)
        self.config = config
        self._host = HostUpdate(weights, states, copies, observer) if on_host else None
        self._factored = FactoredUpdate(states.codecs, copies, observer) if states.codec is Codec.FACTORED else None
        self._numbers = {unit.name: number for number, unit in enumerate(self.units)}
        self._weights = weights
        self._states = states
        self._copies = copies
        self._observer = observer

    @torch.no_grad()
    def norm(self, grads: GradStore) -> Tensor:
        """Return the global L2 norm, a scalar of the device."""
        with self._observer.region(Stage.UPDATE, ""):
            return grads.norm()

    @torch.no_grad()
    def clip_factor(self, norm: Tensor) -> Tensor:
        """Return what gradients of this global norm are multiplied with, a scalar of the device."""
        with self._observer.region(Stage.UPDATE, ""):
            return torch.clamp(self.config.max_grad_norm / (norm + _CLIP_EPS), max=1.0)

    @torch.no_grad()
    def apply(self, grads: GradStore, settings: StepSettings, units: Sequence[Unit] | None = None) -> None:
        """Update units, all by default, and release their gradients.

        A single unit is updated within its visit: its weights are on the device and no visits are planned anew.
        """
        if units is None:
            reads = self._states.codecs.reads_weight
            self._weights.plan_visits([Visit(block, reads) for block in range(len(self.units) - 2)])
        chosen = self.units if units is None else units
        with self._copies.transfer.keyed_random():
            if self._host is not None:
                for unit in chosen:
                    steps = [self._step(state, settings) for state in self._states.of(unit.name)]
                    self._host.apply(unit, steps, grads, settings, self._numbers[unit.name])
            elif self._factored is not None:
                for unit in chosen:
                    with self._observer.region(Stage.UPDATE, unit.name):
                        states = self._states.acquire(unit)
                        weights = self._acquire(unit, settings)
                        steps = [self._step(state, settings) for state in states]
                        self._factored.apply(states, weights, grads.take(unit.name), steps, settings.factor)
                    self._finish(unit)
            else:
                self._update(chosen, grads, settings)

    def _update(self, chosen: Sequence[Unit], grads: GradStore, settings: StepSettings) -> None:
        queue: deque[_Work] = deque()
        current: Unit | None = None
        weights: list[StoredWeight] = []
        stream = SliceStream(self._copies, self._observer)
        for tensors in stream.run(self._pieces(chosen, grads, settings, queue), self._slot_bytes(chosen, grads)):
            work = queue.popleft()
            with self._observer.region(Stage.UPDATE, work.unit.name):
                if work.unit is not current:
                    self._finish(current)
                    current = work.unit
                    weights = self._acquire(current, settings)
                self._apply(work, weights, tensors, settings)
            del work, tensors
        self._finish(current)

    def _acquire(self, unit: Unit, settings: StepSettings) -> list[StoredWeight]:
        self._copies.transfer.seed(random_key(settings.seed, self._numbers[unit.name]))
        return self._weights.acquire_stored(unit.name, unit.tensors, reads=self._states.codecs.reads_weight)

    def _finish(self, unit: Unit | None) -> None:
        if unit is not None:
            self._weights.write_back(unit.name)

    def _pieces(
        self, chosen: Sequence[Unit], grads: GradStore, settings: StepSettings, queue: deque[_Work]
    ) -> Iterator[list[Piece]]:
        """Yield what each piece of work streams, once the work is in the queue."""
        for unit in chosen:
            with self._observer.region(Stage.UPDATE, unit.name):
                states = self._states.acquire(unit)
            entries = self._entries(states, grads.take(unit.name), settings)
            while entries:
                group = entries.pop(0)
                whole = [entry for entry in group if self._is_whole(entry)]
                if whole:
                    queue.append(_Work(unit, tuple(whole), None))
                    yield []
                for entry in group:
                    if not self._is_whole(entry):
                        for part in self._parts(entry):
                            queue.append(_Work(unit, (entry,), part))
                            yield _streamed_pieces(entry, part)
                        entry.state.is_fresh = False
                        entry.state.history_is_fresh &= settings.slow is None
                del group, whole

    def _entries(
        self, states: Sequence[ParameterState], taken: Sequence[Stored], settings: StepSettings
    ) -> list[list[_Entry]]:
        """Return the parameters with weight decay, then those without."""
        entries = [
            _Entry(index, state, grad, self._step(state, settings))
            for index, (state, grad) in enumerate(zip(states, taken, strict=True))
        ]
        return [
            [entry for entry in entries if (entry.state.parameter.dim() >= 2) is decays] for decays in (True, False)
        ]

    def _step(self, state: ParameterState, settings: StepSettings) -> AdamWStep:
        """Return the settings for one parameter: matrices decay, norms and biases do not."""
        weight_decay = self.config.weight_decay if state.parameter.dim() >= 2 else 0.0
        number = settings.number - self._states.born_after
        return AdamWStep(self.config, settings.lr, weight_decay, number, settings.slow)

    def _is_whole(self, entry: _Entry) -> bool:
        """Return whether everything is fp32 and on the device, so that the fused kernel can work on it directly.

        A history that is rounded by chance waits for its turn, so that it draws the same numbers wherever it lives.
        """
        stored = [entry.grad, *entry.state.moments, *([] if entry.state.companion is None else [entry.state.companion])]
        return (
            all(isinstance(tensor, Tensor) and tensor.dtype != torch.bfloat16 for tensor in entry.state.history)
            and self._states.codecs.values.in_place
            and not entry.state.is_int8
            and all(isinstance(tensor, Tensor) and tensor.dtype == torch.float32 for tensor in stored)
            and (entry.state.companion is not None or entry.state.parameter.dtype == torch.float32)
            and self._states.codecs.values is self._states.codecs.codes
        )

    def _parts(self, entry: _Entry) -> Iterator[slice]:
        count = entry.state.parameter.numel()
        height = STREAM_SLICE_ELEMENTS if _is_streamed(entry) else SLICE_ELEMENTS
        yield from (slice(start, min(start + height, count)) for start in range(0, count, height))

    def _slot_bytes(self, chosen: Sequence[Unit], grads: GradStore) -> int:
        """Return what the largest piece of work takes in a slot."""
        return max(
            (
                self._states.streamed_bytes(state, STREAM_SLICE_ELEMENTS)
                + grads.streamed_bytes(unit.name, index, STREAM_SLICE_ELEMENTS)
                for unit in chosen
                for index, state in enumerate(self._states.of(unit.name))
            ),
            default=0,
        )

    def _apply(
        self, work: _Work, weights: Sequence[StoredWeight], tensors: Sequence[Tensor], settings: StepSettings
    ) -> None:
        if work.part is None:
            self._apply_whole(work.entries, weights, settings)
            return
        (entry,) = work.entries
        grad_P, *rest = tensors
        companion_P = rest.pop() if entry.state.companion is not None else None
        weight = weight_part(weights[entry.index], work.part)
        codec = self._states.codecs.of(weight)
        if settings.factor is not None:
            grad_P.mul_(settings.factor)
        num_moments = len(entry.state.specs)
        update_stored(codec, weight, companion_P, grad_P, rest[:num_moments], rest[num_moments:], entry.step)

    def _apply_whole(self, entries: Sequence[_Entry], weights: Sequence[StoredWeight], settings: StepSettings) -> None:
        """Update fp32 tensors in one fused call, nothing temporary."""
        codec = self._states.codecs.values
        companions = [None if e.state.companion is None else _tensor(e.state.companion) for e in entries]
        values = [codec.load(weights[e.index], companion) for e, companion in zip(entries, companions, strict=True)]
        grads = [_tensor(entry.grad) for entry in entries]
        if settings.factor is not None:
            torch._foreach_mul_(grads, settings.factor)
        moments = [(_tensor(entry.state.moments[0]), _tensor(entry.state.moments[1])) for entry in entries]
        update_values(values, grads, moments, entries[0].step)
        if settings.slow is not None:
            for entry, value, grad in zip(entries, values, grads, strict=True):
                _follow_slow_whole(entry, value, grad)
        for entry, value, companion in zip(entries, values, companions, strict=True):
            codec.store(value, weights[entry.index], companion)


def _streamed_pieces(entry: _Entry, part: slice) -> list[Piece]:
    """Return gradient, moments, then the companion if there is one."""
    state = entry.state
    pieces = [Piece(entry.grad, part, writes=False)]
    for spec, moment in zip(state.specs, state.moments, strict=True):
        fill = spec.zero if state.is_fresh else None
        pieces.append(Piece(moment, part_of(spec.dtype, part, is_grouped=state.is_int8), fill=fill))
    if entry.step.slow is not None:
        pieces += history_pieces(state, part)
    if state.companion is not None:
        pieces.append(Piece(state.companion, part))
    return pieces


def _follow_slow_whole(entry: _Entry, value: Tensor, grad: Tensor) -> None:
    """Treat the slow average of a tensor that was updated whole, in slices."""
    flat_value, flat_grad = value.view(-1), grad.view(-1)
    for start in range(0, value.numel(), SLICE_ELEMENTS):
        part = slice(start, min(start + SLICE_ELEMENTS, value.numel()))
        history = [_tensor(piece.stored).view(-1)[piece.part] for piece in history_pieces(entry.state, part)]
        moments = [_tensor(moment).view(-1)[part] for moment in entry.state.moments]
        follow_slow(flat_value[part], flat_grad[part], moments, history, entry.step)


def _is_streamed(entry: _Entry) -> bool:
    stored = [entry.grad, *entry.state.moments, *entry.state.history, entry.state.companion]
    return any(isinstance(tensor, TierTensor) for tensor in stored)


def _tensor(stored: Stored) -> Tensor:
    assert isinstance(stored, Tensor), "only what is on the device is updated whole"
    return stored
