"""A jump along the slow average of the gradients: the only predictor with a measured gain over a tuned AdamW."""

import math
from functools import partial
from typing import ClassVar

from hybridtrain.engine.parameter_pass import ParameterSlice, PassSettings
from hybridtrain.engine.random_key import random_key
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.predictors.weight_predictor import Jump, WeightPredictor
from hybridtrain.hybrid.rollback_copy import RollbackCopy, visit_with
from hybridtrain.hybrid.stateful import State
from hybridtrain.optim.slow_average import LARGEST_RATIO, MoveNorm, SlowStep, move
from hybridtrain.phase import Phase
from hybridtrain.plan.placement import Placement
from hybridtrain.trainer import Trainer

_FIRST_RMS = 0.15
"""RMS of one predicted step before the first jump; 0.13 to 0.16 was measured."""
_SMALLEST_RMS = 1e-6
_BETA1 = 0.9
"""Initial decay of the average if the optimizer has no first moment."""
_FULL_MOVE_STEPS = 10


class SlowGradient(WeightPredictor):
    """w = w - lr P s / (sqrt(vhat) + eps). Rollback adds the same, as s, v and lr are unchanged.

    If the plan drops v in PREDICT, s averages already divided gradients, and w = w - lr P s.

    ``max_move`` is the trust region: the RMS limit of a jump in learning rates, after at least 10 true steps at the end
    of the ramp. It grows like alpha, so that no alpha, K or decay exceeds it. ``max_relative_move`` limits it relative
    to the RMS of the weights, against too high learning rates.
    """

    kind: ClassVar[str] = "slow_gradient"
    _state = ("_rms_of_one", "_weight_rms")

    def __init__(self, config: HybridConfig, trainer: Trainer) -> None:
        super().__init__(config, trainer)
        self._total_steps = trainer.config.schedule.total_steps
        self._slow = config.slow.within_bounds(self._total_steps) if config.guard else config.slow
        self._max_move, self._max_relative_move = config.max_move, config.max_relative_move
        self._weight_rms = 0.0
        """RMS of the weights before the last jump; 0 before the first."""
        self._rms_of_one = _FIRST_RMS
        """RMS of one predicted step of the last jump, in learning rates."""
        self._jumped_at = -1
        self._piece = 0
        """Number of the piece of a jump; each has its own random numbers."""
        in_predict = trainer.memory_plan.for_phase(Phase.PREDICT)
        self._normalizes = in_predict.optim_state.placement is Placement.DROPPED

    def slow_step(self, number: int, predicted_steps: float = 0.0) -> SlowStep | None:
        """Return the decay of the step, and the fused jump."""
        beta1: float = getattr(self._trainer.config.optimizer, "beta1", _BETA1)
        beta = self._slow.beta_at(number, self._total_steps, beta1)
        return self._step(beta, predicted_steps) if predicted_steps else SlowStep(beta, normalizes=self._normalizes)

    def steps_of_jump(self, number: int, full_steps: int, scale: float) -> float:
        """Return alpha K, shortened to the trust region."""
        total = self._total_steps
        steps = full_steps * self._slow.alpha_at(number, total)
        limit = self._max_move * min(1.0, number / total) * min(full_steps, _FULL_MOVE_STEPS) / _FULL_MOVE_STEPS
        lr = self._trainer.lr_at(number)
        if self._weight_rms and lr:
            limit = min(limit, self._max_relative_move * self._weight_rms / lr)
        return scale * min(steps, limit / max(self._rms_of_one, _SMALLEST_RMS))

    def jump(self, predicted_steps: float, lr: float, rollback: RollbackCopy | None) -> Jump:
        """Move all weights in one pass over weights, second moment and slow average."""
        step = self._step(0.0, predicted_steps)
        self._piece = self._piece + 1 if self._jumped_at == self._trainer.steps_done else 0
        self._jumped_at = self._trainer.steps_done
        self._pass(predicted_steps * lr, step, rollback)
        return self._made(step, lr)

    def fused_jump(self, step: SlowStep, lr: float) -> Jump:
        """Return the jump that the update applied."""
        return self._made(step, lr)

    def undo(self, jump: Jump) -> None:
        """Roll back the last jump: add what was subtracted."""
        self._pass(-jump.predicted_steps * jump.lr, None, None)

    def _pass(self, lr_steps: float, step: SlowStep | None, rollback: RollbackCopy | None) -> None:
        trainer = self._trainer
        optimizer, updates = trainer.config.optimizer, trainer.steps_done - trainer.states.born_after
        correction = optimizer.correction(updates)

        displacement = partial(
            move, correction=correction, eps=optimizer.eps, lr_steps=lr_steps, largest_ratio=LARGEST_RATIO
        )

        def work(swept: ParameterSlice) -> None:
            value_P = swept.weight.value
            moved_P = displacement(swept.extra[0].load(), swept.second_P)
            if step is not None:
                step.count(value_P, moved_P)
            value_P.add_(moved_P)

        seed = random_key(trainer.border_key(trainer.steps_done), self._piece)
        settings = PassSettings(reads_second_moment=not self._normalizes, rounds_to_nearest=step is None, seed=seed)
        visit_with(rollback, trainer, work, settings)

    def state_dict(self) -> State:
        """Return the state, and whether the average is of divided gradients."""
        return super().state_dict() | ({"normalizes": True} if self._normalizes else {})

    def load_state_dict(self, state: State) -> None:
        """Restore the state; raises ``ValueError`` if its average is of the other kind of gradients."""
        if bool(state.get("normalizes")) is not self._normalizes:
            kept = "'drop'" if state.get("normalizes") else "another value than 'drop'"
            raise ValueError(
                f"slow average: saved with predict_memory's optimizer_state of {kept}, which this run changes; resume "
                f"with that value, or start a new run"
            )
        super().load_state_dict(state)

    def _step(self, beta: float, predicted_steps: float) -> SlowStep:
        """Return a jump that counts its size and that of the weights."""
        device = self._trainer.transfer.device
        return SlowStep(beta, predicted_steps, MoveNorm.zero(device), MoveNorm.zero(device))

    def _made(self, step: SlowStep, lr: float) -> Jump:
        assert step.norm is not None, "a jump without a measured size"
        assert step.weight_norm is not None, "a jump without the weights' size"
        moved, weights = self._rms(step.norm), self._rms(step.weight_norm)
        rms = moved / lr if lr else 0.0
        if math.isfinite(rms):
            self._rms_of_one, self._weight_rms = rms / step.predicted_steps, weights
        return Jump(self._trainer.steps_done, step.predicted_steps, lr, rms)
