"""Divergence of the latest steps: robust z-scores of loss and gradient norm.

z = (value - median) / sigma, sigma = max(1.4826 MAD, a floor relative to the median), over the last 100 healthy steps.
Only rises count. A level rises at once and falls by one after 20 calm steps in a row. Thresholds are wide, because
measured losses and log norms have heavy tails.
"""

import math
from collections import deque
from enum import IntEnum
from statistics import median

from hybridtrain.hybrid.stateful import Stateful

WINDOW = 100
FEWEST_STEPS = 20
_RECENT = 16
_CALM_STEPS = 20
_LONGEST_CRITICAL = 50
"""Consecutive critical steps after which the monitor accepts their level as normal: they were not rolled back."""
_CAUTION_Z, _WARNING_Z, _CRITICAL_Z = 4.5, 6.5, 12.0
_WARNING_NORM_Z = 9.0
"""Thresholds of z-scores. Log norms have heavy tails: 6.8 was measured on harmless batches."""
_CAUTION_MEAN_Z, _WARNING_MEAN_Z = 2.0, 3.5
"""Thresholds for the mean of the last 16 losses, which shows a slow rise."""
_LOSS_FLOOR = 0.005
"""Smallest standard deviation, as a fraction of the median loss."""
_LOG_NORM_FLOOR = 0.15
"""Smallest standard deviation of the gradient norm's natural logarithm."""
_CRITICAL_NORM_RATIO = 10.0
_SIGMA_OF_MAD = 1.4826


class DivergenceLevel(IntEnum):
    """Levels of divergence, in rising order."""

    NORMAL = 0
    CAUTION = 1
    WARNING = 2
    CRITICAL = 3


def _centre_and_sigma(values: deque[float], floor: float) -> tuple[float, float]:
    centre = median(values)
    return centre, max(_SIGMA_OF_MAD * median(abs(value - centre) for value in values), floor)


def _grade(z: float, caution: float, warning: float) -> DivergenceLevel:
    if z > warning:
        return DivergenceLevel.WARNING
    return DivergenceLevel.CAUTION if z > caution else DivergenceLevel.NORMAL


class DivergenceMonitor(Stateful):
    """Grades the divergence of each step, with a few hundred numbers of state."""

    _state = ("level", "_losses", "_log_norms", "_calm_steps", "_critical_steps")

    def __init__(self) -> None:
        self.level = DivergenceLevel.NORMAL
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._log_norms: deque[float] = deque(maxlen=WINDOW)
        self._calm_steps = 0
        self._critical_steps = 0

    def observe(self, loss: float, grad_norm: float | None) -> DivergenceLevel:
        """Grade a step against earlier steps; add it to them unless it is critical.

        The loss is in nats per token, the norm the global L2 norm before clipping, None if unknown. The level rises at
        once and falls by one after enough calm steps.
        """
        grade = self._grade_step(loss, grad_norm)
        if grade is not DivergenceLevel.CRITICAL:
            self._critical_steps = 0
            self._losses.append(loss)
            if grad_norm is not None and grad_norm > 0:
                self._log_norms.append(math.log(grad_norm))
        elif self._critical_steps == _LONGEST_CRITICAL:
            self._losses.clear()
            self._log_norms.clear()
            self._critical_steps = 0
        else:
            self._critical_steps += 1
        if grade >= self.level:
            self.level, self._calm_steps = grade, 0
            return self.level
        self._calm_steps += 1
        if self._calm_steps >= _CALM_STEPS:
            self.level, self._calm_steps = DivergenceLevel(self.level - 1), 0
        return self.level

    def limits(self) -> tuple[float, float] | None:
        """Return the loss and the gradient norm above which the next step is critical; None in the first 20 steps."""
        if len(self._losses) < FEWEST_STEPS:
            return None
        centre, sigma = _centre_and_sigma(self._losses, _LOSS_FLOOR * abs(median(self._losses)))
        knows_norms = len(self._log_norms) >= FEWEST_STEPS
        max_norm = _CRITICAL_NORM_RATIO * math.exp(median(self._log_norms)) if knows_norms else math.inf
        return centre + _CRITICAL_Z * sigma, max_norm

    def _grade_step(self, loss: float, grad_norm: float | None) -> DivergenceLevel:
        if not math.isfinite(loss) or not (grad_norm is None or math.isfinite(grad_norm)):
            return DivergenceLevel.CRITICAL
        limits = self.limits()
        if limits is None:
            return DivergenceLevel.NORMAL
        if loss > limits[0] or (grad_norm is not None and grad_norm > limits[1]):
            return DivergenceLevel.CRITICAL
        centre, sigma = _centre_and_sigma(self._losses, _LOSS_FLOOR * abs(median(self._losses)))
        recent = [*self._losses, loss][-_RECENT:]
        grades = [
            _grade((loss - centre) / sigma, _CAUTION_Z, _WARNING_Z),
            _grade((sum(recent) / len(recent) - centre) / sigma, _CAUTION_MEAN_Z, _WARNING_MEAN_Z),
        ]
        if grad_norm is not None and grad_norm > 0 and len(self._log_norms) >= FEWEST_STEPS:
            centre, sigma = _centre_and_sigma(self._log_norms, _LOG_NORM_FLOOR)
            grades.append(_grade((math.log(grad_norm) - centre) / sigma, _CAUTION_Z, _WARNING_NORM_Z))
        return max(grades)
