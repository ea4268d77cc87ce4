"""Gradient accumulation: its claims, and what it refuses."""

import pytest

from hybridtrain.optimizations import GradAccumulation
from hybridtrain.plan.claim import Claim, Schedule
from hybridtrain.plan.placement import Codec


def test_it_claims_the_step_loop_and_the_storage_of_gradients() -> None:
    optimization = GradAccumulation(steps=3, schedule="vertical", visit_micro_batches=2, accumulator="bfloat16")
    assert list(optimization.claims()) == [
        Claim("grad_accum_steps", 3),
        Claim("schedule", Schedule.VERTICAL),
        Claim("visit_micro_batches", 2),
        Claim("grad.codec", Codec.BFLOAT16),
    ]


@pytest.mark.parametrize("steps", [0, -4])
def test_there_is_at_least_one_micro_batch(steps: int) -> None:
    with pytest.raises(ValueError, match=f"^steps: {steps} must be at least 1$"):
        GradAccumulation(steps=steps)


def test_a_horizontal_schedule_visits_one_by_one() -> None:
    with pytest.raises(ValueError, match=r"^visit_micro_batches: only with schedule = 'vertical'; "):
        GradAccumulation(steps=4, visit_micro_batches=2)


def test_every_fault_is_listed() -> None:
    with pytest.raises(ValueError, match="steps") as raised:
        GradAccumulation(steps=0, visit_micro_batches=-1)
    assert [line.partition(":")[0] for line in str(raised.value).splitlines()] == [
        "steps",
        "visit_micro_batches",
        "visit_micro_batches",
    ]
