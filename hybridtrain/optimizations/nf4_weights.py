"""4-bit weights: frozen matrices of the blocks in NF4 with double quantization (QLoRA, 2305.14314)."""

from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.memory_plan import WidenBy
from hybridtrain.plan.placement import Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Nf4Weights(Optimization):
    """Store the blocks' matrices in 0.52 bytes per parameter, on any tier; needs ``lora``.

    They are in bitsandbytes' format, and dequantized matrix by matrix as there.
    """

    kind: ClassVar[str] = "nf4_weights"
    CELLS: ClassVar = {"weight.codec": Codec.NF4}

    widen_by: WidenBy = WidenBy.MATRIX
    """Unit of dequantization. matrix: one at a time, again in the backward pass. block: all at once per visit, faster
    if a visit has several micro-batches."""
