import math

import pytest

from hybridvalidation.judge.statistics import mean_interval
from hybridvalidation.study.factors import (
    Factor,
    compute_factor,
    horizon_curve,
    lost_seeds,
    lr_curve,
    method_figures,
    noise_floor,
)
from hybridvalidation.study.protocol import BASELINE, StudyRun
from tiny_studies import METHOD, finished, study_of

ROUNDING = 1e-12  # relative, of a few float64 operations
FALLING = [(2000.0, 2.0), (3000.0, 1.0), (4000.0, 0.5)]


def log_loss(steps: float, noise: float = 0.0) -> float:
    """A curve on which interpolation in the logarithm of the steps is exact."""
    return 5.0 - 0.5 * math.log(steps) + noise


def log_curve(*horizons: float) -> list[tuple[float, float]]:
    return [(steps, log_loss(steps)) for steps in horizons]


@pytest.mark.parametrize("at", [2600.0, 2900.0, 3000.0, 3333.0, 4499.0, 4500.0])
def test_a_factor_is_exact_where_the_loss_is_linear_in_the_logarithm_of_the_steps(at: float) -> None:
    factor = compute_factor(log_curve(2600, 3000, 3600, 4500), log_loss(at), 3000)
    assert factor.value == pytest.approx(at / 3000, rel=ROUNDING)
    assert not factor.bound


def test_a_factor_is_over_the_methods_own_cost() -> None:
    assert compute_factor(FALLING, 1.0, 1500).value == pytest.approx(2.0, rel=ROUNDING)
    assert compute_factor(FALLING, 1.0, 6000).value == pytest.approx(0.5, rel=ROUNDING)


def test_a_loss_beyond_the_ends_is_a_flagged_bound() -> None:
    assert compute_factor(FALLING, 0.4, 2000) == Factor(2.0, ">")
    assert compute_factor(FALLING, 2.1, 2000) == Factor(1.0, "<")


def test_the_ends_themselves_are_no_bounds() -> None:
    assert compute_factor(FALLING, 2.0, 1000) == Factor(pytest.approx(2.0, rel=ROUNDING))
    assert compute_factor(FALLING, 0.5, 1000) == Factor(pytest.approx(4.0, rel=ROUNDING))


def test_a_curve_that_rises_is_levelled_before_it_is_asked() -> None:
    curve = [(1000.0, 3.0), (2000.0, 1.0), (3000.0, 2.0), (4000.0, 0.5)]
    # 2000 and 3000 become 1.5 both: on the way there the loss 2.25 lies in the middle of 3.0 and 1.5
    assert compute_factor(curve, 2.25, 1000).value == pytest.approx(math.sqrt(2), rel=ROUNDING)
    # reached first after 2000, the reading that is kind to AdamW
    assert compute_factor(curve, 1.5, 1000).value == pytest.approx(2.0, rel=ROUNDING)
    assert compute_factor(curve, 1.0, 1000).value == pytest.approx(3 * math.sqrt(4 / 3), rel=ROUNDING)


def test_a_curve_that_only_rises_is_level() -> None:
    assert compute_factor([(1000.0, 1.0), (2000.0, 3.0)], 1.9, 1000) == Factor(2.0, ">")
    assert compute_factor([(1000.0, 1.0), (2000.0, 3.0)], 2.1, 1000) == Factor(1.0, "<")


def test_a_long_violation_is_pooled_as_one() -> None:
    curve = [(1.0, 4.0), (2.0, 1.0), (3.0, 2.0), (4.0, 3.0), (5.0, 0.0)]
    assert compute_factor(curve, 2.0, 1.0).value == pytest.approx(2.0, rel=ROUNDING)
    assert compute_factor(curve, 3.0, 1.0).value == pytest.approx(math.sqrt(2), rel=ROUNDING)


def losses_at(steps: dict[int, float]) -> object:
    """Return losses where slow_gradient ends where AdamW of the same seed would after so many steps, by seed."""

    def loss_of(run: StudyRun) -> float:
        return log_loss(run.num_steps if run.method == BASELINE else steps[run.seed], noise=0.1 * run.seed)

    return loss_of


def test_seeds_are_paired() -> None:
    # the noise between seeds (0.1) is larger than the gains; a mean over unpaired curves would be off
    study = study_of()
    figures = method_figures(study, finished(study, losses_at({0: 13, 1: 14, 2: 15})), "slow_gradient")
    assert figures is not None
    assert [factor.value for factor in figures.factors] == pytest.approx([13 / 12, 14 / 12, 15 / 12], rel=ROUNDING)
    assert figures.gains == pytest.approx([0.5 * math.log(steps / 12) for steps in (13, 14, 15)], rel=1e-9)
    expected = mean_interval([13 / 12, 14 / 12, 15 / 12])
    assert (figures.factor.low, figures.factor.high) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_probes_count_in_the_cost() -> None:
    study = study_of()
    made = finished(study, losses_at({0: 12, 1: 12, 2: 12}), cost=3.0 * 12 + 6)
    figures = method_figures(study, made, "slow_gradient")
    assert figures is not None
    assert figures.cost == 14
    assert [factor.value for factor in figures.factors] == pytest.approx([12 / 14] * 3, rel=ROUNDING)


