"""Placement changes no bit of rounded storage either: each stack against itself with everything on the device."""

from pathlib import Path

import pytest

from hybridtrain.optimizations import (
    GradAccumulation,
    GradientCheckpointing,
    MixedPrecision,
    OptimizerOffload,
    WeightStreaming,
)
from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.placement import Codec
from stacks import ACCUM_STEPS, BASE, GPT2, LLAMA, PLACES, STORAGE
from training_history import assert_all_bitwise, assert_same_training, resident_history, trained_history


@pytest.mark.sample(one_in=12)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("storage", STORAGE)
def test_a_place_below_the_device_changes_no_bit(storage: str, place: str, tmp_path: Path) -> None:
    stack = [*BASE, *STORAGE[storage], *PLACES[place]]
    actual = trained_history(GPT2, stack, ACCUM_STEPS, disk_folder=tmp_path)
    expected = resident_history(GPT2, storage)
    assert_same_training(actual, expected)
    assert_all_bitwise(actual.state, expected.state, "state ")


@pytest.mark.sample(one_in=3)
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
            grad_accum_steps=3,
            schedule="vertical",
            visit_micro_batches=visit_micro_batches,
            accumulator=Codec.BFLOAT16.value,
        ),
        MixedPrecision(),
        GradientCheckpointing(recompute_every=2),
    ]
    away = [*stack, OptimizerOffload(offload_grads=offload_grads), WeightStreaming()]
    histories = [trained_history(GPT2, chosen, 3) for chosen in (away, stack)]
    assert_same_training(*histories)
