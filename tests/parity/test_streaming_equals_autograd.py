"""Placement changes no bit: weights, state, gradients and boundaries below the device against plain autograd."""

from itertools import product
from pathlib import Path
from typing import Literal

import pytest

from hybridtrain.optimizations import ActivationOffload, ChunkedLoss, GradAccumulation, OptimizerOffload
from hybridtrain.plan.compose import Optimization
from stacks import MODELS, STREAMING_STACKS, build, recompute, streamed
from tiny_models import GPT2_TIED_DROPOUT
from training_history import CONFIG, NUM_STEPS, assert_same_training, plain_history, trained_history


def chosen_cases() -> list[tuple[str, int, str]]:
    """Return model, micro-batches, stack: every pair of two of them, which is half of the triples."""
    pairs = enumerate(STREAMING_STACKS), enumerate(MODELS)
    return [(model, (1, 2)[(i + j) % 2], stack) for (i, stack), (j, model) in product(*pairs)]


@pytest.mark.sample(one_in=5)
@pytest.mark.parametrize(("model", "accum_steps", "stack"), chosen_cases())
def test_streamed_training_equals_plain_autograd(model: str, accum_steps: int, stack: str, tmp_path: Path) -> None:
    actual = trained_history(MODELS[model], build(stack, accum_steps), accum_steps, disk_folder=tmp_path)
    assert_same_training(actual, plain_history(MODELS[model], accum_steps))


def test_every_step_that_the_others_compare_with_is_clipped() -> None:
    # Clipping is all that needs every norm before any update: without it a fused update would prove little.
    for config in MODELS.values():
        for accum_steps in (1, 2, 3):
            norms = [norm for norm in plain_history(config, accum_steps).norms if norm is not None]
            assert len(norms) == NUM_STEPS
            assert all(norm > CONFIG.optimizer.max_grad_norm for norm in norms)


@pytest.mark.sample(one_in=4)
@pytest.mark.parametrize("offload_grads", [False, True])
@pytest.mark.parametrize("visit_micro_batches", [1, 2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_any_number_of_micro_batches_a_visit_gives_the_same_sums(
    model: str, visit_micro_batches: int, *, offload_grads: bool
) -> None:
    stack: list[Optimization] = [
        GradAccumulation(grad_accum_steps=3, schedule="vertical", visit_micro_batches=visit_micro_batches),
        OptimizerOffload(offload_grads=offload_grads),
        streamed(2, 1),
        ActivationOffload(),
        recompute(2),
    ]
    assert_same_training(trained_history(MODELS[model], stack, 3), plain_history(MODELS[model], 3))


@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
def test_a_chunked_loss_does_not_know_where_anything_lives(schedule: Literal["horizontal", "vertical"]) -> None:
    # Plain autograd knows no slices: the same stack with everything on the device is the reference.
    plain: list[Optimization] = [
        GradAccumulation(grad_accum_steps=3, schedule=schedule),
        ChunkedLoss(loss_chunk_tokens=8),
        recompute(1),
    ]
    away = [*plain, OptimizerOffload(), streamed(2, 1), ActivationOffload()]
    histories = [trained_history(GPT2_TIED_DROPOUT, stack, 3) for stack in (away, plain)]
    assert_same_training(*histories)
