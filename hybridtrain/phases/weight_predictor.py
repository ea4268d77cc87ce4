"""What moves weights in PREDICT: one protocol, one file per predictor. P predicted steps, K true steps of a block."""

from dataclasses import dataclass
from typing import Protocol

from hybridtrain.optim.slow_average import MoveNorm, SlowStep
from hybridtrain.phases.rollback_copy import RollbackCopy
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
    """Forward passes on probe batches that the predictor itself needed."""


def read_rms(trainer: Trainer, norm: MoveNorm) -> float:
    """Return the root mean square over all weights of what was counted; waits for the device, NaN in a dry run."""
    return norm.rms(trainer.transfer.read(norm.on_device), trainer.model.config.num_params)


class WeightPredictor(Protocol):
    """Remembers the trajectory and moves along it."""

    def slow_step(self, number: int, predicted_steps: float = 0.0) -> SlowStep | None:
        """Return what the update of true step ``number`` does for the predictor, the jump included; None: nothing."""
        ...

    def steps_of_jump(self, number: int, full_steps: int, scale: float) -> float:
        """Return P of the jump after true step ``number``; ``scale`` is the controller's, 1 unless it is careful."""
        ...

    def begin_block(self) -> None:
        """Note that a block of true steps begins."""
        ...

    def after_step(self, full_steps: int) -> None:
        """Note that a true step of a block of ``full_steps`` was applied."""
        ...

    def jump(self, predicted_steps: float, lr: float, rollback: RollbackCopy | None) -> Jump:
        """Move all weights; moments stay as they are."""
        ...

    def fused_jump(self, step: SlowStep, lr: float) -> Jump:
        """Return the jump that the update did with ``step``."""
        ...

    def undo(self, jump: Jump) -> None:
        """Take the last jump back, before another true step."""
        ...

    def state_dict(self) -> dict[str, float]:
        """Return the numbers that the next jump depends on, beside the stores."""
        ...

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take them over."""
        ...
