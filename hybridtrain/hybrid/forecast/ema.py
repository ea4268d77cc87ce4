"""The simple baseline: exponential level and damped trend (Holt 1957; Gardner and McKenzie 1985).

level_t = a y_t + (1 - a)(level_{t-1} + phi trend_{t-1});  trend_t = b (level_t - level_{t-1}) + (1 - b) phi trend_{t-1}
forecast at h = level + trend (phi + phi^2 + ... + phi^h), averaged over the window. Learning rates are ignored.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

from hybridtrain.hybrid.forecast.base import Forecaster, RawForecast, TrainingSignal

_LEVEL_RATE = 0.03
_TREND_RATE = 0.01
_DAMPING = 0.997
_NOISE_RATE = 0.02
_FEWEST_STEPS = 20


def damped_reach(horizon: float) -> float:
    """Return the level's movement in ``horizon`` steps, in units of the trend: phi + ... + phi^h."""
    return _DAMPING * (1 - math.pow(_DAMPING, horizon)) / (1 - _DAMPING)


class EmaForecaster(Forecaster):
    """Exponential smoothing with damped trend. Its own scale grows with the root of h; base.py calibrates it."""

    kind: ClassVar[str] = "ema"
    _state = ("_count", "level", "trend", "_variance")

    def __init__(self, *, seed: int = 0, budget_mib: float = math.inf, total_steps: int | None = None) -> None:
        super().__init__(seed=seed, budget_mib=budget_mib, total_steps=total_steps)
        self._count = self._variance = 0.0
        self.level = self.trend = 0.0
        """Loss level in nats per token, and its change per step."""

    def _learn(self, signal: TrainingSignal) -> None:
        self._count += 1
        if self._count == 1:
            self.level = signal.loss
            return
        # Plain averages until there are 1 / rate samples.
        level_rate, trend_rate = max(_LEVEL_RATE, 1 / self._count), max(_TREND_RATE, 1 / self._count)
        expected = self.level + _DAMPING * self.trend
        error = signal.loss - expected
        before, self.level = self.level, expected + level_rate * error
        self.trend = trend_rate * (self.level - before) + (1 - trend_rate) * _DAMPING * self.trend
        self._variance += max(_NOISE_RATE, 1 / self._count) * (error * error - self._variance)

    def _predict(self, future_lrs: Sequence[float], window: int) -> RawForecast | None:
        if self._count < _FEWEST_STEPS:
            return None
        horizon = len(future_lrs)
        reach = sum(damped_reach(h) for h in range(horizon - window + 1, horizon + 1)) / window
        noise = math.sqrt(self._variance)
        return RawForecast(
            mean=self.level + self.trend * reach,
            aleatoric=noise / math.sqrt(window),
            epistemic=noise * _LEVEL_RATE * math.sqrt(horizon),
        )
