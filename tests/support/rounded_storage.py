"""Stacks that store less than fp32, and places for what they store: only the places may not change a bit."""

from dataclasses import replace
from functools import cache

from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optimizations import (
    ActivationOffload,
    Bf16Optimizer,
    FusedUpdate,
    GradAccumulation,
    GradientCheckpointing,
    Int8Optimizer,
    Int8Weights,
    MixedPrecision,
    OptimizerOffload,
    WeightStreaming,
)
from hybridtrain.plan.compose import Optimization
from stack_optimizer import ADAFACTOR
from tiny_models import GPT2_TIED_DROPOUT, LLAMA_GROUPED
from training_history import History, trained_history

GPT2 = replace(GPT2_TIED_DROPOUT, width=64, ffn_width=128, num_blocks=3)
"""Its matrices have 4096 elements and more, so their moments are 8-bit codes."""
LLAMA = replace(LLAMA_GROUPED, width=64, ffn_width=96, num_blocks=4)
"""6144 elements of a feed-forward matrix: whole groups of 256; 2048 of a key's: fp32 moments."""
ACCUM_STEPS = 2
BASE = (GradAccumulation(steps=ACCUM_STEPS, schedule="vertical"), GradientCheckpointing(interval=2))

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
    "int8-weights-bf16": [Int8Weights(), MixedPrecision()],
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


ROUNDS_BY_CHANCE = {
    "bf16-absent", "bf16-optimizer", "bf16-optimizer-absent", "int8-weights-absent", "int8-weights-static", "int8-all"
}  # fmt: skip


def resident_history(config: ModelConfig, storage: str, place: str = "") -> History:
    """Train with everything on the device, or at least the weights.

    The processor draws other numbers than the device, so an update there is compared with an update there where
    numbers are drawn.
    """
    return _resident_history(config, storage, on_host="updated-on-host" in place and storage in ROUNDS_BY_CHANCE)


@cache
def _resident_history(config: ModelConfig, storage: str, *, on_host: bool) -> History:
    update = [OptimizerOffload(update_on="host")] if on_host else []
    return trained_history(config, [*BASE, *STORAGE[storage], *update], ACCUM_STEPS)
