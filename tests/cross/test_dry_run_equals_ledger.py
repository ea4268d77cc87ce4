"""A dry run on meta tensors counts, event for event, what a run with real arithmetic holds."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridtrain.memory.transfer import DirectTransfer, Transfer, VirtualTransfer
from hybridtrain.models.model_config import PRESETS, ModelConfig
from hybridtrain.optimizations import (
    ActivationOffload,
    Bf16Optimizer,
    Bitnet,
    ChunkedLoss,
    FlashAttention,
    FusedUpdate,
    GradAccumulation,
    GradientCheckpointing,
    Int8Optimizer,
    Int8Weights,
    Lora,
    LowBitMatmul,
    MixedPrecision,
    Nf4Weights,
    OptimizerOffload,
    TiledMlp,
    WeightStreaming,
)
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import DynamicRange, UpdateDevice
from hybridtrain.plan.placement import Codec, Placement
from hybridtrain.planning.dry_runs import record_steps
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, find_peak
from hybridtrain.virtual_gpu.account.op_record import Lane, Stage
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.allocator.replay import replay_trace
from stacks import ADAFACTOR, settings_of
from tiny_models import FAMILIES, GPT2_ODD, GPT2_TIED_DROPOUT, LLAMA_GROUPED, LLAMA_ODD, random_steps

NUM_STEPS = 3
WORKSPACE_BYTES = 8_519_680
"""cuBLAS' default workspace: 4096 KiB x 2 + 16 KiB x 8; any number would do, both sides take it."""

