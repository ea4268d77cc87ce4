"""Chunked loss: logits and their gradient exist for a slice of the tokens at a time."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.plan.claim import Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLoss:
    """Compute the head's loss and gradients ``chunk_tokens`` tokens at a time."""

    kind: ClassVar[str] = "chunked_loss"

    chunk_tokens: int = 1024

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens: {self.chunk_tokens} must be at least 1")

    def claims(self) -> Iterable[Claim]:
        """Return the claim on the loss."""
        yield Claim("loss_chunk_tokens", self.chunk_tokens)
