"""Weights without a copy, with 8-bit moments, are rounded within their update: equal on every tier, and resumed."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from checkpoints import save_checkpoint
from hybrid_runs import SETTINGS, everything, fresh_hybrid, hybrid_config, remembers
from hybridtrain.checkpoint import load_checkpoint
from hybridtrain.engine import update
from hybridtrain.memory import formats
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.optimizations import Int8Optimizer, Int8Weights, MixedPrecision
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization
from hybridtrain.trainer import Trainer
from stacks import ACCUM_STEPS, BASE, GPT2, PLACES
from tiny_models import random_steps
from training_history import History, assert_all_bitwise, fresh_trainer, trained_history

STORAGE: dict[str, list[Optimization]] = {
    "bf16": [Int8Optimizer(), MixedPrecision(master="absent")],
    "int8-fp32": [Int8Weights(master="absent"), Int8Optimizer()],
    "int8-bf16": [Int8Weights(master="absent"), Int8Optimizer(), MixedPrecision(master="absent")],
    "int8-static": [Int8Weights(master="absent", static_scales=True), MixedPrecision(master="absent"), Int8Optimizer()],
}
ON_DEVICE = "on-device"
MODEL_STEPS = 22
"""Forecasts and monitors of the hybrid trainer begin after 20 steps."""


def stack_of(storage: str, place: str) -> list[Optimization]:
    return [*BASE, *STORAGE[storage], *PLACES.get(place, [])]


@cache
def resident_in_slices(storage: str) -> History:
    """Train on the device with the lengths of slices that the one test sets which calls this."""
    return trained_history(GPT2, stack_of(storage, ON_DEVICE), ACCUM_STEPS)


@pytest.mark.sample(one_in=4)
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("place", [ON_DEVICE, "all", "state-updated-on-host", "fused-all"])
def test_slices_of_two_lengths_draw_the_same_numbers(
    storage: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "RESIDENT_SLICE_ELEMENTS", 3072)
    monkeypatch.setattr(formats, "SLICE_ELEMENTS", 1536)
    resident = resident_in_slices(storage)
    if place == ON_DEVICE:
        monkeypatch.setattr(update, "RESIDENT_SLICE_ELEMENTS", 1536)
    moved = trained_history(GPT2, stack_of(storage, place), ACCUM_STEPS, disk_folder=tmp_path)
    assert moved.losses == resident.losses
    assert_all_bitwise(moved.weights, resident.weights, "weight ")
    assert_all_bitwise(moved.state, resident.state, "state ")


@pytest.mark.sample(one_in=4)
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("place", [ON_DEVICE, "all", "fused-all", "updated-on-host-weights", "state-alone-disk"])
def test_a_resumed_run_goes_on_bit_equal_whatever_the_random_state_outside(
    storage: str, place: str, tmp_path: Path
) -> None:
    def new(name: str) -> Trainer:
        transfer = DirectTransfer(torch.device("cpu"), disk_folder=tmp_path / name)
        return fresh_trainer(GPT2, stack_of(storage, place), transfer)

    steps = random_steps(GPT2, 4, ACCUM_STEPS)
    whole, resumed = new("whole"), new("resumed")
    for step in steps[:2]:
        whole.step(step)
    save_checkpoint(whole, tmp_path / "state.pt")
    load_checkpoint(resumed, tmp_path / "state.pt")
    results = []
    for trainer, seed in ((resumed, 99), (whole, 3)):
        torch.manual_seed(seed)
        results.append([(done.loss, done.grad_norm) for done in map(trainer.step, steps[2:])])
    assert results[0] == results[1]
    for actual, expected in zip(everything(resumed), everything(whole), strict=True):
        assert_all_bitwise(actual, expected, "tensor ")
    for trainer in (whole, resumed):
        trainer.transfer.close()


@pytest.mark.parametrize("storage", ["bf16", "int8-bf16"])
@pytest.mark.parametrize("settings", [{"max_predict_steps": 0.0, "full_steps": 4}, {"max_move": 0.0}], ids=str)
def test_a_slow_average_that_is_only_tracked_changes_no_number(storage: str, settings: dict[str, float]) -> None:
    config = hybrid_config(**settings)
    model = replace(GPT2, num_blocks=1)  # each parameter is tracked for itself
    hybrid = fresh_hybrid(model, [*STORAGE[storage], remembers(config.predictor)], config)
    plain = fresh_trainer(model, STORAGE[storage], settings=SETTINGS)
    steps = random_steps(model, MODEL_STEPS)
    found = []
    while hybrid.trainer.steps_done < MODEL_STEPS:
        found.append(hybrid.advance(lambda number: steps[number]))
    expected = [plain.step(step) for step in steps]
    true_steps = [(done.loss, done.grad_norm) for done in found if done.phase is not Phase.PREDICT]
    assert true_steps == [(done.loss, done.grad_norm) for done in expected]
    assert_all_bitwise(everything(hybrid.trainer)[0], everything(plain)[0], "weight ")
