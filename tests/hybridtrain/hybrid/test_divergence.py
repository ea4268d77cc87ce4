"""Alarms on spikes, slow rises and numbers that are none; silence on healthy curves."""

import json
import math

import numpy as np
import pytest

from hybridtrain.hybrid.divergence import FEWEST_STEPS, DivergenceLevel, DivergenceMonitor


def healthy(step: int, rng: np.random.Generator) -> tuple[float, float]:
    """A falling loss with measured noise (0.05 nats, log norm 0.25), as of the small byte model."""
    return 1.5 + 4 * step**-0.35 + rng.normal(0, 0.05), math.exp(rng.normal(-0.5, 0.25))


def trained(num_steps: int = 200) -> tuple[DivergenceMonitor, np.random.Generator]:
    monitor, rng = DivergenceMonitor(), np.random.default_rng(3)
    for step in range(1, num_steps + 1):
        monitor.observe(*healthy(step, rng))
    return monitor, rng


def test_healthy_curves_raise_no_alarm() -> None:
    # The bound is the requirement: rarer than 1 in 1000 steps.
    alarms = 0
    for seed in range(4):
        monitor, rng = DivergenceMonitor(), np.random.default_rng(seed)
        alarms += sum(monitor.observe(*healthy(s, rng)) >= DivergenceLevel.WARNING for s in range(1, 1501))
    assert alarms < 6


@pytest.mark.parametrize(
    ("loss", "grad_norm"),
    [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf), (9.0, 1.0), (2.0, 30.0)],
)
def test_breakdowns_are_critical(loss: float, grad_norm: float) -> None:
    monitor, _ = trained()
    assert monitor.observe(loss, grad_norm) is DivergenceLevel.CRITICAL


def test_numbers_that_are_none_are_critical_from_the_first_step() -> None:
    assert DivergenceMonitor().observe(math.nan, None) is DivergenceLevel.CRITICAL


def test_limits_are_where_critical_begins() -> None:
    monitor, _ = trained()
    limits = monitor.limits()
    assert limits is not None
    max_loss, max_norm = limits
    assert max_norm == pytest.approx(10 * math.exp(-0.5), rel=0.3)
    saved = json.loads(json.dumps(monitor.state_dict()))
    for loss, norm, is_critical in (
        (max_loss * (1 - 1e-9), 0.6, False),
        (max_loss * (1 + 1e-9), 0.6, True),
        (1.9, max_norm * (1 - 1e-9), False),
        (1.9, max_norm * (1 + 1e-9), True),
    ):
        monitor.load_state_dict(saved)
        assert (monitor.observe(loss, norm) is DivergenceLevel.CRITICAL) is is_critical


def test_no_limits_until_enough_was_seen() -> None:
    monitor, _ = trained(FEWEST_STEPS - 1)
    assert monitor.limits() is None


def test_a_slow_rise_is_a_warning_before_any_step_is_critical() -> None:
    monitor, rng = trained(300)
    levels = [monitor.observe(2.04 + 0.01 * i + rng.normal(0, 0.05), 0.6) for i in range(60)]
    assert DivergenceLevel.WARNING in levels
    assert DivergenceLevel.CRITICAL not in levels[: levels.index(DivergenceLevel.WARNING)]


def test_level_falls_one_by_one_after_calm_steps() -> None:
    monitor, rng = trained()
    monitor.observe(math.nan, None)
    levels = [monitor.observe(*healthy(200, rng)) for _ in range(70)]
    assert levels[:19] == [DivergenceLevel.CRITICAL] * 19
    assert levels[19] is DivergenceLevel.WARNING
    assert levels[-1] is DivergenceLevel.NORMAL
    assert levels == sorted(levels, reverse=True)


def test_a_spike_does_not_become_the_past() -> None:
    monitor, _ = trained()
    before = monitor.limits()
    for _ in range(40):
        monitor.observe(9.0, 30.0)
    assert monitor.limits() == before


def test_a_lasting_new_level_is_accepted_in_the_end() -> None:
    monitor, rng = trained()
    for _ in range(200):
        monitor.observe(5.0 + rng.normal(0, 0.05), 1.0)
    assert monitor.level is DivergenceLevel.NORMAL


def test_it_works_without_gradient_norms() -> None:
    monitor, rng = DivergenceMonitor(), np.random.default_rng(0)
    for step in range(1, 100):
        monitor.observe(healthy(step, rng)[0], None)
    assert monitor.level is DivergenceLevel.NORMAL
    assert monitor.observe(9.0, None) is DivergenceLevel.CRITICAL


def test_a_resumed_monitor_goes_on_alike() -> None:
    monitor, rng = trained()
    other = DivergenceMonitor()
    other.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    for step in range(200, 260):
        loss, norm = healthy(step, rng)
        loss += 0.6 * (step == 220)
        assert monitor.observe(loss, norm) is other.observe(loss, norm)
        assert monitor.limits() == other.limits()
