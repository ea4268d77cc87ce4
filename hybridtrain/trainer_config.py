"""What one training run is made of, apart from model and plan."""

from dataclasses import dataclass, field

from hybridtrain.engine.adamw import AdamWConfig
from hybridtrain.engine.lr_schedule import LrSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Optimizer, schedule and seed."""

    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    schedule: LrSchedule = field(default_factory=LrSchedule)
    seed: int = 0
    """Of initial weights, dropout and stochastic rounding."""
