"""Means of paired runs with their 95 % intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Two-sided 95 % quantile of Student's t with 1, 2, ... 20 degrees of freedom."""
_NORMAL95 = 1.960


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
    degrees = len(samples) - 1
    quantile = _T95[degrees - 1] if degrees <= len(_T95) else _NORMAL95
    half = quantile * stdev(samples) / math.sqrt(len(samples))
    return Interval(mean, mean - half, mean + half)
