"""A jump along the line from the weights K steps ago: cheap, and harmful at a tuned learning rate (measured)."""

from typing import ClassVar, Self

from hybridtrain.engine.random_key import random_key
from hybridtrain.engine.slow_momentum import MoveNorm
from hybridtrain.engine.swept_slice import SweepSettings, SweptSlice
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.predictors.weight_predictor import Jump, WeightPredictor, read_rms
from hybridtrain.memory.history_codec import read_history, write_history
from hybridtrain.memory.rollback_copy import RollbackCopy
from hybridtrain.trainer import Trainer


class Linear(WeightPredictor):
    """w = w + a (w - anchor); the anchor's place keeps the move, so that it can be taken back.

    Args:
        trainer: Whose weights move; its stack keeps the anchor.
        strength: a, in units of the last K steps' displacement.
    """

    kind: ClassVar[str] = "linear"
    _state = ("_has_anchor", "_full_steps", "_num_pieces")

    def __init__(self, trainer: Trainer, strength: float) -> None:
        self._trainer = trainer
        self._strength = strength
        self._has_anchor = False
        self._full_steps = 1
        self._num_pieces = 0
        """How often the move in the anchor's place was made."""

    @classmethod
    def of(cls, config: HybridConfig, trainer: Trainer) -> Self:
        """Return it."""
        return cls(trainer, config.strength)

    def steps_of_jump(self, number: int, full_steps: int, scale: float) -> float:
        """Return a K; 0 before there is an anchor."""
        assert number > 0, "steps are counted from 1"
        self._full_steps = full_steps
        return scale * self._strength * full_steps if self._has_anchor else 0.0

    def begin_block(self) -> None:
        """Set the anchor."""

        def work(swept: SweptSlice) -> None:
            write_history(swept.value_P, swept.history[0])

        self._trainer.sweep.run(work, self._settings(writes_weights=False, writes_history=True))
        self._has_anchor = True

    def jump(self, predicted_steps: float, lr: float, rollback: RollbackCopy | None) -> Jump:
        """Move all weights away from the anchor; a later piece of a jump repeats the first one's move."""
        norm = MoveNorm.zero(self._trainer.transfer.device)
        strength = predicted_steps / self._full_steps
        is_first = self._has_anchor
        self._num_pieces = 1 if is_first else self._num_pieces + 1

        def work(swept: SweptSlice) -> None:
            (stored,) = swept.history
            count = swept.value_P.numel()
            if is_first:
                write_history(swept.value_P.sub(read_history(stored, count)).mul_(strength), stored)
            moved_P = read_history(stored, count)  # as it is kept
            norm.add(moved_P)
            swept.value_P.add_(moved_P)

        self._trainer.sweep.run(work, self._settings(writes_weights=True, writes_history=is_first), rollback)
        moved = read_rms(self._trainer, norm)
        rms = moved / lr if lr else 0.0
        self._has_anchor = False
        return Jump(self._trainer.steps_done, predicted_steps, lr, rms)

    def undo(self, jump: Jump) -> None:
        """Subtract the kept move."""
        assert jump.step == self._trainer.steps_done, "before another true step"

        def work(swept: SweptSlice) -> None:
            moved_P = read_history(swept.history[0], swept.value_P.numel())
            swept.value_P.sub_(moved_P, alpha=self._num_pieces)

        settings = SweepSettings(rounds_to_nearest=True, seed=self._trainer.predict_key(self._trainer.steps_done))
        self._trainer.sweep.run(work, settings)

    def _settings(self, *, writes_weights: bool, writes_history: bool) -> SweepSettings:
        key = random_key(self._trainer.predict_key(self._trainer.steps_done), self._num_pieces)
        return SweepSettings(writes_weights=writes_weights, writes_history=writes_history, seed=key)
