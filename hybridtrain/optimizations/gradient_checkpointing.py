"""Gradient checkpointing: drop activations in the forward pass, recompute them in the backward pass."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.plan.claim import Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCheckpointing:
    """Keep one block input per ``interval`` blocks; costs one more forward pass of every block."""

    kind: ClassVar[str] = "gradient_checkpointing"

    interval: int = 8
    """Blocks per kept boundary. 1 holds the least while a block is recomputed, larger values keep fewer boundaries."""

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"interval: {self.interval} must be at least 1; drop the optimization to keep everything")

    def claims(self) -> Iterable[Claim]:
        """Return the claim on the recompute setting."""
        yield Claim("recompute_every", self.interval)
