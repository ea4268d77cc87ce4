"""Flash attention: the T x T scores never exist. On by default; a stack may turn it off to see what it saves."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.plan.claim import Attention, Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttention:
    """Compute attention by a flash kernel (Dao et al., 2205.14135), or by torch's plain ops."""

    kind: ClassVar[str] = "flash_attention"

    enabled: bool = True
    """False: scores, mask and softmax as ops of their own, as eager implementations do; for comparison."""

    def claims(self) -> Iterable[Claim]:
        """Return the claim on attention."""
        yield Claim("attention", Attention.FLASH if self.enabled else Attention.UNFUSED)
