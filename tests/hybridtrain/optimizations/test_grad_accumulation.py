"""Gradient accumulation: its claims, and what it refuses."""

import pytest

from hybridtrain.optimizations import GradAccumulation
from hybridtrain.plan.claim import Claim, Schedule
from hybridtrain.plan.tensor_class import Codec


def test_it_claims_the_step_loop_and_the_storage_of_gradients() -> None:
    optimization = GradAccumulation(steps=3, schedule="vertical", accumulator="bfloat16")
    assert list(optimization.claims()) == [
        Claim("grad_accum_steps", 3),
        Claim("schedule", Schedule.VERTICAL),
        Claim("grad.codec", Codec.BFLOAT16),
    ]


@pytest.mark.parametrize("steps", [0, -4])
def test_there_is_at_least_one_micro_batch(steps: int) -> None:
    with pytest.raises(ValueError, match=f"^steps: {steps} must be at least 1$"):
        GradAccumulation(steps=steps)
