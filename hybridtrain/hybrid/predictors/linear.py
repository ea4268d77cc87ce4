"""A jump along the line from the weights K steps ago: cheap, and harmful at a tuned learning rate (measured)."""

from typing import ClassVar

from hybridtrain.engine.parameter_pass import ParameterSlice, PassSettings
from hybridtrain.engine.random_key import random_key
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.predictors.weight_predictor import Jump, WeightPredictor
from hybridtrain.hybrid.rollback_copy import RollbackCopy, visit_with
from hybridtrain.optim.slow_average import MoveNorm
from hybridtrain.trainer import Trainer


class Linear(WeightPredictor):
    """Extrapolates: w = w + a (w - anchor), with a in units of the last K steps' displacement.

    The anchor's place keeps the move, so that it can be undone.
    """

    kind: ClassVar[str] = "linear"
    _state = ("_has_anchor", "_full_steps", "_num_pieces")

    def __init__(self, config: HybridConfig, trainer: Trainer) -> None:
        super().__init__(config, trainer)
        self._strength = config.strength
        self._has_anchor = False
        self._full_steps = 1
        self._num_pieces = 0
        """Pieces of the jump whose change is in the anchor's memory."""

    def steps_of_jump(self, number: int, full_steps: int, scale: float) -> float:
        """Return K as the number of predicted steps; 0 before there is an anchor."""
        assert number > 0, "steps are numbered from 1"
        self._full_steps = full_steps
        return scale * self._strength * full_steps if self._has_anchor else 0.0

    def begin_round(self) -> None:
        """Set the anchor."""

        def work(swept: ParameterSlice) -> None:
            swept.extra[0].store(swept.weight.value)

        self._trainer.parameters.visit(work, self._settings(writes_weights=False, writes_extra=True))
        self._has_anchor = True

    def jump(self, predicted_steps: float, lr: float, rollback: RollbackCopy | None) -> Jump:
        """Move all weights away from the anchor; a later piece of a jump repeats the first piece's change."""
        norm = MoveNorm.zero(self._trainer.transfer.device)
        strength = predicted_steps / self._full_steps
        is_first = self._has_anchor
        self._num_pieces = 1 if is_first else self._num_pieces + 1

        def work(swept: ParameterSlice) -> None:
            (kept,) = swept.extra
            if is_first:
                kept.store(swept.weight.value.sub(kept.load()).mul_(strength))
            moved_P = kept.load()  # as it is kept
            norm.add(moved_P)
            swept.weight.value.add_(moved_P)

        visit_with(rollback, self._trainer, work, self._settings(writes_weights=True, writes_extra=is_first))
        self._has_anchor = False
        return Jump(self._trainer.steps_done, predicted_steps, lr, self._rms(norm) / lr if lr else 0.0)

    def undo(self, jump: Jump) -> None:
        """Roll back the last jump: subtract the kept change."""
        assert jump.step == self._trainer.steps_done, "rollback after another true step"

        def work(swept: ParameterSlice) -> None:
            swept.weight.value.sub_(swept.extra[0].load(), alpha=self._num_pieces)

        settings = PassSettings(rounds_to_nearest=True, seed=self._trainer.border_key(self._trainer.steps_done))
        self._trainer.parameters.visit(work, settings)

    def _settings(self, *, writes_weights: bool, writes_extra: bool) -> PassSettings:
        key = random_key(self._trainer.border_key(self._trainer.steps_done), self._num_pieces)
        return PassSettings(writes_weights=writes_weights, writes_extra=writes_extra, seed=key)
