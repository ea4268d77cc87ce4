"""The weight predictor that a configuration names."""

from collections.abc import Callable

from hybridtrain.phases.hybrid_config import HybridConfig
from hybridtrain.phases.linear import Linear
from hybridtrain.phases.slow_gradient import SlowGradient
from hybridtrain.phases.weight_predictor import WeightPredictor
from hybridtrain.trainer import Trainer


def make_predictor(
    config: HybridConfig, trainer: Trainer, probe_loss: Callable[[], Callable[[], float]]
) -> WeightPredictor:
    """Return it; ``probe_loss`` opens the next probe batch and returns how to ask for its loss."""
    if config.predictor == "linear":
        return Linear(trainer, config.strength)
    slow = config.slow.within_bounds(trainer.config.schedule.total_steps) if config.guard else config.slow
    return SlowGradient(trainer, slow, config.max_move, config.max_relative_move)
