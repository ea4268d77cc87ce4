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
_NORMAL95 = 1.959964


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
    half = _quantile(len(samples) - 1) * stdev(samples) / math.sqrt(len(samples))
    return Interval(mean, mean - half, mean + half)


def _quantile(degrees: int) -> float:
    """Return Student's t; beyond the table by its expansion around the normal (Abramowitz and Stegun, 26.7.5)."""
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    z = _NORMAL95
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
