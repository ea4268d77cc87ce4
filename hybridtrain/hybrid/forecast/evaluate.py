"""Prequential scores of forecasters: forecast, let the run go on, compare; nothing is seen before it happens."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan

from hybridtrain.hybrid.forecast import make_forecaster
from hybridtrain.hybrid.forecast.base import Forecaster, LossForecast, TrainingSignal

FIRST_STEP = 300
EVERY = 50
BUDGET_MIB = 512.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastScore:
    """How one forecaster did at one horizon; losses in nats per token."""

    kind: str
    horizon: int
    """Steps."""
    num_forecasts: int
    mean_absolute_error: float
    mean_width: float
    """Of the 90 % interval."""
    coverage: float
    """Fraction of forecasts whose interval held the truth; 0.9 is meant."""
    cpu_s_per_step: float
    """Processor time of observing and forecasting, over all horizons, divided by the steps of the run."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A forecast and what came of it."""

    horizon: int
    forecast: LossForecast
    actual: float


def _run(forecaster: Forecaster, signals: Sequence[TrainingSignal], horizons: Sequence[int], window: int) -> \
        Iterable[_Made]:  # fmt: skip
    for index, signal in enumerate(signals, start=1):
        forecaster.observe(signal)
        if index < FIRST_STEP or index % EVERY:
            continue
        for horizon in horizons:
            future = signals[index : index + horizon]
            if len(future) < horizon:
                continue
            forecast = forecaster.forecast([each.lr for each in future], window)
            if forecast is not None:
                yield _Made(horizon, forecast, sum(each.loss for each in future[-window:]) / window)


def _score(kind: str, horizon: int, made: Sequence[_Made], cpu_s_per_step: float) -> ForecastScore:
    count = len(made)

    def mean(values: Iterable[float]) -> float:
        return sum(values) / count if count else nan

    return ForecastScore(
        kind=kind,
        horizon=horizon,
        num_forecasts=count,
        mean_absolute_error=mean(abs(each.forecast.mean - each.actual) for each in made),
        mean_width=mean(each.forecast.high - each.forecast.low for each in made),
        coverage=mean(float(each.forecast.low <= each.actual <= each.forecast.high) for each in made),
        cpu_s_per_step=cpu_s_per_step,
    )


def evaluate_forecasters(
    signals: Sequence[TrainingSignal], kinds: Sequence[str], horizons: Sequence[int], window: int, seed: int
) -> tuple[ForecastScore, ...]:
    """Score forecasters on one run, each new and with the same seed; all but processor time repeats exactly.

    Forecasts are made after every 50th step from step 300 on, with the learning rates the run then took.

    Args:
        signals: Of consecutive steps of one run.
        kinds: Names of ``FORECASTERS``.
        horizons: Steps ahead.
        window: Steps that a forecast averages over.
        seed: Of the forecasters.

    Returns:
        One score per kind and horizon, in the order given.
    """
    scores = []
    for kind in kinds:
        forecaster = make_forecaster(kind, seed=seed, budget_mib=BUDGET_MIB)
        start = time.process_time()
        made = list(_run(forecaster, signals, horizons, window))
        cpu_s_per_step = (time.process_time() - start) / max(1, len(signals))
        scores += [
            _score(kind, horizon, [each for each in made if each.horizon == horizon], cpu_s_per_step)
            for horizon in horizons
        ]
    return tuple(scores)
