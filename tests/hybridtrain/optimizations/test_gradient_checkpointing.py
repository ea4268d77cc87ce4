"""Gradient checkpointing: one claim, and what it refuses."""

import pytest

from hybridtrain.optimizations import GradientCheckpointing
from hybridtrain.plan.claim import Claim


def test_it_claims_the_recompute_interval_and_the_kept_blocks() -> None:
    assert list(GradientCheckpointing(recompute_every=5, kept_blocks=2).claims()) == [
        Claim("recompute_every", 5),
        Claim("kept_blocks", 2),
        Claim("keep_attention", False),
    ]


@pytest.mark.parametrize("interval", [0, -1])
def test_keeping_everything_is_said_by_leaving_it_out(interval: int) -> None:
    with pytest.raises(
        ValueError, match=f"^recompute_every: {interval} must be at least 1; drop the optimization instead$"
    ):
        GradientCheckpointing(recompute_every=interval)


def test_the_number_of_kept_blocks_is_not_negative() -> None:
    with pytest.raises(ValueError, match=r"^kept_blocks: -1 must be at least 0$"):
        GradientCheckpointing(kept_blocks=-1)
