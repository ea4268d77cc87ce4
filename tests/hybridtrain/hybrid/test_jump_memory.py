"""A dry run counts what a cycle does, event for event; a jump needs no room of a parameter's size."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid_runs import (
    fresh_hybrid,
    hybrid_config,
    memory_of,
    remembers,
    run_steps,
)
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.rollback_copy import RollbackCopy
from hybridtrain.memory import formats
from hybridtrain.memory.transfer import DirectTransfer, Transfer, VirtualTransfer
from hybridtrain.optimizations import (
    ActivationOffload,
    FusedUpdate,
    GradAccumulation,
    GradientCheckpointing,
    Int8Optimizer,
    Int8Weights,
    MixedPrecision,
    OptimizerOffload,
    PredictMemory,
    WeightStreaming,
)
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.placement import Placement
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, StorageLedger
from stacks import ADAFACTOR, GPT2
from tiny_models import LLAMA_GROUPED, random_steps

VERTICAL = GradAccumulation(grad_accum_steps=2, schedule="vertical")
PLANNED: dict[str, list[Optimization]] = {
    "vanilla": [],
    "mixed": [MixedPrecision()],
    "split-vertical": [MixedPrecision(master="split16"), VERTICAL, GradientCheckpointing(recompute_every=2)],
    "absent-int8": [MixedPrecision(master="absent"), Int8Optimizer()],
    "streamed": [WeightStreaming(), MixedPrecision()],
    "streamed-one-slot-disk": [WeightStreaming(max_active_layers=1, tier="disk")],
    "state-away": [OptimizerOffload(), MixedPrecision()],
    "state-disk": [OptimizerOffload(tier="disk", offload_grads=False), MixedPrecision(master="split16")],
    "updated-on-host": [OptimizerOffload(update_on="host"), MixedPrecision(), WeightStreaming(resident_layers=1)],
    "int8-weights": [Int8Weights(), MixedPrecision(), WeightStreaming(), Int8Optimizer()],
    "factored": [ADAFACTOR, OptimizerOffload(offload_grads=False), MixedPrecision()],
    "fused": [FusedUpdate(), VERTICAL, GradientCheckpointing(recompute_every=1), OptimizerOffload(offload_grads=False)],
    "predict-cpu": [PredictMemory(), MixedPrecision()],
    "predict-compress": [PredictMemory(optimizer_state="compress"), MixedPrecision(), WeightStreaming()],
    "predict-factored": [PredictMemory(), ADAFACTOR],
    "predict-ahead": [PredictMemory(restore_lookahead=2), MixedPrecision()],
    "predict-waits": [PredictMemory(async_restore=False), MixedPrecision(master="split16")],
    "predict-drop": [PredictMemory(optimizer_state="drop"), MixedPrecision()],
    "predict-drop-away": [PredictMemory(optimizer_state="drop"), OptimizerOffload(), WeightStreaming()],
    "phase2": [
        MixedPrecision(active_phases=(Phase.PREDICT,)),
        GradientCheckpointing(recompute_every=2),
        GradAccumulation(),
        PredictMemory(),
    ],
    "all-away": [
        GradientCheckpointing(recompute_every=1),
        MixedPrecision(master="split16"),
        WeightStreaming(max_active_layers=3),
        OptimizerOffload(),
        ActivationOffload(),
    ],
}
PLANNED_CONFIGS = {
    "slow-fused": hybrid_config(),
    "slow-copy-probe": hybrid_config(rollback="copy", monitor="probe", probe_every=1),
    "slow-every-step": hybrid_config(monitor="every_step", fuse=False, max_move=math.inf),
    "linear": hybrid_config(predictor="linear", strength=50.0),  # does harm: a dry run takes it back
    "linear-copy": hybrid_config(predictor="linear", rollback="copy", strength=50.0),
}


def recorded(
    stack: Sequence[Optimization], config: HybridConfig, transfer: Transfer, codec: str = "int8"
) -> LedgerTrace:
    ledger = StorageLedger()
    with ledger:
        streams = any(isinstance(part, WeightStreaming) for part in stack)
        hybrid = fresh_hybrid(
            replace(LLAMA_GROUPED, width=64, ffn_width=80, num_blocks=3 if streams else 2),  # more blocks than slots
            [*stack, memory_of(config, codec)],
            replace(config, warmup_steps=0, full_steps=2),
            transfer,
            ledger,
        )
        run_steps(hybrid, 4, ledger)
    return ledger.trace()


PLANNED_CASES = [
    (stack, config)
    for row, stack in enumerate(PLANNED)
    for column, config in enumerate(PLANNED_CONFIGS)
    if (row + 2 * column) % 5 < 1
]


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize(("stack", "config"), PLANNED_CASES)
def test_cycles_are_planned_as_they_are_executed(stack: str, config: str, tmp_path: Path) -> None:
    real, dry = DirectTransfer(torch.device("cpu"), disk_folder=tmp_path), VirtualTransfer()
    executed = recorded(PLANNED[stack], PLANNED_CONFIGS[config], real)
    planned = recorded(PLANNED[stack], PLANNED_CONFIGS[config], dry)
    for name in ("events", "sizes", "classes", "units"):
        assert getattr(planned, name) == getattr(executed, name), name
    assert [mark.event for mark in planned.steps] == [mark.event for mark in executed.steps]
    for placement in (Placement.HOST, Placement.DISK):
        assert dry.tiers.by_class(placement) == real.tiers.by_class(placement)
        assert dry.tiers.peak_bytes(placement) == real.tiers.peak_bytes(placement)
    real.close()


@pytest.mark.parametrize("rollback", ["undo", "copy"])
@pytest.mark.parametrize("predictor", ["slow_gradient", "linear"])
def test_a_jump_of_offloaded_state_makes_nothing_as_large_as_a_parameter(
    predictor: str, rollback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    height = 1024
    monkeypatch.setattr(formats, "SLICE_ELEMENTS", height)
    config = hybrid_config(predictor=predictor, rollback=rollback, fuse=False)
    ledger, model = StorageLedger(), replace(GPT2, ffn_width=256, dropout=0.0)
    with ledger:
        stack = [OptimizerOffload(), WeightStreaming(max_active_layers=1), remembers(predictor)]
        hybrid = fresh_hybrid(model, stack, config, VirtualTransfer(), ledger)
        steps = random_steps(model, 10)
        while hybrid.phase is not Phase.PREDICT:
            hybrid.advance(lambda number: steps[number])
        before = ledger.live_bytes
        ledger.begin_step()
        kept = RollbackCopy(hybrid.trainer) if rollback == "copy" else None
        jump = hybrid.predictor.jump(1.0, 1e-3, kept)
        hybrid.predictor.undo(jump)
    # Two slots of (second moment, average) and at most six fp32 temporaries of a slice; a matrix alone is 64 KiB.
    assert ledger.peak_bytes - before <= (2 * 2 + 6) * 4 * height + 4096
    assert ledger.live_bytes <= before + 8
