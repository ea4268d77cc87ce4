"""What one training run is made of, apart from model and plan."""

from dataclasses import dataclass, field

from hybridtrain.engine.lr_schedule import LrSchedule
from hybridtrain.optim import AdamWConfig, Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Optimizer, schedule and seed."""

    optimizer: Optimizer = field(default_factory=AdamWConfig)
    schedule: LrSchedule = field(default_factory=LrSchedule)
    seed: int = 0
    """Of initial weights, dropout and stochastic rounding."""
