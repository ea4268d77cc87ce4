"""Means of paired runs with their intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

from scipy.special import nctdtr, ndtr, ndtri, stdtrit


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


def spent_levels(analyses: Sequence[int], alpha: float) -> list[float]:
    """Return the error rate that each of several analyses may spend; together at most ``alpha``.

    Totals are those of Lan and DeMets (1983) that resemble the bounds of O'Brien and Fleming: ``2 - 2 Phi(z / sqrt t)``
    with ``z`` the normal quantile of ``1 - alpha / 2`` and ``t`` the share of samples. Each analysis is tested at what
    it adds, which holds however the analyses depend on each other (Bonferroni).

        >>> [f"{level:.5f}" for level in spent_levels([10, 20, 30], 0.05)]
        ['0.00069', '0.01569', '0.03362']

    Args:
        analyses: Numbers of samples, rising.
        alpha: Error rate of all.
    """
    quantile = float(ndtri(1 - alpha / 2))
    totals = [2 * float(ndtr(-quantile / math.sqrt(count / analyses[-1]))) for count in analyses]
    return [after - before for before, after in pairwise([0.0, *totals])]


def power_below(bound: float, deviation: float, count: int, level: float, mean: float = 0.0) -> float:
    """Return the probability that a one-sided t test at ``level`` puts a mean below a bound (noncentral t).

        >>> f"{power_below(0.0075, 0.0075, 15, 0.0125):.2f}"
        '0.89'

    Args:
        bound: That the mean is to be shown below.
        deviation: Standard deviation of a sample.
        count: Samples.
        level: Of the test.
        mean: The true one.
    """
    distance = (bound - mean) / deviation * math.sqrt(count)
    return 1 - float(nctdtr(count - 1, distance, float(stdtrit(count - 1, 1 - level))))
