"""Chunked loss: logits and their gradient exist for a slice of the tokens at a time."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.plan.claim import Claim, check_settings, setting_claims


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLoss:
    """Compute the head's loss and gradients ``loss_chunk_tokens`` tokens at a time."""

    kind: ClassVar[str] = "chunked_loss"

    loss_chunk_tokens: int = 1024

    def __post_init__(self) -> None:
        check_settings(self, switch="loss_chunk_tokens")

    def claims(self) -> Iterable[Claim]:
        """Return the claim on the loss."""
        return setting_claims(self)
