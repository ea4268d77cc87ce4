"""Placement changes no bit of rounded storage either: each stack against itself with everything on the device."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from hybridtrain.errors import PlanConflictError
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optimizations import (
    GradAccumulation,
    GradientCheckpointing,
    MixedPrecision,
    OptimizerOffload,
    WeightStreaming,
)
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.placement import Codec
from rounded_storage import ACCUM_STEPS, BASE, GPT2, LLAMA, PLACES, ROUNDS_BY_CHANCE, STORAGE
from training_history import History, assert_all_bitwise, assert_same_training, trained_history


@cache
def resident_history(config: ModelConfig, storage: str, *, updates_on_host: bool = False) -> History:
    """Train with everything on the device, or at least the weights.

    The processor draws other numbers than the device, so an update there is compared with an update there where
    numbers are drawn.
    """
    update = [OptimizerOffload(update_on="host")] if updates_on_host else []
    return trained_history(config, [*BASE, *STORAGE[storage], *update], ACCUM_STEPS)


def is_refused(stack: Sequence[Optimization]) -> bool:
    try:
        compose(stack)
    except PlanConflictError:
        return True
    return False


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("storage", STORAGE)
def test_a_place_below_the_device_changes_no_bit(storage: str, place: str, tmp_path: Path) -> None:
    stack = [*BASE, *STORAGE[storage], *PLACES[place]]
    actual = trained_history(GPT2, stack, ACCUM_STEPS, disk_folder=tmp_path)
    draws_on_host = "updated-on-host" in place and storage in ROUNDS_BY_CHANCE
    expected = resident_history(GPT2, storage, updates_on_host=draws_on_host)
    assert_same_training(actual, expected)
    assert_all_bitwise(actual.state, expected.state, "state ")


@pytest.mark.parametrize("storage", STORAGE)
def test_it_changes_no_bit_of_llama(storage: str, tmp_path: Path) -> None:
    stack = [*BASE, *STORAGE[storage], *PLACES["all"]]
    actual = trained_history(LLAMA, stack, ACCUM_STEPS, disk_folder=tmp_path)
    expected = resident_history(LLAMA, storage)
    assert_same_training(actual, expected)
    assert_all_bitwise(actual.state, expected.state, "state ")


def test_each_storage_gives_another_training() -> None:
    # Guards the comparison: a codec that were ignored would be equal to fp32, and to its neighbour.
    losses = [tuple(resident_history(GPT2, storage).losses) for storage in STORAGE]
    assert len(set(losses)) >= len(losses) - 1  # a split master differs from a float32 one in ties only


@pytest.mark.parametrize("offload_grads", [False, True])
@pytest.mark.parametrize("visit_micro_batches", [1, 2, 3])
def test_a_bfloat16_accumulator_sums_alike_here_and_below(visit_micro_batches: int, *, offload_grads: bool) -> None:
    stack: list[Optimization] = [
        GradAccumulation(
            steps=3, schedule="vertical", visit_micro_batches=visit_micro_batches, accumulator=Codec.BFLOAT16.value
        ),
        MixedPrecision(),
        GradientCheckpointing(interval=2),
    ]
    away = [*stack, OptimizerOffload(offload_grads=offload_grads), WeightStreaming()]
    histories = [trained_history(GPT2, chosen, 3) for chosen in (away, stack)]
    assert_same_training(*histories)
