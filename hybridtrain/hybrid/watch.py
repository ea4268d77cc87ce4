"""Watches a run: the loss of each round (the K true steps between jumps) against its forecast, and divergence.

Some forecasters also get statistics of the optimizer's moments.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridkernels.state_encoding import Moments, moment_statistics, moments_of_sums
from hybridtrain.engine.step import StepResult
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.controller import PhaseController
from hybridtrain.hybrid.divergence import DivergenceMonitor
from hybridtrain.hybrid.forecast.base import LossForecast, TrainingSignal
from hybridtrain.hybrid.forecast.catalogue import DEFAULT_FORECASTER, make_forecaster
from hybridtrain.hybrid.forecast.ensemble import EnsembleForecaster
from hybridtrain.hybrid.forecast.residual_store import ResidualStore
from hybridtrain.hybrid.stateful import State, Stateful
from hybridtrain.trainer import Trainer
from hybridtrain.units import MIB

_MAX_RESIDUALS = 4096
_NUM_FEATURES = 5
_FEWEST_RESIDUALS = 8
"""Fewest residuals for a correction; fewer are noise."""
_LEVEL_RATE = 0.1
_SMALLEST = 1e-12


class LossWatch(Stateful):
    """Combines the divergence monitor, the forecaster and the forecast of the current round.

    ``lr_at`` returns the learning rate of a step, counted from 1. Raises as ``make_forecaster`` does.
    """

    _state = (
        "monitor", "forecaster", "forecast", "_block_losses", "_residuals", "_features", "_correction", "_log_level",
        "_log_norm",
    )  # fmt: skip
    forecast: LossForecast | None
    """Forecast of the current round."""

    def __init__(
        self, config: HybridConfig, seed: int, lr_at: Callable[[int], float], total_steps: int | None = None
    ) -> None:
        self.monitor = DivergenceMonitor()
        own = config.predictor if config.predictor in {"mlp", "rssm"} else DEFAULT_FORECASTER
        budget_mib = float(config.predictor_budget_mib)
        self._residuals: ResidualStore | None = None
        if config.correction == "probe_gradients":
            self._residuals = ResidualStore(_MAX_RESIDUALS, _NUM_FEATURES)
            budget_mib -= self._residuals.num_bytes / MIB
        self.forecaster = make_forecaster(
            config.forecaster or own, seed=seed, budget_mib=budget_mib, total_steps=total_steps
        )
        self.forecast = None
        self._features: list[float] = []
        """Features of the state in which the forecast was made."""
        self._correction = 0.0
        """Correction added to the forecast."""
        self._log_level = self._log_norm = 0.0
        """Running levels of loss and gradient norm."""
        self._window = config.full_steps
        self._lr_at = lr_at
        self._block_losses: list[float] = []

    def open_round(self, steps_done: int, *, predicted_steps: float = 0.0, scale: float = 1.0) -> None:
        """Forecast the mean loss of the round after the given true steps and a jump of ``scale``."""
        self._block_losses.clear()
        lrs = [self._lr_at(steps_done + 1 + step) for step in range(self._window)]
        with _disable_current_modes():  # what forecasts is no part of the card's memory
            self.forecast = self.forecaster.forecast(lrs, self._window)
        if self._residuals is None:
            return
        log_lr = math.log(max(lrs[0], _SMALLEST))
        self._features = [log_lr, self._log_level, self._log_norm, scale, predicted_steps]
        is_known = len(self._residuals) >= _FEWEST_RESIDUALS
        self._correction = shift = self._residuals.correction(self._features) if is_known else 0.0
        if (made := self.forecast) is not None:
            self.forecast = replace(made, mean=made.mean + shift, low=made.low + shift, high=made.high + shift)

    def observe(self, signal: TrainingSignal, controller: PhaseController) -> float | None:
        """Add a true step; at the end of a round return its forecast error, which the controller judges."""
        if not math.isfinite(signal.loss):  # a dry run: the trainer refuses such a step
            return None
        self.monitor.observe(signal.loss, signal.grad_norm)
        if len(self._block_losses) >= self._window:  # no jump opened a new one
            self.open_round(signal.step - 1)
        with _disable_current_modes():
            self.forecaster.observe(signal)
        self._block_losses.append(signal.loss)
        rate = _LEVEL_RATE if signal.step > 1 else 1.0
        self._log_level += rate * (math.log(max(signal.loss, _SMALLEST)) - self._log_level)
        if signal.grad_norm is not None:
            self._log_norm += rate * (math.log(max(signal.grad_norm, _SMALLEST)) - self._log_norm)
        if self.forecast is None or len(self._block_losses) < self._window:
            return None
        loss = fmean(self._block_losses)
        controller.judge_round(loss, self.forecast.high)
        error = loss - self.forecast.mean
        if self._residuals is not None:
            self._residuals.add(self._features, error + self._correction)  # what the forecaster itself missed
        return error

    def moments(self, trainer: Trainer, done: StepResult) -> Sequence[float] | None:
        """Return moment statistics for a forecaster that encodes them; None for others."""
        return read_moments(trainer, done) if isinstance(self.forecaster, EnsembleForecaster) else None

    def load_state_dict(self, state: State) -> None:
        """Restore a state; forecasters do not count as card memory."""
        with _disable_current_modes():
            super().load_state_dict(state)


def read_moments(trainer: Trainer, done: StepResult) -> Sequence[float] | None:
    """Return statistics of all floating-point moments on the device; None if there are none.

    They are the six of ``moments_of_sums``. 8-bit, factored and offloaded moments are ignored.
    """
    if not math.isfinite(done.loss):  # a dry run
        return None
    found: list[Moments] = []
    with _disable_current_modes(), torch.no_grad():  # no part of the card's memory, no gradient
        for state in [state for _, states in trainer.states.items() for state in states]:
            kept = [tensor for slot in (*state.slots, *state.extra) for tensor in slot.tensors]
            tensors = [stored for stored in kept if isinstance(stored, Tensor) and stored.is_floating_point()]
            names = tuple(slot.spec.name for slot in state.slots)
            if names == ("exp_avg", "exp_avg_sq") and len(tensors) == len(kept):
                found.append(Moments(*tensors[:3]))
        if not found:
            return None
        statistics: list[float] = moments_of_sums(moment_statistics(found)).tolist()
        return statistics
