"""The learning rate over a run: its corners, its shape, and what it refuses."""

import math
from itertools import pairwise
from typing import Literal

import pytest

from hybridtrain.trainer_config import LrSchedule

SCHEDULE = LrSchedule(kind="cosine", warmup_steps=4, total_steps=24, final_fraction=0.1)


def test_warm_up_rises_by_equal_steps_and_never_starts_at_zero() -> None:
    assert [SCHEDULE.factor(step) for step in range(1, 5)] == [0.2, 0.4, 0.6, 0.8]


def test_cosine_falls_from_its_peak_to_its_end_half_way_at_the_middle() -> None:
    factors = [SCHEDULE.factor(step) for step in range(5, 25)]
    assert all(high > low for high, low in pairwise(factors))
    assert SCHEDULE.factor(4 + 10) == pytest.approx(0.55)
    assert SCHEDULE.factor(24) == pytest.approx(0.1)
    assert SCHEDULE.factor(5) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 20)))


def test_after_its_end_cosine_stays_there() -> None:
    assert SCHEDULE.factor(25) == SCHEDULE.factor(1000) == pytest.approx(0.1)


def test_constant_stays_at_the_peak() -> None:
    schedule = LrSchedule(kind="constant", warmup_steps=2)
    assert [schedule.factor(step) for step in (1, 2, 3, 5000)] == [pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0, 1.0]


@pytest.mark.parametrize("kind", ["cosine", "constant"])
def test_without_warm_up_the_first_step_is_at_the_peak_or_one_step_below(kind: Literal["cosine", "constant"]) -> None:
    schedule = LrSchedule(kind=kind, warmup_steps=0, total_steps=100)
    expected = 1.0 if kind == "constant" else 0.1 + 0.45 * (1 + math.cos(math.pi / 100))
    assert schedule.factor(1) == pytest.approx(expected)


def test_every_fault_is_listed() -> None:
    with pytest.raises(ValueError, match="warmup_steps") as raised:
        LrSchedule(warmup_steps=-1, total_steps=0, final_fraction=1.5)
    assert str(raised.value).splitlines() == [
        "warmup_steps: -1 must be at least 0",
        "total_steps: 0 must be at least 1",
        "final_fraction: 1.5 must be in [0, 1]",
    ]


def test_a_cosine_needs_steps_after_its_warm_up() -> None:
    with pytest.raises(ValueError, match=r"^warmup_steps: 10 must be below total_steps \(10\)$"):
        LrSchedule(kind="cosine", warmup_steps=10, total_steps=10)


def test_a_constant_may_end_within_its_warm_up() -> None:
    assert LrSchedule(kind="constant", warmup_steps=10, total_steps=5).factor(5) == pytest.approx(5 / 11)
