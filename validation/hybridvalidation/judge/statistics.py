"""Means of paired runs with their intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import stdtrit


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float
    level: float = 0.95
    """Confidence level of the interval."""


def mean_interval(samples: Sequence[float], level: float = 0.95) -> Interval:
    """Return mean and Student's t interval of at least two samples."""
    assert len(samples) >= 2, "fewer than two samples"
    mean = fmean(samples)
    quantile = round(float(stdtrit(len(samples) - 1, (1 + level) / 2)), 3)  # as printed tables of Student's t have it
    half = quantile * stdev(samples) / math.sqrt(len(samples))
    return Interval(mean, mean - half, mean + half, level)
