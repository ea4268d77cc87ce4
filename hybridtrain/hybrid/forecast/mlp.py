"""A small ensemble of perceptrons that corrects the exponential baseline; trained online on the run's own past.

Inputs are the state encoding, the planned action over the horizon and the logarithm of the horizon; outputs are mean
and log-variance of the correction y of ticks.py; the loss is the Gaussian negative log-likelihood. Each member
draws its own examples. E members, B examples, F features, I inputs.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import silu

from hybridkernels.rssm_gru.reference import linear
from hybridkernels.state_encoding import NUM_FEATURES
from hybridtrain.hybrid.forecast.base import RawForecast, TrainingSignal
from hybridtrain.hybrid.forecast.ensemble import EnsembleForecaster, bounded, gaussian_loss
from hybridtrain.hybrid.forecast.ticks import NUM_ACTIONS, TICK_STEPS

_HIDDEN = 32
_BATCH = 32
_MAX_TICKS = 16
_UPDATES_PER_TICK = 8


class MlpForecaster(EnsembleForecaster):
    """Five perceptrons on ticks of 25 steps; base.py calibrates their spread."""

    kind: ClassVar[str] = "mlp"
    layers: ClassVar[dict[str, tuple[int, int]]] = {
        "first": (NUM_FEATURES + 3 + 1, _HIDDEN),
        "second": (_HIDDEN, _HIDDEN),
        "head": (_HIDDEN, 2),
    }
    num_members = 5
    lr = 1e-3
    scratch_bytes = 2 * 2**20

    def __init__(self, *, seed: int = 0, budget_mib: float = math.inf, total_steps: int | None = None) -> None:
        super().__init__(seed=seed, budget_mib=budget_mib, total_steps=total_steps)
        self.steps_before_training = (self._fewest_ticks + 1) * TICK_STEPS

    def _learn(self, signal: TrainingSignal) -> None:
        if self._replay.observe(signal) and len(self._replay) > self._fewest_ticks:
            for _ in range(_UPDATES_PER_TICK):
                self._train()

    def _train(self) -> None:
        generator, shape = self._ensemble.generator, (self.num_members, _BATCH)
        origins = self._replay.draw_origins(shape, generator)
        reach = torch.randint(0, _MAX_TICKS, shape, generator=generator)
        reach = torch.minimum(reach, len(self._replay) - 2 - origins)
        ticks = origins[..., None] + torch.arange(_MAX_TICKS + 1)
        elapsed = torch.arange(1.0, _MAX_TICKS + 1).expand(*shape, _MAX_TICKS)
        inputs = _inputs(self._replay.features_TF[origins], self._replay.past_actions(ticks, elapsed), reach)
        targets, _ = self._replay.targets(origins, _MAX_TICKS)
        target = targets.gather(-1, reach[..., None])[..., 0]

        def loss_of(weights: dict[str, Tensor]) -> Tensor:
            mean, log_variance = _outputs(inputs, weights)
            return gaussian_loss(mean, log_variance, target).mean() * self.num_members

        self._ensemble.update(loss_of)

    def _correct(self, planned_SA: Tensor) -> RawForecast:
        actions = planned_SA.expand(self.num_members, 1, -1, -1)
        features = self._replay.encoder.encode().expand(self.num_members, 1, -1)
        reach = torch.full((self.num_members, 1), len(planned_SA) - 1)
        mean, log_variance = _outputs(_inputs(features, actions, reach), self._ensemble.mean_weights())
        deviation = math.sqrt(float(log_variance.exp().mean()))
        return RawForecast(mean=float(mean.mean()), aleatoric=deviation, epistemic=float(mean.std()))


def _inputs(features_EBF: Tensor, actions: Tensor, reach_EB: Tensor) -> Tensor:
    """Return (E, B, I): features, summed change and last value of the rate, mean relative rate, log horizon."""
    index = reach_EB[..., None]
    summed, count = actions.cumsum(-2), index + 1.0
    change = summed[..., 0].gather(-1, index) / NUM_ACTIONS
    relative = actions[..., 1].gather(-1, index)
    mean = summed[..., 1].gather(-1, index) / count
    return torch.cat([features_EBF, change, relative, mean, count.log()], -1)


def _outputs(inputs_EBI: Tensor, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and log-variance of y, both (E, B)."""
    hidden = silu(linear(silu(linear(inputs_EBI, weights, "first")), weights, "second"))
    mean, log_variance = linear(hidden, weights, "head").unbind(-1)
    return mean, bounded(log_variance)
