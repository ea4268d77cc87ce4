"""Flash attention: the T x T scores never exist. On by default; a stack may turn it off to see what it saves."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.plan.claim import Claim, setting_claims


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttention:
    """Compute attention by a flash kernel (Dao et al., 2205.14135), or by torch's plain ops."""

    kind: ClassVar[str] = "flash_attention"

    attention: Literal["flash", "unfused"] = "flash"
    """unfused: scores, mask and softmax as ops of their own, as eager implementations do; for comparison."""

    def claims(self) -> Iterable[Claim]:
        """Return the claim on attention."""
        return setting_claims(self)
