"""State of a weight predictor: its record of every weight's trajectory."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.plan.claim import Claim
from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.placement import Codec

_CODECS = {"float32": Codec.FLOAT32, "bfloat16": Codec.BFLOAT16, "int8": Codec.INT8_BLOCKS}


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorState(Optimization):
    """Store a predictor's state beside the moments, on their tier."""

    kind: ClassVar[str] = "predictor_state"

    predictor: Literal["slow_gradient", "linear"] = "slow_gradient"
    """slow_gradient: a slow average of the gradients, as AdEMAMix uses. linear: the weights at the round's first
    step."""
    codec: Literal["float32", "bfloat16", "int8"] = "float32"
    """Storage format: 4, 2 or about 1 byte per parameter."""

    def claims(self) -> Iterable[Claim]:
        """Return the claims on the history of every parameter."""
        yield Claim("history_codec", _CODECS[self.codec])
        yield Claim("history_tensors", 1)
