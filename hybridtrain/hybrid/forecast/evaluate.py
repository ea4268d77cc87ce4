"""Prequential scores of forecasters: forecast, continue the run, compare; without look-ahead."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import nan

from hybridtrain.hybrid.forecast.base import Forecaster, LossForecast, TrainingSignal
from hybridtrain.hybrid.forecast.catalogue import make_forecaster

FIRST_STEP = 300
EVERY = 50
BUDGET_MIB = 512.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastScore:
    """The score of one forecaster at one horizon; losses in nats per token."""

    kind: str
    horizon: int
    """Steps."""
    num_forecasts: int
    mean_absolute_error: float
    mean_width: float
    """Mean width of the 90 % interval."""
    coverage: float
    """Fraction of forecasts whose interval covered the actual loss; 0.9 is the target."""
    cpu_s_per_step: float
    """CPU time per step of the run, over all horizons."""


def evaluate_forecasters(
    signals: Sequence[TrainingSignal], kinds: Sequence[str], horizons: Sequence[int], window: int, seed: int
) -> tuple[ForecastScore, ...]:
    """Score new forecasters of ``FORECASTERS`` on the consecutive steps of one run.

    Forecasts of the mean of ``window`` losses are made after every 50th step from step 300 on, with the learning rates
    the run then took. All results but CPU time are reproducible. Returns one score per kind and horizon, in order.
    """
    scores = []
    for kind in kinds:
        forecaster = make_forecaster(kind, seed=seed, budget_mib=BUDGET_MIB)
        start = time.process_time()
        made = list(_run(forecaster, signals, horizons, window))
        cpu_s_per_step = (time.process_time() - start) / max(1, len(signals))
        for horizon in horizons:
            of_it = [(forecast, actual) for asked, forecast, actual in made if asked == horizon]
            scores.append(
                ForecastScore(
                    kind=kind,
                    horizon=horizon,
                    num_forecasts=len(of_it),
                    mean_absolute_error=_mean(abs(forecast.mean - actual) for forecast, actual in of_it),
                    mean_width=_mean(forecast.high - forecast.low for forecast, _ in of_it),
                    coverage=_mean(float(forecast.low <= actual <= forecast.high) for forecast, actual in of_it),
                    cpu_s_per_step=cpu_s_per_step,
                )
            )
    return tuple(scores)


def _run(
    forecaster: Forecaster, signals: Sequence[TrainingSignal], horizons: Sequence[int], window: int
) -> Iterator[tuple[int, LossForecast, float]]:
    """Yield the horizon of each forecast, the forecast, and the loss it came to."""
    for index, signal in enumerate(signals, start=1):
        forecaster.observe(signal)
        if index < FIRST_STEP or index % EVERY:
            continue
        for horizon in horizons:
            future = signals[index : index + horizon]
            if len(future) == horizon and (forecast := forecaster.forecast([step.lr for step in future], window)):
                yield horizon, forecast, sum(step.loss for step in future[-window:]) / window


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else nan