def test_a_bounded_factor_opens_the_interval_on_its_side() -> None:
    study = study_of()
    above = method_figures(study, finished(study, losses_at({0: 13, 1: 14, 2: 40})), "slow_gradient")
    below = method_figures(study, finished(study, losses_at({0: 13, 1: 14, 2: 2})), "slow_gradient")
    assert above is not None
    assert below is not None
    assert above.bounds == {">"}
    assert above.factor.high == math.inf
    assert above.factor.low == pytest.approx(mean_interval([13 / 12, 14 / 12, 18 / 12]).low, rel=1e-9)
    assert below.bounds == {"<"}
    assert below.factor.low <= 0
    assert below.factor.high == pytest.approx(mean_interval([13 / 12, 14 / 12, 8 / 12]).high, rel=1e-9)


def test_a_diverged_seed_is_told() -> None:
    study = study_of()
    made = finished(study, lambda run: None if (run.method, run.seed) == ("slow_gradient", 1) else 2.0)
    figures = method_figures(study, made, "slow_gradient")
    assert figures is not None
    assert [record.run.seed for record in figures.records] == [0, 2]
    assert lost_seeds(study, made, "slow_gradient") == [1]
    assert lost_seeds(study, made, BASELINE) == []


def test_a_diverged_baseline_loses_its_pair() -> None:
    study = study_of()
    made = finished(study, lambda run: None if (run.method, run.seed) == (BASELINE, 2) else 2.0)
    assert lost_seeds(study, made, "slow_gradient") == [2]


def test_a_diverged_horizon_is_left_out_of_the_curve() -> None:
    study = study_of()
    made = finished(study, lambda run: None if (run.method, run.num_steps) == (BASELINE, 18) else 2.0)
    assert [steps for steps, _ in horizon_curve(study, made, 0)] == [8, 12]
    assert lost_seeds(study, made, "slow_gradient") == []


def test_a_horizon_of_the_tuning_seed_lengthens_its_curve() -> None:
    study = study_of(tuning_horizons=[24])
    made = finished(study, losses_at({0: 20, 1: 20, 2: 20}))
    figures = method_figures(study, made, "slow_gradient")
    assert figures is not None
    assert [factor.bound for factor in figures.factors] == ["", ">", ">"]
    assert figures.factors[0].value == pytest.approx(20 / 12, rel=ROUNDING)


def test_under_a_constant_rate_the_curve_is_one_run_on_its_way() -> None:
    schedule = {"kind": "constant", "warmup_steps": 2, "total_steps": 12}
    study = study_of(schedule=schedule, horizons=[20], validate_every=4)
    made = finished(study, lambda run: 1.0 if run.method == BASELINE else 1.04)
    # AdamW: 1.16 after 4, 1.12, 1.08, 1.04 after 16, 1.00 after 20
    assert [steps for steps, _ in horizon_curve(study, made, 1)] == [4, 8, 12, 16, 20]
    figures = method_figures(study, made, "slow_gradient")
    assert figures is not None
    assert [factor.value for factor in figures.factors] == pytest.approx([16 / 12] * 3, rel=1e-9)
    assert figures.gains == pytest.approx([0.04] * 3, rel=1e-9)


def test_the_noise_floor_is_of_the_baseline_at_the_studys_length() -> None:
    study = study_of()
    assert noise_floor(study, {}) is None
    assert noise_floor(study, finished(study, losses_at({0: 13, 1: 14, 2: 15}))) == pytest.approx(0.1, rel=1e-9)


def test_adamws_rates_are_shown_when_other_betas_are_best() -> None:
    study = study_of(lrs=[0.01, 0.02], betas=[{"beta1": 0.9, "beta2": 0.95}], methods=[METHOD | {"lrs": [0.01, 0.02]}])
    made = finished(study, lambda run: 2.0 + run.lr + run.beta2)
    assert lr_curve(study, made, BASELINE) == [(0.01, 2.0 + 0.01 + 0.99), (0.02, 2.0 + 0.02 + 0.99)]
    assert lr_curve(study, made, "slow_gradient") == [(0.01, 2.0 + 0.01 + 0.95), (0.02, 2.0 + 0.02 + 0.95)]


def test_times_are_of_a_true_step() -> None:
    study = study_of()
    made = finished(study, losses_at({0: 13, 1: 14, 2: 15}), cpu_seconds=18.0)
    figures = method_figures(study, made, "slow_gradient")
    assert figures is not None
    assert figures.cpu_ratios == [1.5] * 3
