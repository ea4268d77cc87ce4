"""What recomputation costs, counted exactly on meta tensors: floating point operations by stage and unit."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest

from hybridtrain.memory.transfer import VirtualTransfer
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optimizations import GradAccumulation, GradientCheckpointing
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.planning.dry_runs import record_steps
from hybridtrain.virtual_gpu.account.op_record import OpRecord, Stage
from tiny_models import GPT2_TIED_DROPOUT, GPT2_UNTIED, LLAMA_GROUPED, random_steps

MODELS = {"gpt2": GPT2_UNTIED, "llama": LLAMA_GROUPED}
BATCH_SIZE, SEQ_LEN = 2, 16


def step_ops(config: ModelConfig, stack: Sequence[Optimization], accum_steps: int = 1) -> tuple[OpRecord, ...]:
    batches = random_steps(config, 1, accum_steps, BATCH_SIZE, SEQ_LEN)
    return record_steps(config, compose(stack), batches, VirtualTransfer()).step_ops(0)


def block_flops(ops: Sequence[OpRecord], stage: Stage) -> int:
    return sum(op.flops for op in ops if op.stage is stage and op.unit.startswith("block."))


def attention_flops(ops: Sequence[OpRecord]) -> int:
    return sum(op.flops for op in ops if op.name == "hybridkernels.causal_attention.default")


@pytest.mark.parametrize("name", MODELS)
def test_forward_flops_of_the_blocks_are_those_of_the_formula(name: str) -> None:
    config = MODELS[name]
    tokens, width, kv_width = BATCH_SIZE * SEQ_LEN, config.width, config.num_kv_heads * config.head_dim
    num_ffn_matmuls = 2 if config.family == "gpt2" else 3  # SwiGLU has a gate
    weights = 2 * width * width + 2 * width * kv_width + num_ffn_matmuls * width * config.ffn_width
    causal_attention = 2 * BATCH_SIZE * SEQ_LEN * SEQ_LEN * width  # two matmuls over half of T x T
    expected = config.num_blocks * (2 * tokens * weights + causal_attention)
    assert block_flops(step_ops(config, []), Stage.FORWARD) == expected


@pytest.mark.parametrize("name", MODELS)
def test_keeping_everything_costs_two_forwards_in_the_backward_pass(name: str) -> None:
    # Exactly two for a matmul (by input, by weight); attention makes five products for its two.
    ops = step_ops(MODELS[name], [])
    forward = block_flops(ops, Stage.FORWARD)
    assert block_flops(ops, Stage.BACKWARD) == 2 * forward + attention_flops(ops) // 2


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("interval", [1, 2, 3, 4, 9])
def test_recomputing_adds_one_forward_less_the_last_projection_of_each_segment(name: str, interval: int) -> None:
    config = MODELS[name]
    kept = step_ops(MODELS[name], [])
    recomputed = step_ops(MODELS[name], [GradientCheckpointing(recompute_every=interval)])
    forward = block_flops(kept, Stage.FORWARD)
    assert block_flops(recomputed, Stage.FORWARD) == forward
    num_segments = -(-config.num_blocks // interval)
    last_projection = 2 * BATCH_SIZE * SEQ_LEN * config.ffn_width * config.width  # nothing reads its result
    added = block_flops(recomputed, Stage.BACKWARD) - block_flops(kept, Stage.BACKWARD)
    assert added == forward - num_segments * last_projection


@pytest.mark.parametrize("interval", [0, 2])
def test_a_vertical_tied_head_projects_each_micro_batch_once_more(interval: int) -> None:
    extra = vertical_flops(GPT2_TIED_DROPOUT, interval) - horizontal_flops(GPT2_TIED_DROPOUT, interval)
    projection = 2 * BATCH_SIZE * SEQ_LEN * GPT2_TIED_DROPOUT.vocab_size * GPT2_TIED_DROPOUT.width
    assert extra == 3 * projection


@pytest.mark.parametrize("interval", [0, 2])
def test_a_vertical_untied_step_costs_what_a_horizontal_one_costs(interval: int) -> None:
    config = replace(GPT2_TIED_DROPOUT, tied=False)
    assert vertical_flops(config, interval) == horizontal_flops(config, interval)


def vertical_flops(config: ModelConfig, interval: int) -> int:
    return scheduled_flops(config, "vertical", interval)


def horizontal_flops(config: ModelConfig, interval: int) -> int:
    return scheduled_flops(config, "horizontal", interval)


def scheduled_flops(config: ModelConfig, schedule: Literal["horizontal", "vertical"], interval: int) -> int:
    stack: list[Optimization] = [GradAccumulation(grad_accum_steps=3, schedule=schedule)]
    if interval:
        stack.append(GradientCheckpointing(recompute_every=interval))
    return sum(op.flops for op in step_ops(config, stack, 3))
