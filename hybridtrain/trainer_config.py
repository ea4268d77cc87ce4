"""Settings of a training run, apart from model and plan: optimizer, learning rate by step, seed."""

import math
from dataclasses import dataclass, field
from typing import Literal

from hybridtrain.config.rules import broken, refuse
from hybridtrain.optim.adamw import AdamWConfig
from hybridtrain.optim.optimizer import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LrSchedule:
    """Shape of the learning rate, relative to its peak."""

    kind: Literal["cosine", "constant"] = "cosine"
    """cosine: decays to ``final_fraction``. constant: stays at the peak after the warm-up."""
    warmup_steps: int = 100
    """Steps of linear growth from 0."""
    total_steps: int = 1000
    """Step at which cosine reaches ``final_fraction``."""
    final_fraction: float = 0.1
    """Fraction of the peak at the end of cosine."""

    def __post_init__(self) -> None:
        warmup, total = self.warmup_steps, self.total_steps
        rules = {
            f"warmup_steps: {warmup} must be at least 0": warmup >= 0,
            f"total_steps: {total} must be at least 1": total >= 1,
            f"warmup_steps: {warmup} must be below total_steps ({total})": (
                self.kind == "constant" or warmup < total or total < 1
            ),
            f"final_fraction: {self.final_fraction} must be in [0, 1]": 0 <= self.final_fraction <= 1,
        }
        refuse(broken(rules))

    def factor(self, step: int) -> float:
        """Return the fraction of the peak learning rate at ``step``, counted from 1."""
        if step <= self.warmup_steps:
            return step / (self.warmup_steps + 1)
        if self.kind == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """Reactions to a step with a loss spike, or with NaN or infinity in loss or gradients."""

    on_nan: Literal["stop", "skip", "roll_back"] = "stop"
    """Action on NaN or infinity: fail; skip the batch; or roll_back to the last checkpoint, without that batch."""
    on_spike: Literal["say", "stop", "skip", "roll_back"] = "say"
    """Action on a loss spike: say prints a line and continues; the others as on_nan."""
    spike_nats: float = 2.0
    """Nats above the median loss of the last 64 steps that count as a spike."""
    max_faults: int = 8
    """Most batches that a run may skip, resumed parts included; one more ends it."""

    def __post_init__(self) -> None:
        rules = {
            f"spike_nats: {self.spike_nats} must be a finite number above 0": 0 < self.spike_nats < math.inf,
            f"max_faults: {self.max_faults} must be at least 1": self.max_faults >= 1,
        }
        refuse(broken(rules))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Optimizer, schedule and seed."""

    optimizer: Optimizer = field(default_factory=AdamWConfig)
    schedule: LrSchedule = field(default_factory=LrSchedule)
    seed: int = 0
    """Seed of initial weights, dropout and stochastic rounding."""