STACKS: dict[str, list[Optimization]] = {
    "vanilla": [],
    "mixed": [MixedPrecision()],
    "conservative": [GradientCheckpointing(recompute_every=8), Int8Optimizer()],
    "phase2-lite": [MixedPrecision(), GradAccumulation(grad_accum_steps=2), GradientCheckpointing(recompute_every=8)],
    "tight": [
        GradientCheckpointing(recompute_every=1),
        MixedPrecision(master="absent"),
        Int8Optimizer(),
        GradAccumulation(grad_accum_steps=2, accumulator="bfloat16"),
        ChunkedLoss(loss_chunk_tokens=16),
    ],
    "unfused-attention": [FlashAttention(attention="unfused"), GradientCheckpointing(recompute_every=2)],
    "unfused-attention-mixed": [FlashAttention(attention="unfused"), MixedPrecision()],
    "split-vertical": [
        GradientCheckpointing(recompute_every=2),
        MixedPrecision(master="split16"),
        GradAccumulation(grad_accum_steps=2, schedule="vertical"),
    ],
    "lora": [Lora(), GradientCheckpointing(recompute_every=2)],
    "dora-dropout-vertical": [
        Lora(magnitude=True, dropout=0.1),
        GradAccumulation(grad_accum_steps=2, schedule="vertical"),
        ChunkedLoss(loss_chunk_tokens=16),
    ],
    "tiled-mlp": [TiledMlp(mlp_tile_tokens=16), MixedPrecision(), GradientCheckpointing(recompute_every=2)],
    "tiled-mlp-lora": [TiledMlp(mlp_tile_tokens=5), Lora(), Nf4Weights(), GradientCheckpointing(recompute_every=1)],
    "kept-attention": [GradientCheckpointing(recompute_every=1, keep_attention=True), MixedPrecision()],
    "low-bit": [LowBitMatmul(), MixedPrecision(), GradientCheckpointing(recompute_every=2)],
    "bitnet": [Bitnet(), MixedPrecision(), GradientCheckpointing(recompute_every=2)],
    "qlora": [Lora(), MixedPrecision(), Nf4Weights(), GradientCheckpointing(recompute_every=1), Int8Optimizer()],
}
VERTICAL = GradAccumulation(grad_accum_steps=2, schedule="vertical")
STREAMED_STACKS: dict[str, list[Optimization]] = {
    "streamed": [WeightStreaming()],
    "streamed-one-slot": [WeightStreaming(max_active_layers=1), GradientCheckpointing(recompute_every=1)],
    "streamed-resident-disk": [
        WeightStreaming(resident_layers=1, tier="disk"),
        GradientCheckpointing(recompute_every=2, kept_blocks=1),
        VERTICAL,
    ],
    "state-away": [OptimizerOffload(), MixedPrecision()],
    "state-alone-disk": [OptimizerOffload(tier="disk", offload_grads=False), MixedPrecision(master="split16")],
    "updated-on-host": [OptimizerOffload(update_on="host"), MixedPrecision(), Int8Optimizer()],
    "updated-on-host-streamed": [OptimizerOffload(update_on="host"), WeightStreaming(resident_layers=1)],
    "boundaries-away": [
        ActivationOffload(),
        GradientCheckpointing(recompute_every=1),
        GradAccumulation(grad_accum_steps=2),
    ],
    "kept-attention-away": [
        ActivationOffload(),
        GradientCheckpointing(recompute_every=1, keep_attention=True, kept_blocks=1),
        GradAccumulation(grad_accum_steps=2),
    ],
    "boundaries-vertical-disk": [ActivationOffload(tier="disk"), GradientCheckpointing(recompute_every=2), VERTICAL],
    "visits-of-two": [
        GradAccumulation(grad_accum_steps=3, schedule="vertical", visit_micro_batches=2),
        OptimizerOffload(),
        WeightStreaming(),
    ],
    "int8-weights": [Int8Weights()],
    "int8-weights-streamed": [Int8Weights(), MixedPrecision(), WeightStreaming(), Int8Optimizer()],
    "int8-affine-streamed": [Int8Weights(symmetric=False), MixedPrecision(), WeightStreaming(), OptimizerOffload()],
    "int8-tensor-absent": [
        Int8Weights(master="absent", dynamic_range=DynamicRange.TENSOR),
        Int8Optimizer(),
        OptimizerOffload(),
    ],
    "int8-affine-tensor-frozen": [
        Lora(),
        Int8Weights(symmetric=False, dynamic_range=DynamicRange.TENSOR),
        MixedPrecision(),
    ],
    "int8-rows-multiplied-streamed": [
        Int8Weights(dynamic_range=DynamicRange.ROW),
        LowBitMatmul(format="int8"),
        MixedPrecision(),
        WeightStreaming(),
        OptimizerOffload(),
    ],
    "int8-rows-multiplied-frozen": [Int8Weights(dynamic_range=DynamicRange.ROW), LowBitMatmul(format="int8"), Lora()],
    "int8-rows-updated-on-host": [Int8Weights(dynamic_range=DynamicRange.ROW), OptimizerOffload(update_on="host")],
    "int8-static-one-slot": [
        Int8Weights(master="absent", static_scales=True),
        WeightStreaming(max_active_layers=1),
        Bf16Optimizer(),
    ],
    "fused": [FusedUpdate(), VERTICAL, GradientCheckpointing(recompute_every=1)],
    "fused-factored-int8": [
        FusedUpdate(),
        VERTICAL,
        GradientCheckpointing(recompute_every=1),
        Int8Weights(),
        MixedPrecision(master="absent"),
        WeightStreaming(),
        ADAFACTOR,
        ActivationOffload(),
    ],
    "fused-all-away": [
        FusedUpdate(),
        VERTICAL,
        GradientCheckpointing(recompute_every=2),
        MixedPrecision(),
        WeightStreaming(tier="disk"),
        OptimizerOffload(offload_grads=False),
        ActivationOffload(),
    ],
    "qlora-streamed": [Lora(targets=("query", "qkv")), Nf4Weights(), WeightStreaming(tier="disk"), OptimizerOffload()],
    "all-away": [
        GradAccumulation(grad_accum_steps=2),
        GradientCheckpointing(recompute_every=1),
        MixedPrecision(master="split16"),
        WeightStreaming(max_active_layers=3),
        OptimizerOffload(),
        ActivationOffload(),
        ChunkedLoss(loss_chunk_tokens=16),
    ],
}
EVERY_STACK = STACKS | STREAMED_STACKS
SHALLOW = replace(PRESETS["gpt2-small"], num_blocks=3)
REAL_STACKS: dict[str, list[Optimization]] = {
    "vanilla": [],
    "mixed": [MixedPrecision()],
    "conservative": [GradientCheckpointing(recompute_every=2), Int8Optimizer()],
    "phase2-lite": [MixedPrecision(), GradAccumulation(grad_accum_steps=2), GradientCheckpointing(recompute_every=2)],
    "tight": [
        GradientCheckpointing(recompute_every=1),
        MixedPrecision(master="absent"),
        Int8Optimizer(),
        GradAccumulation(grad_accum_steps=2, accumulator="bfloat16"),
        ChunkedLoss(loss_chunk_tokens=3),
    ],
    "all-blocks": [],
}
"""Those of real widths and vocabulary. Processors without bfloat16 take seconds for ten tokens: two micro-batches of 5
tokens, the last chunk shorter, do; more of them, in larger chunks, are the tiny models'."""
REAL_MODELS = {name: PRESETS["gpt2-small"] if name == "all-blocks" else SHALLOW for name in REAL_STACKS}
"""All 12 blocks once, of every case: they are alike, and what a stack does to one of real size is seen on fewer."""
REAL_STEPS, REAL_SEQ_LEN = 2, 5
"""The second step finds the moments allocated; that all later ones are like it is told of the tiny models."""
TINY_MODELS = {
    "gpt2-dropout": GPT2_TIED_DROPOUT,
    "gpt2-odd": GPT2_ODD,
    "llama-grouped": LLAMA_GROUPED,
    "llama-odd": LLAMA_ODD,
    **FAMILIES,
}


