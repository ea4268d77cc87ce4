"""A small ensemble of perceptrons that corrects the exponential baseline; trained online on the run's own past.

Inputs are the state encoding, the planned action over the horizon and the logarithm of the horizon; outputs are mean
and log-variance of the correction y of ticks.py; the loss is the Gaussian negative log-likelihood. Each member
draws its own examples. E members, B examples, F features, I inputs.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from hybridkernels.state_encoding import NUM_FEATURES
from hybridtrain.hybrid.forecast.base import Forecaster, RawForecast, TrainingSignal
from hybridtrain.hybrid.forecast.ensemble import Ensemble, bounded, gaussian_loss, linear, require_budget
from hybridtrain.hybrid.forecast.ticks import GAIN, NUM_ACTIONS, TICK_STEPS, TickReplay, ticks_before_training

_NUM_MEMBERS = 5
_HIDDEN = 32
_BATCH = 32
_MAX_TICKS = 16
_UPDATES_PER_TICK = 8
_LR = 1e-3
_NUM_INPUTS = NUM_FEATURES + 3 + 1
_LAYERS = {"first": (_NUM_INPUTS, _HIDDEN), "second": (_HIDDEN, _HIDDEN), "head": (_HIDDEN, 2)}
_SCRATCH_BYTES = 2 * 2**20


class MlpForecaster(Forecaster):
    """Five perceptrons on ticks of 25 steps. Their own spread is calibrated as all are (base.py).

    Raises:
        ValueError: ``budget_mib`` is too little.
    """

    kind: ClassVar[str] = "mlp"
    _state = ("_replay", "_ensemble")

    def __init__(self, *, seed: int = 0, budget_mib: float = math.inf, total_steps: int | None = None) -> None:
        super().__init__(seed=seed, budget_mib=budget_mib, total_steps=total_steps)
        needed = Ensemble.num_bytes(_LAYERS, _NUM_MEMBERS) + TickReplay.capacity_bytes() + _SCRATCH_BYTES
        require_budget(self.kind, needed, budget_mib)
        self._replay = TickReplay()
        self._ensemble = Ensemble(_LAYERS, ("head",), num_members=_NUM_MEMBERS, seed=seed, lr=_LR)
        self._fewest_ticks = ticks_before_training(total_steps)
        self.steps_before_training = (self._fewest_ticks + 1) * TICK_STEPS

    def _learn(self, signal: TrainingSignal) -> None:
        if self._replay.observe(signal) and len(self._replay) > self._fewest_ticks:
            for _ in range(_UPDATES_PER_TICK):
                self._train()

    def _train(self) -> None:
        generator, shape = self._ensemble.generator, (_NUM_MEMBERS, _BATCH)
        count = len(self._replay)
        origins = self._replay.draw_origins(shape, generator)
        reach = torch.randint(0, _MAX_TICKS, shape, generator=generator)
        reach = torch.minimum(reach, count - 2 - origins)
        ticks = origins[..., None] + torch.arange(_MAX_TICKS + 1)
        elapsed = torch.arange(1.0, _MAX_TICKS + 1).expand(*shape, _MAX_TICKS)
        actions = self._replay.past_actions(ticks, elapsed)
        inputs = _inputs(self._replay.features_TF[origins], actions, reach)
        targets, _ = self._replay.targets(origins, _MAX_TICKS)
        target = targets.gather(-1, reach[..., None])[..., 0]

        def loss_of(weights: dict[str, Tensor]) -> Tensor:
            mean, log_variance = _outputs(inputs, weights)
            return gaussian_loss(mean, log_variance, target).mean() * _NUM_MEMBERS

        self._ensemble.update(loss_of)

    @torch.no_grad()
    def _predict(self, future_lrs: Sequence[float], window: int) -> RawForecast | None:
        base = self._replay.base._predict(future_lrs, window)
        if base is None or len(self._replay) <= self._fewest_ticks:
            return base
        num_ticks = max(1, round((len(future_lrs) - window / 2) / TICK_STEPS + 0.5))
        actions = self._replay.future_actions(future_lrs, num_ticks).expand(_NUM_MEMBERS, 1, -1, -1)
        features = self._replay.encoder.encode().expand(_NUM_MEMBERS, 1, -1)
        reach = torch.full((_NUM_MEMBERS, 1), num_ticks - 1)
        mean, log_variance = _outputs(_inputs(features, actions, reach), self._ensemble.mean_weights())
        unit = self._replay.base.level_and_trend()[0] / GAIN
        variance = float(log_variance.exp().mean())
        return RawForecast(
            mean=base.mean + unit * float(mean.mean()),
            aleatoric=unit * math.sqrt(variance),
            epistemic=unit * float(mean.std()),
        )


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
    hidden = torch.nn.functional.silu(linear(inputs_EBI, weights, "first"))
    hidden = torch.nn.functional.silu(linear(hidden, weights, "second"))
    mean, log_variance = linear(hidden, weights, "head").unbind(-1)
    return mean, bounded(log_variance)
