"""Means of paired runs with their 95 % intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import stdtrit


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the 95 % interval around it."""

    mean: float
    low: float
    high: float


def mean_interval(samples: Sequence[float]) -> Interval:
    """Return mean and Student's t interval of at least two samples."""
    assert len(samples) >= 2, "an interval needs two samples"
    mean = fmean(samples)
    quantile = round(float(stdtrit(len(samples) - 1, 0.975)), 3)  # as printed tables of Student's t have it
    half = quantile * stdev(samples) / math.sqrt(len(samples))
    return Interval(mean, mean - half, mean + half)
