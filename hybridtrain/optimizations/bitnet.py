"""BitNet b1.58: training of the blocks' matrices for three values."""

from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.memory_plan import LinearKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Bitnet(Optimization):
    """Round matrices to -1, 0 or 1 times their mean magnitude, and activations to 8 bits (2402.17764).

    Weights are rounded when used, with straight-through gradients; storage and update follow the other settings. Models
    trained this way lose little at 1.6 bits per weight, others much.
    """

    kind: ClassVar[str] = "bitnet"
    CELLS: ClassVar = {"linear": LinearKind.TERNARY}
