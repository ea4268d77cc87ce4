"""Stacks that move every class below the device in many ways; each must train like plain autograd, to the bit."""

from collections.abc import Callable
from typing import Literal

from hybridtrain.optimizations import (
    ActivationOffload,
    FusedUpdate,
    GradAccumulation,
    GradientCheckpointing,
    OptimizerOffload,
    WeightStreaming,
)
from hybridtrain.plan.compose import Optimization
from tiny_models import GPT2_TIED_DROPOUT, GPT2_UNTIED, LLAMA_GROUPED

MODELS = {"gpt2-tied-dropout": GPT2_TIED_DROPOUT, "gpt2-untied": GPT2_UNTIED, "llama-grouped": LLAMA_GROUPED}
Tier = Literal["host", "disk"]
TIERS: tuple[Tier, ...] = ("host", "disk")
Accumulate = Callable[..., GradAccumulation]
"""Takes settings beside the number of micro-batches."""
Stack = Callable[[Accumulate], list[Optimization]]


def streamed(slots: int, ahead: int, resident: int = 0, tier: Tier = "host") -> WeightStreaming:
    """Return streaming through ``slots``, fetching ``ahead`` blocks ahead."""
    return WeightStreaming(max_active_layers=slots, prefetch_distance=ahead, resident_layers=resident, tier=tier)


def recompute(interval: int, keep_last: int = 0) -> GradientCheckpointing:
    """Return checkpointing."""
    return GradientCheckpointing(recompute_every=interval, kept_blocks=keep_last)


def streaming_alone(*settings: int | Tier) -> Stack:
    """Return a stack that streams weights and does nothing else."""
    return lambda accumulate: [accumulate(), streamed(*settings)]


WEIGHTS: dict[str, Stack] = {  # of 4 blocks; 4 slots hold all of them, 3 resident ones leave a single streamed one
    f"weights-{slots}-ahead-{ahead}-resident-{resident}-{tier}": streaming_alone(slots, ahead, resident, tier)
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
STREAMING_STACKS = WEIGHTS | RECOMPUTED_WEIGHTS | STATE | BOUNDARIES | FUSED | TOGETHER


def build(stack: str, accum_steps: int) -> list[Optimization]:
    """Return a stack by name for a number of micro-batches."""
    return STREAMING_STACKS[stack](lambda **settings: GradAccumulation(grad_accum_steps=accum_steps, **settings))
