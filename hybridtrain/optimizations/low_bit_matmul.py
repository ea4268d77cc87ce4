"""8-bit matmuls: the blocks' products in int8 or float8, on tensor cores that do twice the work or more."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.config.rules import added_field
from hybridtrain.plan.compose import Optimization


@dataclass(frozen=True, slots=True, kw_only=True)
class LowBitMatmul(Optimization):
    """Round both factors of each product of the blocks to 8 bits, with a scale for each row.

    Forward and both backward products; head, attention and norms stay in the compute dtype. Storage and update follow
    the other settings.
    """

    kind: ClassVar[str] = "low_bit_matmul"
    PATHS: ClassVar = {"format": "linear"}

    format: Literal["float8", "int8"] = "float8"
    """float8: e4m3, from compute capability 8.9. int8: from 8.0; on GeForce cards twice as fast as float8."""
    full_ends: int = added_field(0)
    """Blocks at either end that stay in the compute dtype."""
