"""Placement changes no bit: weights, state, gradients and boundaries below the device against plain autograd."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from hybridtrain.optimizations import (
    ActivationOffload,
    ChunkedLoss,
    FusedUpdate,
    GradAccumulation,
    GradientCheckpointing,
    OptimizerOffload,
    WeightStreaming,
)
from hybridtrain.plan.compose import Optimization
from tiny_models import GPT2_TIED_DROPOUT, GPT2_UNTIED, LLAMA_GROUPED
from training_history import CONFIG, assert_same_training, plain_history, trained_history

MODELS = {"gpt2-tied-dropout": GPT2_TIED_DROPOUT, "gpt2-untied": GPT2_UNTIED, "llama-grouped": LLAMA_GROUPED}
Tier = Literal["host", "disk"]
TIERS: tuple[Tier, ...] = ("host", "disk")
Accumulate = Callable[..., GradAccumulation]
"""Takes settings beside the number of micro-batches."""
Stack = Callable[[Accumulate], list[Optimization]]


def streamed(slots: int, ahead: int, resident: int = 0, tier: Tier = "host") -> WeightStreaming:
    return WeightStreaming(max_active_layers=slots, prefetch_distance=ahead, resident_layers=resident, tier=tier)


def recompute(interval: int, keep_last: int = 0) -> GradientCheckpointing:
    return GradientCheckpointing(interval=interval, keep_last=keep_last)


WEIGHTS: dict[str, Stack] = {  # of 4 blocks; 4 slots hold all of them, 3 resident ones leave a single streamed one
    f"weights-{slots}-ahead-{ahead}-resident-{resident}-{tier}": lambda accumulate, s=slots, a=ahead, r=resident, t=tier: [
        accumulate(),
        streamed(s, a, r, t),
    ]
    for slots, ahead, resident, tier in [
        (1, 0, 0, "host"),
        (1, 0, 1, "host"),
        (2, 0, 0, "host"),
        (2, 1, 0, "host"),
        (2, 1, 2, "host"),
        (2, 1, 3, "host"),
        (2, 1, 4, "host"),
        (3, 1, 0, "host"),
        (3, 2, 0, "host"),
        (3, 2, 1, "host"),
        (4, 3, 0, "host"),
        (5, 2, 0, "host"),
        (1, 0, 0, "disk"),
        (2, 1, 0, "disk"),
        (3, 2, 1, "disk"),
    ]
}
RECOMPUTED_WEIGHTS: dict[str, Stack] = {
    f"weights-recompute-{interval}-keep-{keep}-{schedule}": lambda accumulate, i=interval, k=keep, s=schedule: [
        accumulate(schedule=s),
        streamed(2, 1),
        recompute(i, k),
    ]
    for interval, keep, schedule in [
        (1, 0, "horizontal"),
        (1, 0, "vertical"),
        (2, 0, "vertical"),
        (3, 0, "horizontal"),
        (4, 0, "vertical"),
        (2, 2, "vertical"),
        (1, 3, "horizontal"),
    ]
}
STATE: dict[str, Stack] = {
    f"state-{tier}-grads-{where}": lambda accumulate, t=tier, w=where: [
        accumulate(),
        OptimizerOffload(tier=t, offload_grads=w == "away"),
    ]
    for tier in TIERS
    for where in ("away", "here")
} | {
    "state-updated-on-host": lambda accumulate: [accumulate(), OptimizerOffload(update_on="host")],
    "state-updated-on-host-weights-streamed": lambda accumulate: [
        accumulate(),
        OptimizerOffload(update_on="host"),
        streamed(2, 1, 1),
    ],
}
BOUNDARIES: dict[str, Stack] = {
    f"boundaries-{tier}-{schedule}-recompute-{interval}": lambda accumulate, t=tier, s=schedule, i=interval: [
        accumulate(schedule=s),
        ActivationOffload(tier=t),
        recompute(i),
    ]
    for tier in TIERS
    for schedule in ("horizontal", "vertical")
    for interval in (1, 2, 3)
} | {
    "boundaries-kept-blocks": lambda accumulate: [
        accumulate(schedule="vertical"),
        ActivationOffload(),
        recompute(1, keep_last=2),
    ]
}
FUSED: dict[str, Stack] = {
    "fused": lambda accumulate: [accumulate(schedule="vertical"), FusedUpdate()],
    "fused-recompute": lambda accumulate: [accumulate(schedule="vertical"), FusedUpdate(), recompute(2)],
    "fused-streamed": lambda accumulate: [accumulate(schedule="vertical"), FusedUpdate(), streamed(2, 1), recompute(1)],
    "fused-streamed-disk": lambda accumulate: [
        accumulate(schedule="vertical"),
        FusedUpdate(),
        streamed(3, 2, 1, "disk"),
        recompute(3),
    ],
    "fused-state-away": lambda accumulate: [
        accumulate(schedule="vertical"),
        FusedUpdate(),
        OptimizerOffload(offload_grads=False),
    ],
    "fused-everything-away": lambda accumulate: [
        accumulate(schedule="vertical"),
        FusedUpdate(),
        OptimizerOffload(offload_grads=False, tier="disk"),
        streamed(2, 1),
        ActivationOffload(),
        recompute(1),
    ],
}
TOGETHER: dict[str, Stack] = {
    "everything-horizontal": lambda accumulate: [
        accumulate(),
        OptimizerOffload(),
        streamed(2, 1),
        ActivationOffload(),
        recompute(2),
    ],
    "everything-vertical": lambda accumulate: [
        accumulate(schedule="vertical"),
        OptimizerOffload(),
        streamed(3, 2, 1),
        ActivationOffload(),
        recompute(1),
    ],
    "everything-disk": lambda accumulate: [
        accumulate(schedule="vertical"),
        OptimizerOffload(tier="disk"),
        streamed(2, 1, tier="disk"),
        ActivationOffload(tier="disk"),
        recompute(1),
    ],
}
STACKS = WEIGHTS | RECOMPUTED_WEIGHTS | STATE | BOUNDARIES | FUSED | TOGETHER


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("accum_steps", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_streamed_training_equals_plain_autograd(model: str, accum_steps: int, stack: str, tmp_path: Path) -> None:
    built = STACKS[stack](lambda **settings: GradAccumulation(steps=accum_steps, **settings))
    actual = trained_history(MODELS[model], built, accum_steps, disk_folder=tmp_path)
    assert_same_training(actual, plain_history(MODELS[model], accum_steps))


def test_every_step_that_the_others_compare_with_is_clipped() -> None:
    # Clipping is all that needs every norm before any update: without it a fused update would prove little.
    for config in MODELS.values():
        for accum_steps in (1, 3):
            norms = [norm for norm in plain_history(config, accum_steps).norms if norm is not None]
            assert len(norms) == 5
            assert all(norm > CONFIG.optimizer.max_grad_norm for norm in norms)


@pytest.mark.parametrize("offload_grads", [False, True])
@pytest.mark.parametrize("visit_micro_batches", [1, 2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_any_number_of_micro_batches_a_visit_gives_the_same_sums(
    model: str, visit_micro_batches: int, *, offload_grads: bool
) -> None:
    stack: list[Optimization] = [
        GradAccumulation(steps=3, schedule="vertical", visit_micro_batches=visit_micro_batches),
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
        GradAccumulation(steps=3, schedule=schedule),
        ChunkedLoss(chunk_tokens=8),
        recompute(1),
    ]
    away = [*plain, OptimizerOffload(), streamed(2, 1), ActivationOffload()]
    histories = [trained_history(GPT2_TIED_DROPOUT, stack, 3) for stack in (away, plain)]
    assert_same_training(*histories)
