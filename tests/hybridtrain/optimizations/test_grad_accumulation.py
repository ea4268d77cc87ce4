"""Gradient accumulation: its claims, and what it refuses."""

import pytest

from hybridtrain.optimizations import GradAccumulation
from hybridtrain.plan.claim import Claim
from hybridtrain.plan.memory_plan import Schedule
from hybridtrain.plan.placement import Codec


def test_it_claims_the_step_loop_and_the_storage_of_gradients() -> None:
    optimization = GradAccumulation(
        grad_accum_steps=3, schedule="vertical", visit_micro_batches=2, accumulator="bfloat16"
    )
    assert list(optimization.claims()) == [
        Claim("grad_accum_steps", 3),
        Claim("schedule", Schedule.VERTICAL),
        Claim("visit_micro_batches", 2),
        Claim("normalize_gradients", value=True),
        Claim("scale_lr", value=False),
        Claim("grad.codec", Codec.BFLOAT16),
    ]


@pytest.mark.parametrize("steps", [0, -4])
def test_there_is_at_least_one_micro_batch(steps: int) -> None:
    with pytest.raises(ValueError, match=f"^grad_accum_steps: {steps} must be at least 1$"):
        GradAccumulation(grad_accum_steps=steps)


def test_a_horizontal_schedule_visits_one_by_one() -> None:
    with pytest.raises(ValueError, match=r"^visit_micro_batches: needs schedule = 'vertical'; "):
        GradAccumulation(grad_accum_steps=4, visit_micro_batches=2)


def test_every_fault_is_listed() -> None:
    with pytest.raises(ValueError, match="grad_accum_steps") as raised:
        GradAccumulation(grad_accum_steps=0, visit_micro_batches=-1)
    assert [line.partition(":")[0] for line in str(raised.value).splitlines()] == [
        "grad_accum_steps",
        "visit_micro_batches",
        "visit_micro_batches",
    ]
