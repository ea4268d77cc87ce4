"""ZeRO: replicated state is sharded over ranks (Rajbhandari et al., 1910.02054)."""

from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.config.rules import broken, refuse
from hybridtrain.plan.compose import Optimization


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero(Optimization):
    """Shard state over ranks, each holding only its range; on one card it changes nothing.

    Where a range lives is another's business: with optimizer_offload it waits on the host, and with weight_streaming
    stage 3 keeps a rank's part of each block there.
    """

    kind: ClassVar[str] = "zero"
    PATHS: ClassVar = {"stage": "zero_stage", "prefetch": "zero_prefetch"}

    stage: int = 2
    """1: optimizer state and master. 2: gradients too, once they are summed. 3: weights of streamed blocks too."""
    prefetch: int = 0
    """Blocks of stage 3 gathered ahead of the one at work: each takes a block's memory more until it is used."""

    def __post_init__(self) -> None:
        may_prefetch = self.prefetch == 0 or (self.prefetch > 0 and self.stage == 3)
        rules = {
            f"stage: {self.stage} must be 1, 2 or 3; drop the optimization instead": 1 <= self.stage <= 3,
            f"prefetch: {self.prefetch} must be 0, or more in stage 3, which gathers weights; set 0": may_prefetch,
        }
        refuse(broken(rules))
