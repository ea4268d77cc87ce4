"""4-bit weights: frozen matrices of the blocks in NF4 with double quantization (QLoRA, 2305.14314)."""

from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.memory_plan import WidenBy
from hybridtrain.plan.placement import Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Nf4Weights(Optimization):
    """Store the blocks' matrices in 0.52 bytes per parameter, on the device or wherever weights live; needs ``lora``.

    They are widened to the compute dtype matrix by matrix, as bitsandbytes does, whose format it is.
    """

    kind: ClassVar[str] = "nf4_weights"
    CELLS: ClassVar = {"weight.codec": Codec.NF4}

    widen_by: WidenBy = WidenBy.MATRIX
    """matrix: one at a time, anew in the backward pass. block: all of a block once a visit, which is faster where a
    visit takes several micro-batches."""
