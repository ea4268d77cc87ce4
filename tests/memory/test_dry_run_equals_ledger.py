"""A dry run on meta tensors counts, event for event, what a run with real arithmetic holds."""

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from hybridtrain.dry_run import record_steps
from hybridtrain.memory.transfer import DirectTransfer, Transfer, VirtualTransfer
from hybridtrain.models.model_config import PRESETS, ModelConfig
from hybridtrain.optimizations import (
    ChunkedLoss,
    GradAccumulation,
    GradientCheckpointing,
    Int8Optimizer,
    MixedPrecision,
)
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.profiler.ledger_trace import LedgerTrace, find_peak
from hybridtrain.virtual_gpu.replay import Replay, replay_trace
from tiny_models import GPT2_ODD, GPT2_TIED_DROPOUT, LLAMA_GROUPED, LLAMA_ODD, random_steps

NUM_STEPS = 3
WORKSPACE_BYTES = 8_519_680
"""cuBLAS' default workspace: 4096 KiB x 2 + 16 KiB x 8; any number would do, both sides take it."""

STACKS: dict[str, list[Optimization]] = {
    "vanilla": [],
    "mixed": [MixedPrecision()],
    "conservative": [GradientCheckpointing(interval=8), Int8Optimizer()],
    "phase2-lite": [MixedPrecision(), GradAccumulation(steps=4), GradientCheckpointing(interval=8)],
    "tight": [
        GradientCheckpointing(interval=1),
        MixedPrecision(master="absent"),
        Int8Optimizer(),
        GradAccumulation(steps=4, accumulator="bfloat16"),
        ChunkedLoss(chunk_tokens=16),
    ],
    "split-vertical": [
        GradientCheckpointing(interval=2),
        MixedPrecision(master="split16"),
        GradAccumulation(steps=3, schedule="vertical"),
    ],
}
REAL_STACKS = ["vanilla", "mixed", "conservative", "phase2-lite", "tight"]
TINY_MODELS = {
    "gpt2-dropout": GPT2_TIED_DROPOUT,
    "gpt2-odd": GPT2_ODD,
    "llama-grouped": LLAMA_GROUPED,
    "llama-odd": LLAMA_ODD,
}


def record(
    config: ModelConfig, stack: Sequence[Optimization], transfer: Transfer, batch_size: int, seq_len: int
) -> LedgerTrace:
    plan = compose(stack)
    accum_steps = plan.for_phase(Phase.FULL).grad_accum_steps
    batches = random_steps(config, NUM_STEPS, accum_steps, batch_size, seq_len)
    return record_steps(config, plan, batches, transfer)


def record_both(
    config: ModelConfig, stack: Sequence[Optimization], batch_size: int, seq_len: int
) -> tuple[LedgerTrace, LedgerTrace]:
    executed = record(config, stack, DirectTransfer(torch.device("cpu")), batch_size, seq_len)
    return executed, record(config, stack, VirtualTransfer(), batch_size, seq_len)


@cache
def record_gpt2_small(name: str) -> tuple[LedgerTrace, LedgerTrace]:
    # 32 tokens: the 124M parameters and their logits are real, and a step takes a second.
    return record_both(PRESETS["gpt2-small"], STACKS[name], 1, 32)


def assert_same_trace(executed: LedgerTrace, planned: LedgerTrace) -> None:
    """Compare everything but the ops: the copy that uploads a batch has no counterpart on meta."""
    assert planned.events == executed.events
    assert planned.sizes == executed.sizes
    assert planned.classes == executed.classes
    assert planned.units == executed.units
    assert [mark.event for mark in planned.steps] == [mark.event for mark in executed.steps]


@pytest.mark.parametrize("stack", REAL_STACKS)
def test_gpt2_small_is_planned_as_it_is_executed(stack: str) -> None:
    assert_same_trace(*record_gpt2_small(stack))


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("stack", REAL_STACKS)
def test_gpt2_small_has_the_same_peak_and_holders(stack: str, step: int) -> None:
    executed, planned = record_gpt2_small(stack)
    peak = find_peak(executed, executed.step_range(step))
    assert peak.total_bytes > PRESETS["gpt2-small"].num_params * 2  # the weights alone, in the smallest format
    assert find_peak(planned, planned.step_range(step)) == peak


@pytest.mark.parametrize("stack", REAL_STACKS)
def test_gpt2_small_gives_the_allocator_the_same_work(stack: str) -> None:
    # Ops place the library workspaces, so this also compares what assert_same_trace leaves out.
    replays: list[Replay] = [replay_trace(trace, workspace_bytes=WORKSPACE_BYTES) for trace in record_gpt2_small(stack)]
    assert len(replays[0].steps) == NUM_STEPS
    assert replays[1] == replays[0]


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("model", TINY_MODELS)
def test_tiny_models_are_planned_as_they_are_executed(model: str, stack: str) -> None:
    assert_same_trace(*record_both(TINY_MODELS[model], STACKS[stack], 2, 17))


@pytest.mark.parametrize("stack", STACKS)
def test_memory_does_not_grow_from_step_to_step(stack: str) -> None:
    # Step 2 finds the moments allocated; from then on every step must take and release the same.
    planned = record(LLAMA_GROUPED, STACKS[stack], VirtualTransfer(), 2, 17)
    assert len({live_at(planned, step) for step in (1, 2)}) == 1
    peaks = [find_peak(planned, planned.step_range(step)) for step in (1, 2)]
    assert peaks[0].by_class == peaks[1].by_class


def live_at(trace: LedgerTrace, step: int) -> int:
    return list(trace.live_bytes())[trace.steps[step].event - 1]
