"""Base class of weight predictors. P predicted steps, K true steps of a round."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.rollback_copy import RollbackCopy
from hybridtrain.hybrid.stateful import Stateful
from hybridtrain.optim.slow_average import MoveNorm, SlowStep
from hybridtrain.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Jump:
    """One applied PREDICT phase."""

    step: int
    """True steps before it."""
    predicted_steps: float
    lr: float
    """Learning rate of the last true step."""
    rms: float
    """RMS of the weight change, in learning rates; NaN in a dry run."""
    num_forwards: int = 0
    """Forward passes on probe batches between its pieces."""


class WeightPredictor(Stateful, ABC):
    """Records the weights' trajectory in the trainer's extra state, and extrapolates it."""

    kind: ClassVar[str]

    @abstractmethod
    def __init__(self, config: HybridConfig, trainer: Trainer) -> None:
        self._trainer = trainer

    def slow_step(self, number: int, predicted_steps: float = 0.0) -> SlowStep | None:
        """Return the predictor's work in the update of true step ``number``, jump included; None: none."""
        assert not predicted_steps, f"step {number}: predictor '{self.kind}' cannot jump within an update"
        return None

    @abstractmethod
    def steps_of_jump(self, number: int, full_steps: int, scale: float) -> float:
        """Return P of the jump after true step ``number``; ``scale`` is the controller's strength factor."""

    def begin_round(self) -> None:  # most remember nothing of it
        """Note that the first true step of a round was applied."""

    @abstractmethod
    def jump(self, predicted_steps: float, lr: float, rollback: RollbackCopy | None) -> Jump:
        """Move all weights; optimizer moments stay unchanged."""

    def fused_jump(self, step: SlowStep, lr: float) -> Jump:
        """Return the jump that the update applied with ``step``."""
        raise AssertionError(f"{step} at {lr}: predictor '{self.kind}' cannot jump within an update")

    @abstractmethod
    def undo(self, jump: Jump) -> None:
        """Roll back the last jump, before another true step."""

    def _rms(self, norm: MoveNorm) -> float:
        """Return the root mean square over all weights; waits for the device, NaN in a dry run."""
        return norm.rms(self._trainer.transfer.read(norm.on_device), self._trainer.model.config.num_params)
