"""8-bit AdamW: both moments in 8-bit codes with one scale per 256 elements."""

from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.placement import Codec


@dataclass(frozen=True, slots=True)
class Int8Optimizer(Optimization):
    """Cut the optimizer state from 8 to 2.03 bytes per parameter; tensors below 4096 elements stay fp32."""

    kind: ClassVar[str] = "int8_optimizer"
    CELLS: ClassVar = {"optim_state.codec": Codec.INT8_BLOCKS}
