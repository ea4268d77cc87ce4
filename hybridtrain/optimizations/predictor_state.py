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
    """Keep what a predictor needs, next to the moments and on their tier: no parameter-size buffer on the device."""

    kind: ClassVar[str] = "predictor_state"

    predictor: Literal["slow_gradient", "linear"] = "slow_gradient"
    """slow_gradient: one slow average of the gradients, which AdEMAMix uses too. linear: the weights some steps ago."""
    codec: Literal["float32", "bfloat16", "int8"] = "float32"
    """4, 2 or about 1 byte per parameter."""

    def claims(self) -> Iterable[Claim]:
        """Return the claims on the history of every parameter."""
        yield Claim("history_codec", _CODECS[self.codec])
        yield Claim("history_tensors", 1)
