"""How far the time model was from recorded steps that it had not seen: differences below it decide nothing."""

from collections.abc import Callable

from hybridtrain.virtual_gpu.roofline import time_errors
from hybridvalidation.judge.statistics import Interval

_BEFORE_CHANGES = 0.088
"""Of the first cross-validation. Two things were changed with its runs known, so what is told since is flattered
(results/time-model.md, what is not independent)."""
TIME_ERROR = max(time_errors()["leave_one_card_out"].mean_absolute, _BEFORE_CHANGES)
"""Mean absolute error, relative, of recorded steps on cards that the model was not fitted on. It is no bound, and of
single speeds: of two runs on one card that wait for the same, errors have one sign, and a ratio's is smaller."""


def within_error(value: float, express: Callable[[float], float] = lambda rate: rate) -> Interval:
    """Return an estimate with the ends that it has when the speed is off by the error.

    Args:
        value: A speed, or a ratio of two.
        express: What is told of it, rising or falling.
    """
    low, high = sorted(express(value * factor) for factor in (1 - TIME_ERROR, 1 + TIME_ERROR))
    return Interval(express(value), low, high)
