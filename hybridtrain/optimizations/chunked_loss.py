"""Chunked loss: logits and their gradient exist for a slice of the tokens at a time."""

from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.plan.compose import Optimization


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLoss(Optimization):
    """Compute the head's loss and gradients ``loss_chunk_tokens`` tokens at a time."""

    kind: ClassVar[str] = "chunked_loss"
    SWITCH: ClassVar[str] = "loss_chunk_tokens"

    loss_chunk_tokens: int = 1024
