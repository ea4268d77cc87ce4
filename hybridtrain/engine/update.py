"""The update: global norm, clipping, then AdamW unit by unit, so that gradients go as soon as they are used."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtrain.engine.adamw import AdamWConfig, update_unit
from hybridtrain.engine.random_key import random_key
from hybridtrain.memory.grad_store import GradStore
from hybridtrain.memory.state_store import StateStore
from hybridtrain.memory.transfer import Transfer
from hybridtrain.models.block_model import Unit
from hybridtrain.profiler.observer import MemoryObserver, Stage

_CLIP_EPS = 1e-6
"""torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6; the same here, to the bit."""


@dataclass(frozen=True, slots=True)
class Update:
    """Applies gradients to weights under one optimizer configuration."""

    units: tuple[Unit, ...]
    states: StateStore
    config: AdamWConfig
    transfer: Transfer
    observer: MemoryObserver

    @torch.no_grad()
    def clip(self, grads: GradStore) -> Tensor | None:
        """Scale the gradients to the largest allowed norm; return their norm before, None when clipping is off."""
        if not self.config.max_grad_norm:
            return None
        with self.observer.region(Stage.UPDATE, ""):
            norm = grads.norm()
            grads.scale(torch.clamp(self.config.max_grad_norm / (norm + _CLIP_EPS), max=1.0))
        return norm

    @torch.no_grad()
    def apply(self, grads: GradStore, *, lr: float, step: int, seed: int) -> None:
        """Update every unit and release its gradients; ``seed`` keys stochastic rounding, ``step`` counts from 1."""
        with self.transfer.keyed_random():
            for index, unit in enumerate(self.units):
                with self.observer.region(Stage.UPDATE, unit.name):
                    self.transfer.seed(random_key(seed, index))
                    update_unit(
                        self.states.acquire(unit),
                        grads.take(unit.name),
                        self.states.master,
                        self.config,
                        lr,
                        step,
                    )
