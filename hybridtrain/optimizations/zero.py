"""ZeRO: state is sharded over ranks instead of replicated (Rajbhandari et al., 1910.02054)."""

from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.config.rules import broken, refuse
from hybridtrain.plan.compose import Optimization


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero(Optimization):
    """Shard state over ranks, each holding only its range; on one card it changes nothing.

    It combines with offload: optimizer_offload moves a rank's state to the host, and weight_streaming with stage 3 its
    weights.
    """

    kind: ClassVar[str] = "zero"
    PATHS: ClassVar = {"stage": "zero_stage", "prefetch": "zero_prefetch"}

    stage: int = 2
    """1: optimizer state and master. 2: also summed gradients. 3: also weights of streamed blocks."""
    prefetch: int = 0
    """Blocks gathered ahead in stage 3; each needs one more block's memory."""

    def __post_init__(self) -> None:
        may_prefetch = self.prefetch == 0 or (self.prefetch > 0 and self.stage == 3)
        rules = {
            f"stage: {self.stage} must be 1, 2 or 3": 1 <= self.stage <= 3,
            f"prefetch: {self.prefetch} must be 0 except in stage 3; set 0": may_prefetch,
        }
        refuse(broken(rules))
