"""The base of weight predictors, which have a file each. P predicted steps, K true steps of a block."""

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
    """True steps done before it."""
    predicted_steps: float
    lr: float
    """Of the last true step."""
    rms: float
    """Root mean square of the weights' move, in learning rates; NaN in a dry run."""
    num_forwards: int = 0
    """Forward passes on probe batches between its pieces."""


class WeightPredictor(Stateful, ABC):
    """Remembers the trajectory in what the trainer's stack keeps for it, and moves along it."""

    kind: ClassVar[str]

    @abstractmethod
    def __init__(self, config: HybridConfig, trainer: Trainer) -> None:
        self._trainer = trainer

    def slow_step(self, number: int, predicted_steps: float = 0.0) -> SlowStep | None:
        """Return the predictor's part of the update of true step ``number``, the jump included; None: it has none."""
        assert not predicted_steps, f"step {number}: a jump of '{self.kind}' is no part of an update"
        return None

    @abstractmethod
    def steps_of_jump(self, number: int, full_steps: int, scale: float) -> float:
        """Return P of the jump after true step ``number``; ``scale`` is the controller's, 1 unless it is careful."""

    def begin_block(self) -> None:  # most remember nothing of it
        """Note that the first true step of a block was applied."""

    @abstractmethod
    def jump(self, predicted_steps: float, lr: float, rollback: RollbackCopy | None) -> Jump:
        """Move all weights; moments stay as they are."""

    def fused_jump(self, step: SlowStep, lr: float) -> Jump:
        """Return the jump that the update did with ``step``."""
        raise AssertionError(f"{step} at {lr}: a jump of '{self.kind}' is no part of an update")

    @abstractmethod
    def undo(self, jump: Jump) -> None:
        """Undo the last jump, before another true step."""

    def _rms(self, norm: MoveNorm) -> float:
        """Return the root mean square over all weights; waits for the device, NaN in a dry run."""
        return norm.rms(self._trainer.transfer.read(norm.on_device), self._trainer.model.config.num_params)
