"""Every forecaster on runs made of a law: errors, coverage, resuming, budgets, random numbers of their own."""

import io
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from hybridtrain.hybrid.forecast.base import Forecaster, IntervalCalibrator, TrainingSignal
from hybridtrain.hybrid.forecast.catalogue import DEFAULT_FORECASTER, FORECASTERS, make_forecaster
from hybridtrain.hybrid.forecast.evaluate import evaluate_forecasters
from hybridtrain.hybrid.forecast.rssm import RssmForecaster
from hybridtrain.phase import Phase

KINDS = sorted(FORECASTERS)
NOISE = 0.05


def run(num_steps: int, *, seed: int = 0, noise: float = NOISE, total: int = 1500) -> list[TrainingSignal]:
    """Signals of a power law of the summed rate under cosine, with 0.2 nats to be earned by annealing."""
    rng, signals, total_lr = np.random.default_rng(seed), [], 0.0
    for step in range(1, num_steps + 1):
        factor = step / 50 if step < 50 else 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - 50) / (total - 50)))
        total_lr += factor
        loss = 1.2 + 3.0 * (total_lr + 5) ** -0.3 + (0.2 * (factor - 1) if step >= 50 else 0.0)
        signals.append(
            TrainingSignal(
                step=step,
                loss=loss + rng.normal(0, noise),
                grad_norm=math.exp(rng.normal(0, 0.2)),
                lr=5e-3 * factor,
                phase=Phase.WARMUP if step < 50 else Phase.FULL,
                predicted_steps=10.0 if step % 97 == 0 else 0.0,
                moments=(0.0, 1e-3, 1e-4, 2e-4, 0.0, 0.0) if step % 2 else None,
            )
        )
    return signals


def feed(forecaster: Forecaster, signals: Sequence[TrainingSignal]) -> None:
    for signal in signals:
        forecaster.observe(signal)


def new(kind: str, seed: int = 0) -> Forecaster:
    """Return a forecaster of a run so short that models are trained from step 110 on."""
    return make_forecaster(kind, seed=seed, budget_mib=512, total_steps=40)


STEPS = 130


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_said_at_first_and_everything_is_finite_later(kind: str) -> None:
    forecaster = new(kind)
    assert forecaster.forecast([1e-3] * 50, 25) is None
    feed(forecaster, run(STEPS))
    for horizon, window in ((1, 1), (25, 25), (130, 10), (260, 25)):
        forecast = forecaster.forecast([4e-3] * horizon, window)
        assert forecast is not None
        assert forecast.low < forecast.mean < forecast.high
        assert 0 < forecast.aleatoric < 1
        assert 0 <= forecast.epistemic < 1
        assert 0 < forecast.mean < 4
        assert (forecast.entropy is not None) == (kind == "rssm")
        if forecast.entropy is not None:
            assert 0 <= forecast.entropy <= math.log(32)


@pytest.mark.parametrize("total", [None, 40, 400, 500, 3000])
@pytest.mark.parametrize("kind", ["mlp", "rssm"])
def test_training_begins_in_proportion_to_the_run(kind: str, total: int | None) -> None:
    forecaster = make_forecaster(kind, seed=0, budget_mib=512, total_steps=total)
    first = forecaster.steps_before_training
    ticks = {None: 8, 40: 4, 400: 4, 500: 5, 3000: 8}[total]
    assert 0 <= first - 25 * ticks <= 25
    signals = run(first)
    feed(forecaster, signals[:-1])
    assert forecaster._ensemble.num_updates == 0  # type: ignore[attr-defined]
    feed(forecaster, signals[-1:])
    assert forecaster._ensemble.num_updates > 0  # type: ignore[attr-defined]
    assert math.isfinite(forecaster.forecast([1e-3] * 50, 25).mean)  # type: ignore[union-attr]


@pytest.mark.parametrize("window", [0, 11])
def test_a_window_must_fit_the_horizon(window: int) -> None:
    with pytest.raises(ValueError, match="window"):
        new("ema").forecast([1e-3] * 10, window)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_forecaster_is_bit_equal(kind: str) -> None:
    signals = run(STEPS + 20)
    first, second = new(kind, 5), new(kind, 5)
    lrs = [signal.lr for signal in signals]
    feed(first, signals[: STEPS - 10])
    first.forecast(lrs[STEPS - 10 : STEPS + 20], 20)  # pending when saved
    buffer = io.BytesIO()
    torch.save(saved := first.state_dict(), buffer)
    feed(first, signals[STEPS - 10 :])
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert_equal(saved, state)  # what was saved does not change later
    second.load_state_dict(state)
    feed(second, signals[STEPS - 10 :])
    assert first.forecast([3e-3] * 100, 25) == second.forecast([3e-3] * 100, 25)
    assert_equal(first.state_dict(), second.state_dict())


def assert_equal(one: object, other: object) -> None:
    for mine, theirs in zip(_leaves(one), _leaves(other), strict=True):
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs


def _leaves(state: object) -> list[object]:
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in _leaves(value)]
    return [leaf for value in state for leaf in _leaves(value)] if isinstance(state, list) else [state]


def test_a_state_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ema.*power_law"):
        new("power_law").load_state_dict(new("ema").state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_global_random_streams_and_the_gradient_mode_are_left_alone(kind: str) -> None:
    results = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        np.random.seed(global_seed)  # noqa: NPY002  the global stream is what is tested
        before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
        forecaster = new(kind, 3)
        with torch.set_grad_enabled(global_seed == 1):
            feed(forecaster, run(STEPS))
        results.append(forecaster.forecast([3e-3] * 50, 25))
        assert torch.equal(torch.get_rng_state(), before)
        assert np.random.get_state()[1].tolist() == numpy_before  # noqa: NPY002
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", ["mlp", "rssm"])
def test_asking_changes_no_weight(kind: str) -> None:
    asked, unasked = new(kind), new(kind)
    for signal in run(STEPS):
        asked.observe(signal)
        unasked.observe(signal)
        if signal.step % 60 == 0:
            asked.forecast([1e-3] * 400, 25)
    assert_equal(asked.state_dict()["ensemble"], unasked.state_dict()["ensemble"])


def test_budgets_are_kept() -> None:
    needed = RssmForecaster.num_bytes() / 2**20
    make_forecaster("rssm", seed=0, budget_mib=needed + 0.01)
    for kind, budget in (("rssm", needed - 0.01), ("mlp", 0.1)):
        with pytest.raises(ValueError, match=rf"budget_mib: .*{kind}.*at least \d+ is needed; "):
            make_forecaster(kind, seed=0, budget_mib=budget)


def test_an_unknown_kind_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="power_law"):
        make_forecaster("powerlaw", seed=0, budget_mib=1)
    assert DEFAULT_FORECASTER in FORECASTERS


@pytest.mark.parametrize("kind", KINDS)
def test_losses_that_are_no_numbers_are_left_out(kind: str) -> None:
    clean, faulty = new(kind), new(kind)
    for signal in run(STEPS):
        clean.observe(signal)
        if signal.step == 120:  # replaced by the good step of the same number
            faulty.observe(TrainingSignal(step=120, loss=math.nan, grad_norm=math.nan, lr=1e-3, phase=Phase.FULL))
        faulty.observe(signal)
    assert clean.forecast([3e-3] * 50, 25) == faulty.forecast([3e-3] * 50, 25)


def test_the_law_is_found_where_there_is_one() -> None:
    signals = run(1500, noise=0.01)
    forecaster = make_forecaster("power_law", seed=0, budget_mib=1)
    feed(forecaster, signals[:900])
    rest = signals[900:1400]
    forecast = forecaster.forecast([signal.lr for signal in rest], 25)
    assert forecast is not None
    actual = sum(signal.loss for signal in rest[-25:]) / 25
    # The fall over these 500 steps is near 0.1 nats; a tenth of it is asked, five times the noise of the mean.
    assert signals[899].loss - actual > 0.08
    assert abs(forecast.mean - actual) < 0.01


def test_scores_rank_and_cover_on_a_law() -> None:
    scores = evaluate_forecasters(run(1500), ["ema", "power_law"], [50, 200], 25, seed=0)
    by_kind = {(score.kind, score.horizon): score for score in scores}
    assert len(scores) == 4
    assert by_kind["ema", 50].num_forecasts == 24
    for score in scores:
        # 21 to 24 dependent forecasts: 0.9 +- 3 deviations of independent ones is 0.71 to 1.
        assert 0.7 <= score.coverage <= 1.0
        assert 0 < score.mean_width < 0.5
    assert by_kind["power_law", 200].mean_absolute_error < by_kind["ema", 200].mean_absolute_error
    again, once_more = (evaluate_forecasters(run(400), ["mlp"], [50], 25, seed=0)[0] for _ in range(2))
    assert replace(again, cpu_s_per_step=0) == replace(once_more, cpu_s_per_step=0)


def test_intervals_follow_the_scores() -> None:
    calibrator, rng = IntervalCalibrator(), np.random.default_rng(0)
    held, count = 0, 400
    for step in range(count):
        half_width = 0.1 * calibrator.factor(1)
        loss = 2.0 + rng.normal(0, 0.5)
        calibrator.remember(step, 2.0, 0.1, [1e-3], 1)
        calibrator.observe(step + 1, loss, 1e-3)
        held += abs(loss - 2.0) <= half_width
    # The model believes 0.1 where 0.5 is true. Binomial deviation at 400 is 0.015; 4 of them.
    assert 0.84 <= held / count <= 0.96


def test_forecasts_under_other_rates_are_not_scored() -> None:
    calibrator = IntervalCalibrator()
    before = calibrator.factor(10)
    for step in range(0, 400, 10):
        calibrator.remember(step, 2.0, 0.1, [1e-3] * 10, 5)
        for inner in range(1, 11):
            calibrator.observe(step + inner, 9.0, 2e-3)
    assert calibrator.factor(10) == before