def record(
    config: ModelConfig,
    stack: Sequence[Optimization],
    transfer: Transfer,
    batch_size: int,
    seq_len: int,
    num_steps: int = NUM_STEPS,
) -> LedgerTrace:
    plan = compose(stack)
    accum_steps = plan.for_phase(Phase.FULL).grad_accum_steps
    batches = random_steps(config, num_steps, accum_steps, batch_size, seq_len)
    return record_steps(config, plan, batches, transfer, settings_of(stack, TrainerConfig()))


def wide(config: ModelConfig) -> ModelConfig:
    """Return a model whose matrices have 8-bit moments: 4096 elements and more."""
    return replace(config, width=64 if config.width % 4 == 0 and config.num_heads == 4 else 72, ffn_width=80)


def record_gpt2_small(name: str) -> tuple[LedgerTrace, LedgerTrace]:
    executed, planned = (
        record(REAL_MODELS[name], REAL_STACKS[name], transfer, 1, REAL_SEQ_LEN, REAL_STEPS)
        for transfer in (DirectTransfer(torch.device("cpu")), VirtualTransfer())
    )
    return executed, planned


def assert_same_trace(executed: LedgerTrace, planned: LedgerTrace) -> None:
    """Compare everything but what has no counterpart on meta: copies that upload batches, reading scalars."""
    assert planned.events == executed.events
    assert planned.sizes == executed.sizes
    assert planned.classes == executed.classes
    assert planned.units == executed.units
    assert [mark.event for mark in planned.steps] == [mark.event for mark in executed.steps]
    assert work_of(planned) == work_of(executed)


def work_of(trace: LedgerTrace) -> list[tuple[object, ...]]:
    """Return the work of every lane and what waits for what, without uploads and the reading of scalars."""
    numbers: dict[int, int] = {}
    work: list[tuple[object, ...]] = []
    inherited: tuple[int, ...] = ()
    for index, op in enumerate(trace.ops):
        waits = inherited + tuple(numbers[wait] for wait in op.waits)
        if op.stage is Stage.LOAD or op.name.startswith("aten._local_scalar_dense"):
            numbers[index], inherited = len(work) - 1, waits  # what comes next waits in its place
            continue
        numbers[index], inherited = len(work), ()
        work.append((op.name, op.lane, op.stage, op.unit, op.event, op.flops, op.bytes_moved, waits))
    return work


@pytest.mark.sample(one_in=4)
@pytest.mark.parametrize("stack", REAL_STACKS)
def test_gpt2_small_is_planned_as_it_is_executed(stack: str) -> None:
    executed, planned = record_gpt2_small(stack)
    assert_same_trace(executed, planned)
    for step in range(REAL_STEPS):
        peak = find_peak(executed, executed.step_range(step))
        assert peak.total_bytes > REAL_MODELS[stack].num_params * 2  # the weights alone, in the smallest format
        assert find_peak(planned, planned.step_range(step)) == peak
    # Ops place the library workspaces, so this also compares what assert_same_trace leaves out.
    replays = [replay_trace(trace, workspace_bytes=WORKSPACE_BYTES) for trace in (executed, planned)]
    assert len(replays[0].steps) == REAL_STEPS
    assert replays[1] == replays[0]


