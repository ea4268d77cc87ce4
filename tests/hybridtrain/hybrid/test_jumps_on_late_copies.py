"""Jumps, their undoing and moving state on copies that come as late as they may, or at any moment before."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid_runs import (
    CONFIGS,
    assert_same_cycles,
    everything,
    fresh_hybrid,
    hybrid_config,
    hybrid_history,
    memory_of,
    remembers,
    run_steps,
)
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.optimizations import (
    MixedPrecision,
    PredictMemory,
    WeightStreaming,
)
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization
from lazy_transfer import ComputeWatch, LazyTransfer
from stacks import build
from tiny_models import GPT2_TIED_DROPOUT
from training_history import assert_all_bitwise

LATE = [
    "weights-1-ahead-0-resident-0-host",
    "weights-3-ahead-2-resident-1-disk",
    "state-updated-on-host-weights-streamed",
    "fused-everything-away",
    "everything-horizontal",
    "everything-disk",
]


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize(("config", "seed"), [("slow-copy", None), ("linear-every-step", 0), ("linear-probe", None)])
@pytest.mark.parametrize("stack", ["weights-3-ahead-2-resident-1-disk", "everything-horizontal", "predict"])
def test_cycles_wait_for_late_copies(stack: str, config: str, seed: int | None, tmp_path: Path) -> None:
    memory = memory_of(CONFIGS[config], "int8")
    chosen = [*late_stack(stack), memory]
    transfer = LazyTransfer(disk_folder=tmp_path / "late", seed=seed)
    settings = replace(CONFIGS[config], warmup_steps=0, full_steps=2)
    with ComputeWatch(transfer):
        late = hybrid_history(GPT2_TIED_DROPOUT, chosen, settings, transfer=transfer, num_steps=4)
    assert transfer.hazards == []
    assert transfer.most_pending > 0
    direct = hybrid_history(GPT2_TIED_DROPOUT, chosen, settings, disk_folder=tmp_path / "direct", num_steps=4)
    assert_same_cycles(late, direct)


def late_stack(name: str) -> list[Optimization]:
    if name == "predict":
        return [PredictMemory(), WeightStreaming()]
    if name == "predict-mixed":
        return [PredictMemory(), MixedPrecision(master="split16")]
    return build(name, 1)


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize(
    ("stack", "rollback"), list(zip([*LATE, "predict", "predict-mixed"], ["undo", "copy"] * 4, strict=True))
)
def test_a_jump_is_taken_back_through_late_copies(stack: str, rollback: str, tmp_path: Path) -> None:
    config = hybrid_config(fuse=False, warmup_steps=0, rollback=rollback)
    found = []
    direct_transfer = DirectTransfer(torch.device("cpu"), disk_folder=tmp_path / "direct")
    for transfer in (LazyTransfer(disk_folder=tmp_path / "late"), direct_transfer):
        hybrid = fresh_hybrid(GPT2_TIED_DROPOUT, [*late_stack(stack), remembers(codec="bfloat16")], config, transfer)
        with ComputeWatch(transfer) if isinstance(transfer, LazyTransfer) else torch.no_grad():
            run_steps(hybrid, 2)
            hybrid.undo()
            run_steps(hybrid, 3)
            hybrid.trainer.enter_phase(Phase.FULL)
        found.append(everything(hybrid.trainer))
        transfer.close()
    for late, direct, what in zip(*found, ("weight ", "state "), strict=True):
        assert_all_bitwise(late, direct, what)
