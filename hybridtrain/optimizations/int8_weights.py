"""8-bit weights: matrices of the blocks in int8 with one scale per 256 elements."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.plan.claim import Claim
from hybridtrain.plan.tensor_class import Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weights:
    """Store the blocks' matrices in 1.02 bytes a parameter, on the device or wherever weights live.

    They are widened to the compute dtype when their block is visited. With a master copy they are its rounding to
    nearest; without one they are what is trained, and each update is rounded stochastically.
    """

    kind: ClassVar[str] = "int8_weights"

    master: Literal["float32", "absent"] | None = None
    """float32: the codes are a rounding of an exact copy. absent: they are what is trained. None: as mixed precision
    says, a float32 copy without it."""
    static_scales: bool = False
    """Keep the scales of the first values, doubled for room, instead of taking them anew at each update."""

    def claims(self) -> Iterable[Claim]:
        """Return the claims on the weights' storage."""
        yield Claim("weight.codec", Codec.INT8_BLOCKS)
        if self.master is not None:
            yield Claim("master.codec", Codec(self.master))
        yield Claim("static_scales", int(self.static_scales))
