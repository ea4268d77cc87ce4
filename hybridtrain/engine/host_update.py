"""The update by the processor, on state and gradients where they wait: only gradients and weights cross the bus."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridtrain.engine.adamw import AdamWStep
from hybridtrain.engine.random_key import random_key
from hybridtrain.engine.rounded_update import update_stored
from hybridtrain.engine.step_settings import StepSettings
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.grad_store import GradStore
from hybridtrain.memory.master_codec import StoredWeight
from hybridtrain.memory.state_store import ParameterState, StateStore
from hybridtrain.memory.tier_tensor import Stored, TierTensor
from hybridtrain.memory.weight_store import WeightStore
from hybridtrain.models.block_model import Unit
from hybridtrain.virtual_gpu.observer import MemoryObserver, Stage


class HostUpdate:
    """Updates units whose gradients, master and moments are in host memory."""

    def __init__(self, weights: WeightStore, states: StateStore, copies: CopyEngine, observer: MemoryObserver) -> None:
        self._weights = weights
        self._states = states
        self._copies = copies
        self._observer = observer

    @torch.no_grad()
    def apply(
        self, unit: Unit, steps: Sequence[AdamWStep], grads: GradStore, settings: StepSettings, number: int
    ) -> None:
        """Update one unit and release its gradients; ``steps`` has one entry per parameter."""
        with self._observer.region(Stage.UPDATE, unit.name):
            states = self._states.acquire(unit)
            taken = grads.take(unit.name)
            done = self._copies.host_work(
                _num_bytes(states, taken), [t.buffer.last_store for t in taken if isinstance(t, TierTensor)]
            )
            parts = self._weights.host_parts(unit.name)
            if parts is not None:
                with _disable_current_modes():
                    torch.default_generator.manual_seed(random_key(settings.seed, number))
                    factor = None if settings.factor is None else settings.factor.cpu()
                    for index in sorted(range(len(states)), key=lambda i: states[i].parameter.dim() < 2):
                        self._update(states[index], taken[index], parts[index], steps[index], factor)
            for state in states:
                state.is_fresh = False
                state.history_is_fresh &= settings.slow is None
            self._weights.refresh(unit.name, done)

    def _update(
        self, state: ParameterState, grad: Stored, weight: StoredWeight, step: AdamWStep, factor: Tensor | None
    ) -> None:
        grad_P = on_host(grad)
        moments = [on_host(moment) for moment in state.moments]
        if state.is_fresh:
            for spec, moment in zip(state.specs, moments, strict=True):
                moment.fill_(spec.zero)
        history = [] if step.slow is None else [on_host(tensor) for tensor in state.history]
        if history and state.history_is_fresh:
            for spec, tensor in zip(state.history_specs, history, strict=True):
                tensor.fill_(spec.zero)
        if factor is not None:
            grad_P.mul_(factor)
        codec = self._states.codecs.of(weight)
        companion_P = None if state.companion is None else on_host(state.companion)
        flat = tuple(part.view(-1) for part in weight)
        update_stored(codec, flat, companion_P, grad_P, moments, history, step)


def on_host(stored: Stored) -> Tensor:
    """Return the flat tensor of state that waits in host memory."""
    assert isinstance(stored, TierTensor), "an update on the host finds everything there"
    return stored.on_host()


def _num_bytes(states: Sequence[ParameterState], grads: Sequence[Stored]) -> int:
    """Return the bytes read and written: gradients and weights once, state twice."""
    total = 0
    for state, grad in zip(states, grads, strict=True):
        total += grad.numel() * grad.dtype.itemsize + state.parameter.numel() * state.parameter.dtype.itemsize
        stored = [*state.moments, *state.history, *([] if state.companion is None else [state.companion])]
        total += 2 * sum(tensor.numel() * tensor.dtype.itemsize for tensor in stored)
    return total
