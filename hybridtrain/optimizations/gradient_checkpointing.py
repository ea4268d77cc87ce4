"""Gradient checkpointing: drop activations in the forward pass, recompute them in the backward pass."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.config.rules import below_least
from hybridtrain.plan.claim import Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCheckpointing:
    """Keep one block input per ``interval`` blocks; costs one more forward pass of every block."""

    kind: ClassVar[str] = "gradient_checkpointing"

    interval: int = 8
    """Blocks per kept boundary. 1 holds the least while a block is recomputed, larger values keep fewer boundaries."""

    keep_last: int = 0
    """Last blocks that keep everything: their backward pass comes first, so what they hold is the cheapest to hold."""

    def __post_init__(self) -> None:
        faults = below_least(self, ("keep_last",), least=0)
        if self.interval < 1:
            faults.append(f"interval: {self.interval} must be at least 1; drop the optimization to keep everything")
        if faults:
            raise ValueError("\n".join(faults))

    def claims(self) -> Iterable[Claim]:
        """Return the claims on recomputation."""
        yield Claim("recompute_every", self.interval)
        yield Claim("kept_blocks", self.keep_last)
