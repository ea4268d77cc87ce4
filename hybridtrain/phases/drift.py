"""A jump along the drift of block means, as far as a forward-only search around the mean allows.

d = M_b - M_{b-1} of two consecutive blocks of K steps; the loss of one probe batch at M_b + a d for a = 0, 1/2, 1 times
the strength's largest; the search stops at the first rise, and w = w + a d. At a tuned learning rate it finds a = 0.
Two tensors per parameter: the mean at work and the reference. During the search they hold w and d.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hybridtrain.engine.slow_momentum import MoveNorm, SlowStep
from hybridtrain.engine.swept_slice import SweepSettings, SweptSlice
from hybridtrain.memory.rollback_copy import RollbackCopy
from hybridtrain.phases.weight_predictor import Jump, read_rms
from hybridtrain.trainer import Trainer

_NUM_TRIES = 2


class Drift:
    """The history is float32: weights are put aside in it during the search.

    Args:
        trainer: Whose weights move.
        strength: Largest a.
        probe_loss: Opens the next probe batch and returns how to ask for its loss.
    """

    def __init__(self, trainer: Trainer, strength: float, probe_loss: Callable[[], Callable[[], float]]) -> None:
        self._trainer = trainer
        self._strength = strength
        self._probe_loss = probe_loss
        self._num_blocks = 0
        """Whose means were finished."""
        self._num_steps = 0
        """In the mean at work."""

    def slow_step(self, number: int, predicted_steps: float = 0.0) -> SlowStep | None:
        """Return None: the update keeps nothing for this predictor."""
        assert not predicted_steps, f"step {number}: a jump along the drift is no part of an update"
        return None

    def steps_of_jump(self, number: int, full_steps: int, scale: float) -> float:
        """Return the largest a times K; the search may end with less."""
        assert number > 0, "steps are counted from 1"
        return scale * self._strength * full_steps

    def begin_block(self) -> None:
        """Do nothing: the mean at work was set to zero when the last one ended."""

    def after_step(self, full_steps: int) -> None:
        """Add the weights to the mean at work."""
        del full_steps  # the mean is kept for any number of steps
        self._num_steps += 1
        weight = 1.0 / self._num_steps

        def work(swept: SweptSlice) -> None:
            swept.history[0][0].lerp_(swept.value_P, weight)

        self._sweep(work, writes_weights=False)

    def jump(self, predicted_steps: float, lr: float, rollback: RollbackCopy | None) -> Jump:
        """Search and move; the first block only leaves its mean behind."""
        self._num_blocks += 1
        count, self._num_steps = max(self._num_steps, 1), 0
        if self._num_blocks == 1:
            self._sweep(_keep_mean, writes_weights=False)
            return Jump(self._trainer.steps_done, 0.0, lr, 0.0)
        loss_of = self._probe_loss()
        self._sweep(_go_to_mean, rollback=rollback)
        losses = [loss_of()]
        largest = predicted_steps / count
        while len(losses) <= _NUM_TRIES and not losses[-1] > min(losses):  # a dry run tries all
            self._sweep(_move_along(largest / _NUM_TRIES))
            losses.append(loss_of())
        best = largest / _NUM_TRIES * losses.index(min(losses))
        tried = largest / _NUM_TRIES * (len(losses) - 1)
        norm = MoveNorm.zero(self._trainer.transfer.device)
        self._sweep(_come_back(best, tried, norm))
        moved = read_rms(self._trainer, norm)
        rms = moved / lr if lr else 0.0
        return Jump(self._trainer.steps_done, best * count, lr, rms, num_forwards=len(losses))

    def fused_jump(self, step: SlowStep, lr: float) -> Jump:
        """Never called: nothing is fused."""
        raise AssertionError(f"{step} at {lr}: a jump along the drift is no part of an update")

    def undo(self, jump: Jump) -> None:
        """Never called: a search leaves no room for the drift itself."""
        raise AssertionError(f"{jump}: drift is taken back from a copy only")

    def state_dict(self) -> dict[str, float]:
        """Return the counts."""
        return {"num_blocks": float(self._num_blocks), "num_steps": float(self._num_steps)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take them over."""
        self._num_blocks, self._num_steps = int(state["num_blocks"]), int(state["num_steps"])

    def _sweep(
        self, work: Callable[[SweptSlice], None], *, writes_weights: bool = True, rollback: RollbackCopy | None = None
    ) -> None:
        key = self._trainer.predict_key(self._trainer.steps_done)
        settings = SweepSettings(writes_weights=writes_weights, writes_history=True, seed=key)
        self._trainer.sweep.run(work, settings, rollback)


def _places(swept: SweptSlice) -> tuple[Tensor, Tensor]:
    (mean_P,), (reference_P,) = swept.history
    return mean_P, reference_P


def _keep_mean(swept: SweptSlice) -> None:
    mean_P, reference_P = _places(swept)
    reference_P.copy_(mean_P)
    mean_P.zero_()


def _go_to_mean(swept: SweptSlice) -> None:
    """Make the weights the mean; keep them in its place, and the drift in the reference's."""
    mean_P, reference_P = _places(swept)
    torch.sub(mean_P, reference_P, out=reference_P)
    weight_P = swept.value_P.clone()
    swept.value_P.copy_(mean_P)
    mean_P.copy_(weight_P)


def _move_along(step: float) -> Callable[[SweptSlice], None]:
    def work(swept: SweptSlice) -> None:
        _, drift_P = _places(swept)
        swept.value_P.add_(drift_P, alpha=step)

    return work


def _come_back(best: float, tried: float, norm: MoveNorm) -> Callable[[SweptSlice], None]:
    """Return weights plus ``best`` drifts to their place, and make the mean plus as many the next reference."""

    def work(swept: SweptSlice) -> None:
        weight_P, drift_P = _places(swept)
        reference_P = swept.value_P.add(drift_P, alpha=best - tried)
        moved_P = drift_P.mul(best)
        norm.add(moved_P)
        torch.add(weight_P, moved_P, out=swept.value_P)
        drift_P.copy_(reference_P)
        weight_P.zero_()

    return work
