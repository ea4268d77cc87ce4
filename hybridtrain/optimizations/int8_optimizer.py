"""8-bit AdamW: both moments in 8-bit codes with one scale per 256 elements."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.plan.claim import Claim
from hybridtrain.plan.placement import Codec


@dataclass(frozen=True, slots=True)
class Int8Optimizer:
    """Cut the optimizer state from 8 to 2.03 bytes a parameter; tensors below 4096 elements stay fp32."""

    kind: ClassVar[str] = "int8_optimizer"

    def claims(self) -> Iterable[Claim]:
        """Return the claim on the moments' storage."""
        yield Claim("optim_state.codec", Codec.INT8_BLOCKS)
