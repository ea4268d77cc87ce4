"""Device memory of streamed and packed weights: a fixed number of slots, by arithmetic, and nothing new in any step."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from hybridtrain.memory.transfer import VirtualTransfer
from hybridtrain.models.build import build_model
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optimizations import (
    FusedUpdate,
    GradAccumulation,
    GradientCheckpointing,
    Int8Weights,
    MixedPrecision,
    OptimizerOffload,
    WeightStreaming,
)
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import PhasePlan
from hybridtrain.plan.placement import Codec, Placement
from hybridtrain.planning.dry_runs import record_steps
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, holders
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from tiny_models import GPT2_ODD, GPT2_UNTIED, LLAMA_GROUPED, random_steps

MODELS = {
    "gpt2": replace(GPT2_UNTIED, num_blocks=6),
    "gpt2-odd-tied": replace(GPT2_ODD, num_blocks=6),
    "llama": replace(LLAMA_GROUPED, num_blocks=6),
}
RESIDENT: dict[int, list[int]] = {0: [], 1: [5], 2: [2, 5], 6: [0, 1, 2, 3, 4, 5]}
"""Blocks that stay on the device, by their number: spread evenly among the six."""
NUM_STEPS = 3
ALIGNMENT = 512

STACKS: dict[str, list[Optimization]] = {
    "one-slot": [WeightStreaming(max_active_layers=1)],
    "two-slots": [WeightStreaming(), GradientCheckpointing(recompute_every=1)],
    "more-slots-than-blocks": [WeightStreaming(max_active_layers=9, prefetch_distance=3)],
    "resident": [WeightStreaming(max_active_layers=3, resident_layers=2), GradientCheckpointing(recompute_every=2)],
    "all-resident": [WeightStreaming(resident_layers=6)],
    "bf16-disk": [WeightStreaming(tier="disk"), MixedPrecision(), OptimizerOffload()],
    "int8": [Int8Weights()],
    "int8-one-slot": [Int8Weights(), WeightStreaming(max_active_layers=1), MixedPrecision(master="absent")],
    "int8-streamed": [Int8Weights(), WeightStreaming(max_active_layers=3, prefetch_distance=1, resident_layers=1)],
    "fused": [
        WeightStreaming(),
        FusedUpdate(),
        GradAccumulation(grad_accum_steps=2, schedule="vertical"),
        GradientCheckpointing(recompute_every=1),
    ],
    "updated-on-host": [WeightStreaming(resident_layers=2), OptimizerOffload(update_on="host")],
}


def padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def block_bytes(config: ModelConfig, codec: Codec, compute: Codec) -> int:
    """Return what one block takes in a slot: each tensor at a multiple of 512 bytes."""
    item = 2 if compute is Codec.BFLOAT16 else 4
    total = 0
    for parameter in build_model(config, torch.float32, torch.device("meta")).blocks[0].parameters():
        if codec is Codec.INT8_BLOCKS and parameter.dim() == 2:
            total += padded(parameter.numel()) + padded(4 * -(-parameter.numel() // 256))
        else:
            total += padded(parameter.numel() * item)
    return total


def expected_by_unit(config: ModelConfig, plan: PhasePlan) -> dict[str, int]:
    """Return the bytes of each holder of weights that is a slot, or a packed block at home."""
    stored = block_bytes(config, plan.weight.codec, plan.compute_dtype)
    is_int8 = plan.weight.codec is Codec.INT8_BLOCKS
    streams = plan.weight.placement is not Placement.DEVICE
    at_home = RESIDENT[plan.resident_layers] if streams else list(range(config.num_blocks))
    num_streamed = config.num_blocks - len(at_home)
    num_slots = min(plan.prefetch_distance + 1 if is_int8 else plan.max_active_layers, num_streamed)
    expected = {f"slot.{index}": stored for index in range(num_slots)}
    if is_int8:
        values = block_bytes(config, plan.compute_dtype, plan.compute_dtype)
        expected |= {f"values.{index}": values for index in range(plan.max_active_layers)}
        expected |= {f"block.{block}": stored for block in at_home}
    return expected


def recorded(
    config: ModelConfig, stack: Sequence[Optimization], num_steps: int = NUM_STEPS
) -> tuple[LedgerTrace, PhasePlan]:
    plan = compose(stack)
    accum_steps = plan.for_phase(Phase.FULL).grad_accum_steps
    trace = record_steps(config, plan, random_steps(config, num_steps, accum_steps), VirtualTransfer())
    return trace, plan.for_phase(Phase.FULL)


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("model", MODELS)
def test_slots_have_the_size_and_number_that_arithmetic_gives_in_every_moment(model: str, stack: str) -> None:
    config = MODELS[model]
    trace, plan = recorded(config, STACKS[stack])
    _, by_unit = holders(trace, len(trace.events) - 1)
    packed = {
        unit: size
        for (tensor_class, unit), size in by_unit.items()
        if tensor_class is TensorClass.WEIGHT and unit.startswith(("slot.", "values.", "block."))
    }
    expected = expected_by_unit(config, plan)
    resident = {unit for unit in packed if unit.startswith("block.")} - set(expected)
    assert {unit: size for unit, size in packed.items() if unit not in resident} == expected
    is_unpacked = plan.weight.codec is not Codec.INT8_BLOCKS
    assert resident == {f"block.{block}" for block in RESIDENT[plan.resident_layers] if is_unpacked}
    assert_weights_are_slots_embedding_and_head_in_every_moment(config, plan, trace)
    assert_no_step_allocates_weights(trace)
    assert_every_step_after_the_first_allocates_the_same(trace)


def assert_weights_are_slots_embedding_and_head_in_every_moment(
    config: ModelConfig, plan: PhasePlan, trace: LedgerTrace
) -> None:
    unpacked = build_model(config, torch.float32, torch.device("meta"))
    item = 2 if plan.compute_dtype is Codec.BFLOAT16 else 4
    resident = RESIDENT[plan.resident_layers] if plan.weight.codec is not Codec.INT8_BLOCKS else []
    units = unpacked.units()
    own = [units[0], units[-1], *(units[1 + block] for block in resident)]
    expected = sum(parameter.numel() * item for unit in own for parameter in unit.tensors)
    expected += sum(expected_by_unit(config, plan).values())
    # The rotary table: cosines and sines of every position and half a head, fp32, counted as weights.
    expected += 2 * 4 * config.max_seq_len * config.width // config.num_heads // 2 if config.family == "llama" else 0
    for step in range(NUM_STEPS):
        for event in trace.step_range(step)[:: len(trace.step_range(step)) // 7]:
            assert holders(trace, event)[0][TensorClass.WEIGHT] == expected


def assert_no_step_allocates_weights(trace: LedgerTrace) -> None:
    for step in range(NUM_STEPS):
        events = trace.events[trace.step_range(step).start : trace.step_range(step).stop]
        assert not [event for event in events if event >= 0 and trace.classes[event] is TensorClass.WEIGHT]
        assert not [event for event in events if event < 0 and trace.classes[~event] is TensorClass.WEIGHT]


def assert_every_step_after_the_first_allocates_the_same(trace: LedgerTrace) -> None:
    allocated = [
        [
            (trace.sizes[event], trace.classes[event], trace.units[event])
            for event in trace.events[trace.step_range(step).start : trace.step_range(step).stop]
            if event >= 0
        ]
        for step in (1, 2)
    ]
    assert allocated[0] == allocated[1]


def test_building_a_streamed_model_never_holds_more_than_its_slots_and_one_unit() -> None:
    # A model larger than the card must be built on it too: what is beside the weights is one parameter in fp32.
    config = replace(GPT2_UNTIED, num_blocks=24)
    trace, plan = recorded(config, [WeightStreaming(), MixedPrecision()], num_steps=1)
    build = max(list(trace.live_bytes())[: trace.steps[0].event])
    unpacked = build_model(config, torch.float32, torch.device("meta"))
    units = unpacked.units()
    weights = sum(2 * parameter.numel() for unit in (units[0], units[-1]) for parameter in unit.tensors)
    weights += sum(expected_by_unit(config, plan).values())
    masters = sum(4 * parameter.numel() for unit in units for parameter in unit.tensors)
    assert build <= weights + masters
    offloaded, _ = recorded(config, [WeightStreaming(), MixedPrecision(), OptimizerOffload()], num_steps=1)
    largest = 4 * max(parameter.numel() for unit in units for parameter in unit.tensors)
    assert max(list(offloaded.live_bytes())[: offloaded.steps[0].event]) <= weights + largest
