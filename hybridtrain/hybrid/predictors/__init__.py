"""The weight predictors: one file each, one line here."""

from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.predictors.linear import Linear
from hybridtrain.hybrid.predictors.slow_gradient import SlowGradient
from hybridtrain.hybrid.predictors.weight_predictor import WeightPredictor
from hybridtrain.trainer import Trainer

PREDICTORS: dict[str, type[WeightPredictor]] = {Linear.kind: Linear, SlowGradient.kind: SlowGradient}


def make_predictor(config: HybridConfig, trainer: Trainer) -> WeightPredictor:
    """Return the predictor of a configuration."""
    return PREDICTORS[SlowGradient.kind if config.follows_slow else config.predictor](config, trainer)
