from math import sqrt

import pytest

from hybridvalidation.judge.statistics import mean_interval

ROUNDING = 1e-12  # relative, of a few float64 operations
PRINTED = 1e-3  # tables print three digits behind the point; an expansion of the tail may miss the last one

# Two-sided 95 % quantiles of Student's t (NIST/SEMATECH handbook, table 1.3.6.7.2).
T95 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 9: 2.262, 14: 2.145, 19: 2.093, 20: 2.086,
    21: 2.080, 25: 2.060, 30: 2.042, 40: 2.021, 60: 2.000, 100: 1.984,
}  # fmt: skip


def unit_samples(degrees: int) -> list[float]:
    """Return samples with mean 0 and standard error 1, so that the half width is the quantile."""
    count = degrees + 1
    pairs = [-1.0, 1.0] * (count // 2) + [0.0] * (count % 2)
    deviation = sqrt(2 * (count // 2) / degrees)
    return [value * sqrt(count) / deviation for value in pairs]


def test_three_samples_by_hand() -> None:
    # Mean 10, deviation 2, standard error 2 / sqrt(3) = 1.154701, times 4.303.
    found = mean_interval([8.0, 10.0, 12.0])
    assert found.mean == 10.0
    assert found.high - found.mean == pytest.approx(4.303 * 2 / sqrt(3), rel=ROUNDING)
    assert found.mean - found.low == pytest.approx(4.303 * 2 / sqrt(3), rel=ROUNDING)


def test_two_samples_by_hand() -> None:
    # Mean 1.5, deviation sqrt(0.5), standard error 0.5, times 12.706.
    found = mean_interval([1.0, 2.0])
    assert (found.low, found.high) == pytest.approx((1.5 - 6.353, 1.5 + 6.353), rel=ROUNDING)


@pytest.mark.parametrize("degrees", T95)
def test_the_half_width_is_students_quantile(degrees: int) -> None:
    found = mean_interval(unit_samples(degrees))
    assert found.mean == pytest.approx(0.0, abs=ROUNDING)
    assert found.high == pytest.approx(T95[degrees], abs=PRINTED)
    assert found.low == pytest.approx(-T95[degrees], abs=PRINTED)


def test_more_samples_of_the_same_spread_never_widen_the_interval() -> None:
    widths = [mean_interval([-1.0, 1.0] * half).high for half in range(1, 40)]
    assert widths == sorted(widths, reverse=True)


def test_equal_samples_leave_no_doubt() -> None:
    found = mean_interval([3.0, 3.0, 3.0])
    assert (found.mean, found.low, found.high) == (3.0, 3.0, 3.0)


def test_one_sample_is_no_interval() -> None:
    with pytest.raises(AssertionError, match="two samples"):
        mean_interval([1.0])
