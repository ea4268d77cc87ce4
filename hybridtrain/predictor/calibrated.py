"""What all forecasters share: skipping what is no number, calibrating intervals, saving both."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.predictor.calibration import IntervalCalibrator
from hybridtrain.predictor.forecast import LossForecast, State
from hybridtrain.predictor.signal import TrainingSignal

_SMALLEST_SCALE = 1e-4
"""Nats per token: a model surer than this is not believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawForecast:
    """A model's own words, before calibration; nats per token."""

    mean: float
    aleatoric: float
    epistemic: float
    entropy: float | None = None


class CalibratedForecaster(ABC):
    """A model plus an ``IntervalCalibrator``. Signals whose loss is not finite are not learned from."""

    kind: ClassVar[str]

    def __init__(self) -> None:
        self._calibrator = IntervalCalibrator()
        self._step = 0

    def observe(self, signal: TrainingSignal) -> None:
        """Take in one true step; a loss that is not finite is left out."""
        self._step = signal.step
        if not math.isfinite(signal.loss):
            self._calibrator.drop_pending()
            return
        self._calibrator.observe(signal.step, signal.loss, signal.lr)
        self._learn(signal)

    def forecast(self, future_lrs: Sequence[float], window: int) -> LossForecast | None:
        """Forecast the mean loss of the last ``window`` of the next ``len(future_lrs)`` steps; None at first.

        Raises:
            ValueError: the window is empty or longer than the horizon.
        """
        horizon = len(future_lrs)
        if not 1 <= window <= horizon:
            raise ValueError(f"window: {window} must be 1 to {horizon}, the horizon; forecast further or average less")
        raw = self._predict(future_lrs, window)
        if raw is None or not math.isfinite(raw.mean):
            return None
        scale = max(_SMALLEST_SCALE, math.hypot(raw.aleatoric, raw.epistemic))
        half_width = scale * self._calibrator.factor(horizon)
        self._calibrator.remember(self._step, raw.mean, scale, future_lrs, window)
        return LossForecast(
            mean=raw.mean, low=raw.mean - half_width, high=raw.mean + half_width, aleatoric=raw.aleatoric,
            epistemic=raw.epistemic, entropy=raw.entropy,
        )  # fmt: skip

    def state_dict(self) -> State:
        """Return all that a resumed forecaster needs to go on bit-equal."""
        return {
            "kind": self.kind, "step": self._step, "calibrator": self._calibrator.state_dict(),
            "model": self._model_state(),
        }  # fmt: skip

    def load_state_dict(self, state: State) -> None:
        """Take up ``state`` of a forecaster made with the same arguments.

        Raises:
            ValueError: it is the state of another kind.
        """
        if state.get("kind") != self.kind:
            raise ValueError(
                f"kind: the state is of forecaster '{state.get('kind')}'; '{self.kind}' is wanted: resume with "
                "the kind that was saved, or start a new forecaster"
            )
        step, calibrator, model = state["step"], state["calibrator"], state["model"]
        assert isinstance(step, int)
        assert isinstance(calibrator, dict)
        assert isinstance(model, dict)
        self._step = step
        self._calibrator.load_state_dict(calibrator)
        self._load_model_state(model)

    @abstractmethod
    def _learn(self, signal: TrainingSignal) -> None:
        """Take in one step whose loss is finite."""

    @abstractmethod
    def _predict(self, future_lrs: Sequence[float], window: int) -> RawForecast | None:
        """Forecast without calibration; must not change what the model learned."""

    @abstractmethod
    def _model_state(self) -> State:
        """Return the model's part of ``state_dict``."""

    @abstractmethod
    def _load_model_state(self, state: State) -> None:
        """Take up the model's part."""
