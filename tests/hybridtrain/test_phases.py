"""Optimizer state moves away in PREDICT and comes back; FULL's numbers stay what they were."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from hybridtrain.memory.transfer import DirectTransfer, Transfer, VirtualTransfer
from hybridtrain.optimizations import Int8Optimizer, MixedPrecision, PredictMemory
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.placement import Placement
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, StorageLedger
from tiny_models import GPT2_UNTIED, random_steps

BASES: dict[str, list[Optimization]] = {"fp32": [], "mixed": [MixedPrecision()], "int8": [Int8Optimizer()]}
PREDICT_AFTER = (1, 3)
MODEL = replace(GPT2_UNTIED, num_blocks=2)
NUM_PARAMS = MODEL.num_params


class Run:
    """Six steps with two predict phases in between, counted by the ledger."""

    def __init__(self, stack: Sequence[Optimization], transfer: Transfer, *, cycles: bool = True) -> None:
        self.losses: list[float] = []
        self.live: list[tuple[int, int, int]] = []
        self.transfer = transfer
        ledger = StorageLedger()
        with ledger:
            self.trainer = Trainer(MODEL, compose(stack), TrainerConfig(), transfer, ledger)
            for number, batches in enumerate(random_steps(MODEL, 6)):
                ledger.begin_step()
                self.losses.append(self.trainer.step(batches).loss)
                if cycles and number in PREDICT_AFTER:
                    before = ledger.live_bytes
                    self.trainer.enter_phase(Phase.PREDICT)
                    within = ledger.live_bytes
                    self.trainer.enter_phase(Phase.CORRECT)
                    self.live.append((before, within, ledger.live_bytes))
        self.trace: LedgerTrace = ledger.trace()


def executed(stack: Sequence[Optimization], *, cycles: bool = True) -> Run:
    return known(tuple(stack), cycles)


@cache
def known(stack: tuple[Optimization, ...], cycles: bool) -> Run:
    return Run(stack, DirectTransfer(torch.device("cpu")), cycles=cycles)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("where", ["none", "cpu", "pinned"])
def test_state_that_only_moves_changes_no_loss(base: str, where: str) -> None:
    moved = executed([*BASES[base], PredictMemory(optimizer_state=where)])
    assert moved.losses == executed(BASES[base], cycles=False).losses


@pytest.mark.parametrize("where", ["compress", "drop"])
def test_state_that_is_rounded_or_dropped_changes_the_next_loss_a_little(where: str) -> None:
    changed = executed([PredictMemory(optimizer_state=where)])
    plain = executed([], cycles=False)
    assert changed.losses[:3] == plain.losses[:3]  # the update after the first predict phase is seen one step later
    assert changed.losses != plain.losses
    # Six steps at lr 3e-4 move the loss by about 0.02; a state that came back wrong would move it as much.
    assert changed.losses[-1] == pytest.approx(plain.losses[-1], abs=2e-3)


def test_moments_leave_the_device_and_come_back() -> None:
    for before, within, after in executed([PredictMemory()]).live:
        assert before - within == 2 * 4 * NUM_PARAMS  # both fp32 moments; there is no master copy
        assert after == before


def test_the_master_copy_leaves_too() -> None:
    before, within, _ = executed([MixedPrecision(), PredictMemory()]).live[0]
    assert before - within == 3 * 4 * NUM_PARAMS


def test_compressed_moments_take_a_quarter_and_scales() -> None:
    before, within, after = executed([PredictMemory(optimizer_state="compress")]).live[0]
    assert 0.25 * 8 * NUM_PARAMS < within - (before - 8 * NUM_PARAMS) < 0.45 * 8 * NUM_PARAMS  # padded to groups of 256
    assert after == before


def test_dropped_moments_come_back_with_the_next_update() -> None:
    first, second = executed([PredictMemory(optimizer_state="drop")]).live
    assert first[0] - first[1] == first[0] - first[2] == 8 * NUM_PARAMS
    assert second[0] == first[0]


@pytest.mark.parametrize("where", ["cpu", "compress", "drop"])
@pytest.mark.parametrize("base", BASES)
def test_a_cycle_is_planned_as_it_is_executed(base: str, where: str) -> None:
    stack = [*BASES[base], PredictMemory(optimizer_state=where)]
    real, planned = executed(stack), Run(stack, VirtualTransfer())
    for name in ("events", "sizes", "classes", "units"):
        assert getattr(planned.trace, name) == getattr(real.trace, name), name
    assert planned.transfer.tiers.peak_bytes(Placement.HOST) == real.transfer.tiers.peak_bytes(Placement.HOST)


def test_host_buffers_are_given_back_when_the_state_is_back() -> None:
    run = executed([PredictMemory()])
    assert run.transfer.tiers.peak_bytes(Placement.HOST) > 0
    assert run.transfer.tiers.by_class(Placement.HOST) == {}
