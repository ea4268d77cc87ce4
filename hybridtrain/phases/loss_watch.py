"""Watches the loss: how far each step is from the run's own past, and how each block ends beside its forecast."""

import math
from collections.abc import Callable
from dataclasses import asdict
from statistics import fmean
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from hybridtrain.phases.controller import PhaseController
from hybridtrain.phases.hybrid_config import HybridConfig
from hybridtrain.predictor.divergence import DivergenceMonitor
from hybridtrain.predictor.forecast import LossForecast
from hybridtrain.predictor.registry import DEFAULT_FORECASTER, make_forecaster
from hybridtrain.predictor.signal import TrainingSignal


class LossWatch:
    """Holds the divergence monitor, the forecaster and the forecast of the block at work.

    Args:
        config: Which forecaster, and its budget.
        seed: Of the forecaster's own random numbers.
        lr_at: Learning rate of a step, counted from 1.

    Raises:
        ValueError: the forecaster does not fit its budget.
    """

    def __init__(self, config: HybridConfig, seed: int, lr_at: Callable[[int], float]) -> None:
        self.monitor = DivergenceMonitor()
        own = config.predictor if config.predictor in {"mlp", "rssm"} else DEFAULT_FORECASTER
        kind: str = config.forecaster or own
        self.forecaster = make_forecaster(kind, seed=seed, budget_mib=config.predictor_budget_mib)
        self.forecast: LossForecast | None = None
        self._window = config.full_steps
        self._lr_at = lr_at
        self._block_losses: list[float] = []

    def open_block(self, steps_done: int) -> None:
        """Forecast the mean loss of the block that begins after so many true steps."""
        self._block_losses.clear()
        lrs = [self._lr_at(steps_done + 1 + step) for step in range(self._window)]
        with _disable_current_modes():  # what forecasts is no part of the card's memory
            self.forecast = self.forecaster.forecast(lrs, self._window)

    def observe(self, signal: TrainingSignal, controller: PhaseController) -> float | None:
        """Take in a true step, and tell the controller how a block ended; return the error of its forecast then."""
        if not math.isfinite(signal.loss):  # a dry run: the trainer refuses such a step
            return None
        self.monitor.observe(signal.loss, signal.grad_norm)
        if len(self._block_losses) >= self._window:  # no jump opened a new one
            self.open_block(signal.step - 1)
        with _disable_current_modes():
            self.forecaster.observe(signal)
        self._block_losses.append(signal.loss)
        if self.forecast is None or len(self._block_losses) < self._window:
            return None
        loss = fmean(self._block_losses)
        controller.judge_block(loss, self.forecast.high)
        return loss - self.forecast.mean

    def state_dict(self) -> dict[str, object]:
        """Return the state as plain values and tensors."""
        return {
            "monitor": self.monitor.state_dict(),
            "forecaster": self.forecaster.state_dict(),
            "forecast": None if self.forecast is None else asdict(self.forecast),
            "block_losses": list(self._block_losses),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        self.monitor.load_state_dict(state["monitor"])
        self.forecaster.load_state_dict(state["forecaster"])
        self.forecast = None if state["forecast"] is None else LossForecast(**state["forecast"])
        self._block_losses = list(state["block_losses"])
