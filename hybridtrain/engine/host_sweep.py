"""A pass over weights and state by the processor, where both wait in host memory."""

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hybridtrain.engine.adamw import second_moment
from hybridtrain.engine.host_update import on_host
from hybridtrain.engine.swept_slice import SweepSettings, SweptSlice
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.history_codec import split_history
from hybridtrain.memory.master_codec import StoredWeight
from hybridtrain.memory.rollback_copy import RollbackCopy
from hybridtrain.memory.state_store import ParameterState, StateStore
from hybridtrain.memory.tier_tensor import TierTensor
from hybridtrain.memory.weight_store import WeightStore
from hybridtrain.models.block_model import Unit


class HostSweep:
    """Works on whole parameters of one unit after the other."""

    def __init__(self, weights: WeightStore, states: StateStore, copies: CopyEngine) -> None:
        self._weights = weights
        self._states = states
        self._copies = copies

    def run(
        self,
        unit: Unit,
        work: Callable[[SweptSlice], None] | None,
        settings: SweepSettings,
        rollback: RollbackCopy | None,
        *,
        key: int,
    ) -> None:
        """Call ``work`` on every parameter of a unit; as ``Sweep.run`` otherwise."""
        states = self._states.acquire(unit)
        stored = [tensor for state in states for tensor in _state_tensors(state)]
        num_bytes = sum(2 * state.parameter.numel() * state.parameter.dtype.itemsize for state in states)
        num_bytes += sum(tensor.numel() * tensor.dtype.itemsize for tensor in stored)
        done = self._copies.host_work(num_bytes, [tensor.buffer.last_store for tensor in stored])
        parts = self._weights.host_parts(unit.name)
        if parts is not None:
            with _disable_current_modes():
                torch.default_generator.manual_seed(key)
                for index, (state, weight) in enumerate(zip(states, parts, strict=True)):
                    self._work_on(unit, index, state, weight, work, settings, rollback)
        if settings.writes_history:
            for state in states:
                state.history_is_fresh = False
        if settings.writes_weights:
            self._weights.refresh(unit.name, done)

    def _work_on(
        self,
        unit: Unit,
        index: int,
        state: ParameterState,
        weight: StoredWeight,
        work: Callable[[SweptSlice], None] | None,
        settings: SweepSettings,
        rollback: RollbackCopy | None,
    ) -> None:
        flat = tuple(part.view(-1) for part in weight)
        companion_P = None if state.companion is None else on_host(state.companion)
        if rollback is not None:
            kept = [*flat, *([] if companion_P is None else [companion_P])]
            (rollback.give_on_host if work is None else rollback.take_on_host)(unit.name, index, kept)
        if work is None:
            return
        history = [on_host(tensor) for tensor in state.history] if settings.uses_history else []
        if history and state.history_is_fresh:
            for spec, tensor in zip(state.history_specs, history, strict=True):
                tensor.fill_(spec.zero)
        codec = self._states.codecs.of(weight)
        value_P = codec.load(flat, companion_P)
        second_P = None
        if settings.reads_moments:
            second_P = second_moment([on_host(moment) for moment in state.moments], value_P.numel())
        work(SweptSlice(value_P, second_P, split_history(history, state.num_history if history else 0)))
        if settings.writes_weights:
            codec.store(value_P, flat, companion_P, nearest=settings.rounds_to_nearest)


def _state_tensors(state: ParameterState) -> list[TierTensor]:
    stored = [*state.moments, *state.history, state.companion]
    return [tensor for tensor in stored if isinstance(tensor, TierTensor)]
