"""Control and disturbed runs: random jumps, averaged weights, other rounding, shifted data, faults."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridtrain.data.batches import TokenBatch
from hybridtrain.data.byte_tokens import NUM_BYTE_TOKENS
from hybridtrain.engine.parameter_pass import ParameterSlice, PassSettings
from hybridtrain.engine.step import StepShare
from hybridtrain.engine.step_visit import BlockDone, DeviceBatch
from hybridtrain.hybrid.predictors.slow_gradient import SlowGradient
from hybridtrain.hybrid.predictors.weight_predictor import Jump
from hybridtrain.hybrid.rollback_copy import RollbackCopy, visit_with
from hybridtrain.memory import formats
from hybridtrain.optim.slow_average import LARGEST_RATIO, move
from hybridtrain.trainer import Trainer

_AVERAGE_DECAY = 0.99
_ODD, _OFFSET = 77, 13
"""Parameters of the permutation of bytes; the factor is odd, so that it is a permutation."""


class RandomDirection(SlowGradient):
    """Jumps as far as slow_gradient, but in a random direction. Cannot be fused."""

    def jump(self, predicted_steps: float, lr: float, rollback: RollbackCopy | None) -> Jump:
        """Move all weights by Gaussian noise of the predicted move's norm."""
        trainer, optimizer = self._trainer, self._trainer.config.optimizer
        correction = optimizer.correction(trainer.steps_done - trainer.states.born_after)
        step = self._step(0.0, predicted_steps)

        def work(swept: ParameterSlice) -> None:
            assert swept.second_P is not None, "asked for"
            value_P, slow_P = swept.weight.value, swept.extra[0].load()
            moved_P = move(
                slow_P, swept.second_P, correction=correction, eps=optimizer.eps, lr_steps=lr * predicted_steps,
                largest_ratio=LARGEST_RATIO,
            )  # fmt: skip
            noise_P = torch.randn_like(moved_P)
            noise_P.mul_(torch.linalg.vector_norm(moved_P) / torch.linalg.vector_norm(noise_P).clamp_min(1e-30))
            step.count(value_P, noise_P)
            value_P.add_(noise_P)

        seed = trainer.border_key(trainer.steps_done)
        visit_with(rollback, trainer, work, PassSettings(reads_second_moment=True, seed=seed))
        return self._made(step, lr)


class WeightAverage:
    """Exponential moving average of the weights, for float32 parameters on the device."""

    def __init__(self, trainer: Trainer) -> None:
        self._parameters = [parameter for _, parameter in trainer.model.named_unit_parameters()]
        self._means = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights of a step to the average."""
        for mean, parameter in zip(self._means, self._parameters, strict=True):
            mean.lerp_(parameter, 1 - _AVERAGE_DECAY)

    @torch.no_grad()
    def put_in(self) -> None:
        """Replace the weights by their averages."""
        for mean, parameter in zip(self._means, self._parameters, strict=True):
            parameter.copy_(mean)


def shifted(batch: TokenBatch) -> TokenBatch:
    """Return a batch with permuted bytes, as a shift of the data."""

    def swapped(token_ids_BT: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        result: npt.NDArray[np.int64] = (token_ids_BT * _ODD + _OFFSET) % NUM_BYTE_TOKENS
        return result

    return TokenBatch(token_ids_BT=swapped(batch.token_ids_BT), target_ids_BT=swapped(batch.target_ids_BT))


def poison_gradients(trainer: Trainer, step: int) -> None:
    """Make one gradient of a true step NaN at its first computation, as a transient hardware fault."""
    executor = trainer.executor
    run, is_done = executor.forward_backward, False

    def poisoned(
        batches: Sequence[DeviceBatch], *, seed: int, share: StepShare | None = None,
        on_block_done: BlockDone | None = None, loss_scale: float = 1.0,
    ) -> list[Tensor]:  # fmt: skip
        nonlocal is_done
        losses = run(batches, seed=seed, share=share, on_block_done=on_block_done, loss_scale=loss_scale)
        if trainer.steps_done == step and not is_done:
            is_done = True
            losses[0].fill_(float("nan"))
        return losses

    executor.forward_backward = poisoned  # type: ignore[method-assign]


@contextmanager
def nearest_rounding() -> Iterator[None]:
    """Round weights without a master to nearest, as a control that loses small updates."""
    kept = formats.round_stochastically
    formats.round_stochastically = _round_to_nearest
    try:
        yield
    finally:
        formats.round_stochastically = kept


def _round_to_nearest(value_P: Tensor, target_P: Tensor) -> None:
    target_P.copy_(value_P)
