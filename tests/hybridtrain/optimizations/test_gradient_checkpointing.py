"""Gradient checkpointing: one claim, and what it refuses."""

import pytest

from hybridtrain.optimizations import GradientCheckpointing
from hybridtrain.plan.claim import Claim


def test_it_claims_the_recompute_interval() -> None:
    assert list(GradientCheckpointing(interval=5).claims()) == [Claim("recompute_every", 5)]


@pytest.mark.parametrize("interval", [0, -1])
def test_keeping_everything_is_said_by_leaving_it_out(interval: int) -> None:
    with pytest.raises(ValueError, match=f"^interval: {interval} must be at least 1; drop the optimization"):
        GradientCheckpointing(interval=interval)
