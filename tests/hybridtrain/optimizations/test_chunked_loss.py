"""Chunked loss: one claim, and what it refuses."""

import pytest

from hybridtrain.optimizations import ChunkedLoss
from hybridtrain.plan.claim import Claim


def test_it_claims_the_slice_of_the_loss() -> None:
    assert list(ChunkedLoss(loss_chunk_tokens=77).claims()) == [Claim("loss_chunk_tokens", 77)]


@pytest.mark.parametrize("chunk_tokens", [0, -1])
def test_a_slice_has_at_least_one_token(chunk_tokens: int) -> None:
    with pytest.raises(
        ValueError, match=f"^loss_chunk_tokens: {chunk_tokens} must be at least 1; drop the optimization instead$"
    ):
        ChunkedLoss(loss_chunk_tokens=chunk_tokens)
