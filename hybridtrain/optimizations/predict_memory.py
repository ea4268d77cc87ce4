"""Predict-aware memory: optimizer state makes room while predicted steps need none of it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.phase import Phase
from hybridtrain.plan.claim import Claim, Presets
from hybridtrain.plan.placement import Codec, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictMemory:
    """Say where moments and master copy are in PREDICT; they come back, ahead of their first use, when it ends."""

    kind: ClassVar[str] = "predict_memory"
    PRESETS: ClassVar[Presets] = {
        "conservative": {"optimizer_state": "cpu", "discard_activations": False},
        "aggressive": {"optimizer_state": "drop", "discard_activations": True},
    }

    optimizer_state: Literal["none", "cpu", "pinned", "compress", "drop"] = "cpu"
    """none: stays. cpu, pinned: waits on the host, which is always pinned for a CUDA card. compress: moments become
    8-bit codes on the device and come back rounded. drop: moments are forgotten and start anew, bias correction too;
    jumps then go along an average of gradients that were divided by the root of the second moment while it was there."""
    discard_activations: bool = True
    """Keep no boundaries in PREDICT: a predicted step runs no backward pass."""

    def claims(self) -> Iterable[Claim]:
        """Return the claims on the state's place in PREDICT."""
        if self.optimizer_state in {"cpu", "pinned"}:
            yield Claim("optim_state.placement", Placement.HOST, Phase.PREDICT)
            yield Claim("master.placement", Placement.HOST, Phase.PREDICT)
        elif self.optimizer_state == "compress":
            yield Claim("optim_state.codec", Codec.INT8_BLOCKS, Phase.PREDICT)
        elif self.optimizer_state == "drop":
            yield Claim("optim_state.placement", Placement.DROPPED, Phase.PREDICT)
        if self.discard_activations:
            yield Claim("boundary.placement", Placement.DROPPED, Phase.PREDICT)
