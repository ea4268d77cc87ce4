"""The forecasters of the training loss, by name."""

from hybridtrain.errors import unknown_name
from hybridtrain.hybrid.forecast.base import Forecaster
from hybridtrain.hybrid.forecast.ema import EmaForecaster
from hybridtrain.hybrid.forecast.mlp import MlpForecaster
from hybridtrain.hybrid.forecast.power_law import PowerLawForecaster
from hybridtrain.hybrid.forecast.rssm import RssmForecaster

FORECASTERS: dict[str, type[Forecaster]] = {
    found.kind: found for found in (EmaForecaster, PowerLawForecaster, MlpForecaster, RssmForecaster)
}

DEFAULT_FORECASTER = PowerLawForecaster.kind
"""Default: lowest error on held-out runs of a small byte model, at the second lowest cost."""


def make_forecaster(kind: str, *, seed: int, budget_mib: float, total_steps: int | None = None) -> Forecaster:
    """Return a new forecaster, as ``Forecaster`` says; raises ``ValueError`` if the name is unknown."""
    if kind not in FORECASTERS:
        raise ValueError(unknown_name("forecaster", kind, FORECASTERS))
    return FORECASTERS[kind](seed=seed, budget_mib=budget_mib, total_steps=total_steps)
