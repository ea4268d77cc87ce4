"""bfloat16 optimizer state: both moments in 16 bits, rounded stochastically."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.plan.claim import Claim
from hybridtrain.plan.placement import Codec


@dataclass(frozen=True, slots=True)
class Bf16Optimizer:
    """Cut the optimizer state from 8 to 4 bytes a parameter."""

    kind: ClassVar[str] = "bf16_optimizer"

    def claims(self) -> Iterable[Claim]:
        """Return the claim on the moments' storage."""
        yield Claim("optim_state.codec", Codec.BFLOAT16)