def chosen_cases() -> list[tuple[str, str, int]]:
    """Return model, stack, steps: every stack with GPT-2 or LLaMA, odd sizes as well as even ones; others with a few.

    The third step, which is as the second, is taken of the model with fewer blocks.
    """
    cases = (("gpt2-dropout", 2), ("llama-odd", 3)), (("gpt2-odd", 3), ("llama-grouped", 2))
    chosen = [
        (
            "gpt2-odd" if stack.startswith("tiled") and model == "gpt2-dropout" else model,
            stack,
            steps,
        )
        for number, stack in enumerate(EVERY_STACK)
        for model, steps in cases[number % 2]
    ]
    of_families = ("vanilla", "unfused-attention", "streamed-resident-disk")
    return chosen + [(model, of_families[number % 3], 2) for number, model in enumerate(FAMILIES)] + [
        ("gemma3", "tight", 2), ("qwen3-moe", "tight", 2)
    ]  # fmt: skip


@pytest.mark.sample(one_in=4)
@pytest.mark.parametrize(("model", "stack", "num_steps"), chosen_cases())
def test_tiny_models_are_planned_as_they_are_executed(model: str, stack: str, num_steps: int, tmp_path: Path) -> None:
    real = DirectTransfer(torch.device("cpu"), disk_folder=tmp_path)
    dry = VirtualTransfer()
    config = wide(TINY_MODELS[model])
    executed, planned = (record(config, EVERY_STACK[stack], transfer, 2, 17, num_steps) for transfer in (real, dry))
    assert_same_trace(executed, planned)
    for placement in (Placement.HOST, Placement.DISK):
        assert dry.tiers.by_class(placement) == real.tiers.by_class(placement)
        assert dry.tiers.peak_bytes(placement) == real.tiers.peak_bytes(placement)
    real.close()


@pytest.mark.parametrize("stack", EVERY_STACK)
def test_memory_does_not_grow_and_what_a_stack_moves_off_the_device_is_somewhere_else(stack: str) -> None:
    transfer = VirtualTransfer()
    trace = record(wide(LLAMA_GROUPED), EVERY_STACK[stack], transfer, 2, 17)
    # Step 2 finds the moments allocated; from then on every step must take and release the same.
    assert len({live_at(trace, step) for step in (1, 2)}) == 1
    peaks = [find_peak(trace, trace.step_range(step)) for step in (1, 2)]
    assert peaks[0].by_class == peaks[1].by_class
    if stack in STREAMED_STACKS:
        assert_moved(stack, transfer, trace)


def assert_moved(stack: str, transfer: VirtualTransfer, trace: LedgerTrace) -> None:
    # Guards the comparison above: two empty accounts are equal too.
    plan = compose(STREAMED_STACKS[stack]).for_phase(Phase.FULL)
    below = {Placement.HOST: set[TensorClass](), Placement.DISK: set[TensorClass]()}
    for tensor_class, cell in (
        (TensorClass.WEIGHT, plan.weight),
        (TensorClass.GRAD, plan.grad),
        (TensorClass.OPTIM_STATE, plan.optim_state),
        (TensorClass.BOUNDARY, plan.boundary),
    ):
        if cell.placement in below:
            below[cell.placement].add(tensor_class)
    if plan.master.codec is not Codec.ABSENT and plan.master.placement in below:
        below[plan.master.placement].add(TensorClass.MASTER)
    if plan.update_on is UpdateDevice.HOST:
        below[Placement.HOST].add(TensorClass.WEIGHT)  # what the device keeps has a copy where it is updated
    assert {placement: set(transfer.tiers.by_class(placement)) for placement in below} == below
    lanes = {op.lane for op in trace.step_ops(2)}
    assert (Lane.COPY_IN in lanes) == bool(below[Placement.HOST] | below[Placement.DISK])
    assert (Lane.DISK in lanes) == bool(below[Placement.DISK])
    assert (Lane.HOST in lanes) == (plan.update_on is UpdateDevice.HOST)


def live_at(trace: LedgerTrace, step: int) -> int:
    return list(trace.live_bytes())[trace.steps[step].event - 1]
