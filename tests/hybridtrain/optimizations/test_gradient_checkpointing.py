"""Gradient checkpointing: one claim, and what it refuses."""

import pytest

from hybridtrain.optimizations import GradientCheckpointing
from hybridtrain.plan.claim import Claim


def test_it_claims_the_recompute_interval_and_the_kept_blocks() -> None:
    assert list(GradientCheckpointing(interval=5, keep_last=2).claims()) == [
        Claim("recompute_every", 5),
        Claim("kept_blocks", 2),
    ]


@pytest.mark.parametrize("interval", [0, -1])
def test_keeping_everything_is_said_by_leaving_it_out(interval: int) -> None:
    with pytest.raises(ValueError, match=f"^interval: {interval} must be at least 1; drop the optimization"):
        GradientCheckpointing(interval=interval)


def test_the_number_of_kept_blocks_is_not_negative() -> None:
    with pytest.raises(ValueError, match=r"^keep_last: -1 must be at least 0$"):
        GradientCheckpointing(keep_last=-1)
