"""Float16 with a loss scale: it follows float32, overflows are tried again, nothing small is lost."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from checkpoints import save_checkpoint
from hybridtrain.checkpoint import load_checkpoint
from hybridtrain.engine.loss_scale import LossScale
from hybridtrain.errors import DivergenceError
from hybridtrain.optimizations import FusedUpdate, GradAccumulation, Int8Optimizer, MixedPrecision, OptimizerOffload
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization
from hybridtrain.trainer import Trainer
from tiny_models import LLAMA_GROUPED, random_steps
from training_history import fresh_trainer

HALF = MixedPrecision(compute_dtype="float16")
STACKS: dict[str, list[Optimization]] = {
    "plain": [HALF],
    "vertical": [HALF, GradAccumulation(grad_accum_steps=2, schedule="vertical")],
    "fused": [HALF, FusedUpdate()],
    "host": [HALF, OptimizerOffload(update_on="host"), Int8Optimizer()],
}


def train(stack: Sequence[Optimization], first_scale: float = 2.0**16) -> tuple[list[float], list[float], Trainer]:
    trainer = fresh_trainer(LLAMA_GROUPED, stack)
    if trainer.loss_scale is not None:
        trainer.loss_scale = LossScale(first_scale)
    results = [trainer.step(batches) for batches in random_steps(LLAMA_GROUPED, 4, trainer.plan.grad_accum_steps)]
    return [result.loss for result in results], [result.grad_norm or 0.0 for result in results], trainer


@pytest.mark.parametrize("name", STACKS)
def test_losses_and_norms_follow_float32(name: str) -> None:
    losses, norms, _ = train(STACKS[name])
    exact_losses, exact_norms, _ = train([part for part in STACKS[name] if part is not HALF])
    # float16 rounds by 2^-11 = 0.05 %; sums of some tens of roundings stay within a few of them.
    assert losses == pytest.approx(exact_losses, rel=2e-3)
    assert norms == pytest.approx(exact_norms, rel=1e-2)


@pytest.mark.parametrize("name", ["plain", "fused"])
def test_a_scale_that_overflows_is_halved_and_the_step_run_again(name: str) -> None:
    losses, norms, trainer = train(STACKS[name], first_scale=2.0**30)
    expected_losses, expected_norms, _ = train(STACKS[name])
    assert trainer.loss_scale is not None
    assert 2.0**10 < trainer.loss_scale.value < 2.0**30
    assert losses == pytest.approx(expected_losses, rel=1e-3)
    assert norms == pytest.approx(expected_norms, rel=1e-2)
    assert trainer.steps_done == 4


def test_float16_of_predict_alone_scales_no_loss() -> None:
    # PREDICT has no gradients: the steps are those of float32, to the bit.
    guest = MixedPrecision(compute_dtype="float16", active_phases=(Phase.PREDICT,))
    losses, norms, trainer = train([guest])
    assert trainer.loss_scale is None
    assert (losses, norms) == train([])[:2]


def test_without_a_scale_small_gradients_are_lost() -> None:
    # What the scale is for: at 2^-20 most gradients are below the smallest float16, 6e-8.
    _, norms, trainer = train([HALF])
    weak = fresh_trainer(LLAMA_GROUPED, [HALF])
    weak.loss_scale = LossScale(2.0**-20)
    result = weak.step(random_steps(LLAMA_GROUPED, 1)[0])
    assert trainer.loss_scale is not None
    assert result.grad_norm != pytest.approx(norms[0], rel=0.05)


def test_what_no_scale_helps_is_a_divergence_and_nothing_is_applied() -> None:
    trainer = fresh_trainer(LLAMA_GROUPED, [HALF])
    (batches,) = random_steps(LLAMA_GROUPED, 1)
    with torch.no_grad():
        trainer.model.head.weight[0, 0] = torch.inf
    before = trainer.model.embedding.token.detach().clone()
    with pytest.raises(DivergenceError, match="The update was not applied"):
        trainer.step(batches)
    assert torch.equal(before, trainer.model.embedding.token)


def test_it_doubles_after_two_thousand_good_steps() -> None:
    scale = LossScale()
    for _ in range(1999):
        scale.succeeded()
    assert scale.value == 2**16
    scale.succeeded()
    assert (scale.value, scale.good_steps) == (2**17, 0)
    scale.overflowed()
    assert scale.value == 2**16


def test_the_scale_is_saved(tmp_path: Path) -> None:
    _, _, trainer = train([HALF], first_scale=2.0**30)
    save_checkpoint(trainer, tmp_path / "state.pt")
    again = fresh_trainer(LLAMA_GROUPED, [HALF])
    load_checkpoint(again, tmp_path / "state.pt")
    assert again.loss_scale == trainer.loss_scale != LossScale()


def test_a_master_is_needed() -> None:
    with pytest.raises(ValueError, match="float16 needs 'float32'"):
        MixedPrecision(compute_dtype="float16", master="absent")
