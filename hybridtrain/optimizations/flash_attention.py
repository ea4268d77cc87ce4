"""Flash attention: the T x T scores are never stored. On by default; turn it off to see what it saves."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.plan.compose import Optimization


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttention(Optimization):
    """Compute attention by a flash kernel (Dao et al., 2205.14135), or by torch's plain ops."""

    kind: ClassVar[str] = "flash_attention"

    attention: Literal["flash", "unfused"] = "flash"
    """unfused: separate ops for scores, mask and softmax, as in eager implementations; for comparison."""
