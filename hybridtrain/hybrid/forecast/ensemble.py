"""An ensemble with its own Adam and random stream, and a forecaster with one.

Every weight has a leading dimension of members, so that the ensemble is one batched product, not a loop. E members,
B rows, I inputs, O outputs. Adam after Kingma and Ba (1412.6980), gradients scaled down to a global norm.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from hybridtrain.hybrid.forecast.base import Forecaster, RawForecast
from hybridtrain.hybrid.forecast.ticks import GAIN, REPLAY_BYTES, TICK_STEPS, TickReplay
from hybridtrain.hybrid.stateful import Stateful
from hybridtrain.units import MIB

BYTES_PER_WEIGHT = 32
"""Float32 values per parameter: weight, running mean, both moments, root of the second, and the gradient with its
parts. Measured as growth of the process: 103 MiB where this predicts 107."""
_MEAN_UPDATES = 50
"""Time constant of the weights' running mean, in updates; forecasts use the mean, as batches are few and noisy."""
_BETAS = (0.9, 0.99)
_EPS = 1e-8
_MAX_NORM = 10.0
_WEIGHT_DECAY = 1.0
_TICKS_BEFORE_TRAINING, _FEWEST_TICKS, _SHARE_OF_RUN = 8, 4, 4
"""Ticks before training: 8, or a quarter of a short run's, at least 4."""
_ZERO_LAYER = "head"
"""Zero initial output layer, so that an untrained model corrects nothing."""


def gaussian_loss(mean: Tensor, log_variance: Tensor, target: Tensor) -> Tensor:
    """Return the negative log-likelihood without its constant, elementwise."""
    return 0.5 * (log_variance + (target - mean).square() * (-log_variance).exp())


def bounded(log_variance: Tensor) -> Tensor:
    """Return a log-variance within [-6, 4], smoothly."""
    return 5 * torch.tanh(log_variance / 5) - 1


class Ensemble(Stateful):
    """Weights, Adam with rate ``lr`` and random numbers of affine maps, by name with (inputs, outputs)."""

    _state = ("_flat", "_mean", "_m", "_v", "num_updates", "generator")

    def __init__(self, layers: Mapping[str, tuple[int, int]], *, num_members: int, seed: int, lr: float) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self._lr = lr
        self._shapes: dict[str, tuple[int, int, int]] = {}
        for name, (num_inputs, num_outputs) in layers.items():
            self._shapes[f"{name}.weight"] = (num_members, num_inputs, num_outputs)
            self._shapes[f"{name}.bias"] = (num_members, 1, num_outputs)
        self._flat = torch.zeros(sum(math.prod(shape) for shape in self._shapes.values()))
        self._mean, self._m, self._v = (torch.zeros_like(self._flat) for _ in range(3))
        self.num_updates = 0
        for name, weight in self._views(self._flat).items():
            if name.endswith(".weight") and name != f"{_ZERO_LAYER}.weight":
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=self.generator)

    def mean_weights(self) -> dict[str, Tensor]:
        """Return the running mean of the weights by name, as views."""
        return self._views(self._mean)

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        parts = torch.split(flat, [math.prod(shape) for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def update(self, loss_of: Callable[[dict[str, Tensor]], Tensor]) -> None:
        """Take one Adam step on ``loss_of(weights)``; skipped if the gradient is not finite."""
        with torch.enable_grad():
            self._flat.requires_grad_(True)
            (grad,) = torch.autograd.grad(loss_of(self._views(self._flat)), self._flat)
        self._flat.requires_grad_(False)
        norm = float(grad.norm())
        if not math.isfinite(norm):
            return
        if norm > _MAX_NORM:
            grad.mul_(_MAX_NORM / norm)
        self.num_updates += 1
        self._m.lerp_(grad, 1 - _BETAS[0])
        self._v.lerp_(grad.square_(), 1 - _BETAS[1])
        root = (self._v / (1 - _BETAS[1] ** self.num_updates)).sqrt_().add_(_EPS)
        self._flat.mul_(1 - self._lr * _WEIGHT_DECAY)
        self._flat.addcdiv_(self._m, root, value=-self._lr / (1 - _BETAS[0] ** self.num_updates))
        self._mean.lerp_(self._flat, max(1 / _MEAN_UPDATES, 1 / self.num_updates))


class EnsembleForecaster(Forecaster):
    """Corrects the exponential baseline by an ensemble trained online on the run's own ticks."""

    _state: ClassVar[tuple[str, ...]] = ("_replay", "_ensemble")
    layers: ClassVar[Mapping[str, tuple[int, int]]]
    num_members: ClassVar[int]
    lr: ClassVar[float]
    scratch_bytes: ClassVar[int]
    """Scratch bytes of one update."""

    def __init__(self, *, seed: int = 0, budget_mib: float = math.inf, total_steps: int | None = None) -> None:
        super().__init__(seed=seed, budget_mib=budget_mib, total_steps=total_steps)
        needed_mib = self.num_bytes() / MIB
        if needed_mib > budget_mib:
            raise ValueError(
                f"budget_mib: {budget_mib} is too little for forecaster '{self.kind}'; at least "
                f"{math.ceil(needed_mib)} is needed; raise the budget, or use forecaster 'power_law', which needs "
                f"almost no memory"
            )
        self._replay = TickReplay()
        self._ensemble = Ensemble(self.layers, num_members=self.num_members, seed=seed, lr=self.lr)
        share = _TICKS_BEFORE_TRAINING if total_steps is None else total_steps // TICK_STEPS // _SHARE_OF_RUN
        self._fewest_ticks = min(_TICKS_BEFORE_TRAINING, max(_FEWEST_TICKS, share))
        """Ticks before training starts."""

    @classmethod
    def num_bytes(cls) -> int:
        """Return the most bytes that it needs."""
        weights = cls.num_members * sum((inputs + 1) * outputs for inputs, outputs in cls.layers.values())
        return weights * BYTES_PER_WEIGHT + REPLAY_BYTES + cls.scratch_bytes

    @torch.no_grad()
    def _predict(self, future_lrs: Sequence[float], window: int) -> RawForecast | None:
        base = self._replay.base._predict(future_lrs, window)
        if base is None or not self._ensemble.num_updates:
            return base
        num_ticks = max(1, round((len(future_lrs) - window / 2) / TICK_STEPS + 0.5))
        y, unit = self._correct(self._replay.future_actions(future_lrs, num_ticks)), self._replay.base.level / GAIN
        return replace(y, mean=base.mean + unit * y.mean, aleatoric=unit * y.aleatoric, epistemic=unit * y.epistemic)

    @abstractmethod
    def _correct(self, planned_SA: Tensor) -> RawForecast:
        """Return y (ticks.py) at the end of the planned ticks."""
