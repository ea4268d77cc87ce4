"""With probe gradients, forecasts are shifted by what forecasts missed in similar states; else nothing is."""

from collections.abc import Sequence
from typing import ClassVar

import pytest

from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.controller import PhaseController
from hybridtrain.hybrid.forecast.base import LossForecast, TrainingSignal
from hybridtrain.hybrid.stateful import Stateful
from hybridtrain.hybrid.watch import LossWatch
from hybridtrain.phase import Phase

LOSS = 2.0
MISSED = 0.5
WINDOW = 4


class Biased(Stateful):
    """Always forecasts the same loss, and is always wrong by as much."""

    kind: ClassVar[str] = "biased"

    def observe(self, signal: TrainingSignal) -> None:
        assert signal.loss == LOSS

    def forecast(self, future_lrs: Sequence[float], window: int) -> LossForecast:
        assert len(future_lrs) == window == WINDOW
        mean = LOSS - MISSED
        return LossForecast(mean=mean, low=mean - 0.1, high=mean + 0.1, aleatoric=0.1, epistemic=0.0, entropy=None)


def watch(correction: str) -> tuple[LossWatch, PhaseController]:
    config = HybridConfig(full_steps=WINDOW, correction=correction)  # type: ignore[arg-type]
    made = LossWatch(config, 0, lambda step: 1e-3 / step)
    made.forecaster = Biased()
    made.open_round(0)
    return made, PhaseController(config, 0)


def run(made: LossWatch, controller: PhaseController, first: int, last: int) -> list[float]:
    """Return the errors of all blocks that end."""
    errors = []
    for step in range(first, last + 1):
        signal = TrainingSignal(step=step, loss=LOSS, grad_norm=1.0 + step % 3, lr=1e-3 / step, phase=Phase.FULL)
        error = made.observe(signal, controller)
        if error is not None:
            errors.append(error)
            made.open_round(step, predicted_steps=float(step % 5), scale=0.5)
    return errors


def test_next_gradients_correct_no_forecast() -> None:
    errors = run(*watch("next_gradients"), 1, 60)
    assert errors == [MISSED] * 15


def test_a_lasting_error_is_corrected_once_it_was_seen_often_enough() -> None:
    errors = run(*watch("probe_gradients"), 1, 60)
    assert errors[:8] == [MISSED] * 8
    assert errors[8:] == pytest.approx([0.0] * 7, abs=1e-12)  # a weighted mean of equal numbers, rounded


def test_the_interval_moves_with_the_mean() -> None:
    made, controller = watch("probe_gradients")
    run(made, controller, 1, 40)
    assert made.forecast is not None
    assert (made.forecast.low, made.forecast.mean, made.forecast.high) == pytest.approx((1.9, 2.0, 2.1))
    before = controller.state.confidence
    run(made, controller, 41, 44)
    assert controller.state.confidence > before  # the block ended below the corrected bound


def test_a_saved_watch_goes_on_to_the_bit() -> None:
    (made, controller), (other, other_controller) = watch("probe_gradients"), watch("probe_gradients")
    run(made, controller, 1, 42)
    other.load_state_dict(made.state_dict())
    assert run(other, other_controller, 43, 60) == run(made, controller, 43, 60)
    assert other.state_dict() == made.state_dict()


def test_residuals_count_in_the_budget() -> None:
    config = HybridConfig(correction="probe_gradients", predictor_budget_mib=1, forecaster="ema")
    LossWatch(config, 0, lambda _: 1e-3)
    with pytest.raises(ValueError, match=r"budget_mib: 0\.8\d* is too little for forecaster 'rssm'"):
        LossWatch(HybridConfig(correction="probe_gradients", predictor_budget_mib=1, forecaster="rssm"), 0, lambda _: 1)
