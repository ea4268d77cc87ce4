"""BitNet b1.58: the blocks' matrices are trained to take three values."""

from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.memory_plan import LinearKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Bitnet(Optimization):
    """Multiply by -1, 0 or 1 times a matrix' mean magnitude, and by activations in 8 bits (2402.17764).

    Weights are stored and updated as everything else says; they are rounded where they are used, and the gradient
    passes the rounding. What is trained so loses little when it is stored in 1.6 bits; what is not, much.
    """

    kind: ClassVar[str] = "bitnet"
    CELLS: ClassVar = {"linear": LinearKind.TERNARY}
