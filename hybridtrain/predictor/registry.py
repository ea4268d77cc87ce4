"""All loss forecasters by name."""

from collections.abc import Callable

from hybridtrain.errors import unknown_name
from hybridtrain.predictor.ema import EmaForecaster
from hybridtrain.predictor.forecast import LossForecaster
from hybridtrain.predictor.mlp import MlpForecaster
from hybridtrain.predictor.power_law import PowerLawForecaster
from hybridtrain.predictor.rssm import RssmForecaster

FORECASTERS: dict[str, Callable[[int, float], LossForecaster]] = {
    EmaForecaster.kind: lambda _seed, _budget_mib: EmaForecaster(),
    PowerLawForecaster.kind: lambda _seed, _budget_mib: PowerLawForecaster(),
    MlpForecaster.kind: lambda seed, budget_mib: MlpForecaster(seed=seed, budget_mib=budget_mib),
    RssmForecaster.kind: lambda seed, budget_mib: RssmForecaster(seed=seed, budget_mib=budget_mib),
}
"""From seed and memory budget (MiB) to a new forecaster."""

DEFAULT_FORECASTER = PowerLawForecaster.kind
"""The least error of all on held-out runs of a small byte model, at the least cost but one."""


def make_forecaster(kind: str, *, seed: int, budget_mib: float) -> LossForecaster:
    """Return a new forecaster.

    Args:
        kind: A key of ``FORECASTERS``.
        seed: Of its own random numbers; the global random streams are never touched.
        budget_mib: Most memory it may hold.

    Raises:
        ValueError: the name is unknown, or the forecaster does not fit the budget.
    """
    if kind not in FORECASTERS:
        raise ValueError(unknown_name("forecaster", kind, FORECASTERS))
    return FORECASTERS[kind](seed, budget_mib)
