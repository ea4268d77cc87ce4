"""bfloat16 optimizer state: both moments in 16 bits, rounded stochastically."""

from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.placement import Codec


@dataclass(frozen=True, slots=True)
class Bf16Optimizer(Optimization):
    """Cut the optimizer state from 8 to 4 bytes per parameter."""

    kind: ClassVar[str] = "bf16_optimizer"
    CELLS: ClassVar = {"optim_state.codec": Codec.BFLOAT16}
