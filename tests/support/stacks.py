"""Stacks of the tests: an optimizer beside them, storage below fp32, places below the device, and ways to use them.

Where something lives may not change a bit: a stack of places trains like plain autograd, rounded storage like itself
with everything on the device.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from hybridtrain.optim import Adafactor, Optimizer
from hybridtrain.optimizations import (
    ActivationOffload,
    Bf16Optimizer,
    FusedUpdate,
    GradAccumulation,
    GradientCheckpointing,
    Int8Optimizer,
    Int8Weights,
    LowBitMatmul,
    MixedPrecision,
    OptimizerOffload,
    WeightStreaming,
)
from hybridtrain.plan.claim import Claim
from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.memory_plan import DynamicRange
from hybridtrain.trainer_config import TrainerConfig
from tiny_models import GPT2_TIED_DROPOUT, GPT2_UNTIED, LLAMA_GROUPED


@dataclass(frozen=True)
class WithOptimizer:
    """Claims nothing."""

    kind: ClassVar[str] = "with_optimizer"

    optimizer: Optimizer

    def claims(self) -> Iterable[Claim]:
        """Return nothing: how state is stored is another's business."""
        return ()


def settings_of(stack: Sequence[Optimization], settings: TrainerConfig) -> TrainerConfig:
    """Return settings with the stack's optimizer at their learning rate, decay and clipping."""
    for part in stack:
        if isinstance(part, WithOptimizer):
            common = {
                name: getattr(settings.optimizer, name) for name in ("lr", "weight_decay", "max_grad_norm", "clip")
            }
            return replace(settings, optimizer=replace(part.optimizer, **common))
    return settings


ADAFACTOR = WithOptimizer(Adafactor())


GPT2 = replace(GPT2_TIED_DROPOUT, width=64, ffn_width=128, num_blocks=3)
"""Its matrices have 4096 elements and more, so their moments are 8-bit codes."""
LLAMA = replace(LLAMA_GROUPED, width=64, ffn_width=96, num_blocks=4)
"""6144 elements of a feed-forward matrix: whole groups of 256; 2048 of a key's: fp32 moments."""
ACCUM_STEPS = 2
BASE = (GradAccumulation(grad_accum_steps=ACCUM_STEPS, schedule="vertical"), GradientCheckpointing(recompute_every=2))

STORAGE: dict[str, list[Optimization]] = {
    "bf16-master": [MixedPrecision()],
    "bf16-split16": [MixedPrecision(master="split16")],
    "bf16-absent": [MixedPrecision(master="absent")],
    "int8-optimizer": [Int8Optimizer()],
    "int8-optimizer-split16": [Int8Optimizer(), MixedPrecision(master="split16")],
    "bf16-optimizer": [Bf16Optimizer()],
    "bf16-optimizer-absent": [Bf16Optimizer(), MixedPrecision(master="absent")],
    "factored": [ADAFACTOR],
    "factored-bf16-master": [ADAFACTOR, MixedPrecision()],
    "int8-weights-master": [Int8Weights()],
    "int8-weights-absent": [Int8Weights(master="absent")],
    "int8-weights-static": [Int8Weights(master="absent", static_scales=True), MixedPrecision(master="absent")],
    "int8-affine-absent": [Int8Weights(master="absent", symmetric=False)],
    "int8-tensor-static": [Int8Weights(master="absent", dynamic_range=DynamicRange.TENSOR, static_scales=True)],
    "int8-affine-tensor-bf16": [
        Int8Weights(symmetric=False, dynamic_range=DynamicRange.TENSOR),
        MixedPrecision(),
        Int8Optimizer(),
    ],
    "int8-weights-bf16": [Int8Weights(), MixedPrecision()],
    "int8-rows-multiplied": [
        Int8Weights(dynamic_range=DynamicRange.ROW),
        LowBitMatmul(format="int8"),
        MixedPrecision(),
    ],
    "int8-all": [Int8Weights(), MixedPrecision(master="absent"), Int8Optimizer()],
    "int8-factored": [Int8Weights(), MixedPrecision(master="absent"), ADAFACTOR],
}
PLACES: dict[str, list[Optimization]] = {
    "weights": [WeightStreaming()],
    "weights-one-slot": [WeightStreaming(max_active_layers=1)],
    "weights-disk": [WeightStreaming(max_active_layers=3, prefetch_distance=2, resident_layers=1, tier="disk")],
    "state": [OptimizerOffload()],
    "state-alone-disk": [OptimizerOffload(tier="disk", offload_grads=False)],
    "state-updated-on-host": [OptimizerOffload(update_on="host")],
    "updated-on-host-weights": [OptimizerOffload(update_on="host"), WeightStreaming(resident_layers=1)],
    "boundaries": [ActivationOffload()],
    "fused": [FusedUpdate()],
    "fused-all": [
        FusedUpdate(),
        WeightStreaming(),
        OptimizerOffload(offload_grads=False),
        ActivationOffload(tier="disk"),
    ],
    "all": [WeightStreaming(max_active_layers=3, prefetch_distance=1), OptimizerOffload(), ActivationOffload()],
}


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
