"""Predict-aware memory: optimizer state leaves the device during predicted steps, which do not need it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.config.rules import added_field
from hybridtrain.phase import Phase
from hybridtrain.plan.claim import Claim, Presets, check_settings, setting_claims
from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.placement import Codec, Placement

_ON_HOST = frozenset({"cpu", "pinned"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictMemory(Optimization):
    """Move moments and master weights off the device in PREDICT; they return before their next use."""

    kind: ClassVar[str] = "predict_memory"
    PRESETS: ClassVar[Presets] = {
        "conservative": {"optimizer_state": "cpu", "discard_activations": False},
        "aggressive": {"optimizer_state": "drop", "discard_activations": True},
    }

    optimizer_state: Literal["none", "cpu", "pinned", "compress", "drop"] = "cpu"
    """none: stays. cpu, pinned: moves to the host, always pinned for a CUDA card. compress: moments become 8-bit codes,
    with rounding. drop: moments and bias correction restart from zero; jumps then use an average of already divided
    gradients."""
    discard_activations: bool = True
    """Keep no boundaries in PREDICT: a predicted step runs no backward pass."""
    async_restore: bool = added_field(default=True)
    """Whether offloaded state returns in parallel to the next forward and backward pass; otherwise that step waits."""
    restore_lookahead: int = added_field(0)
    """n: start when n - 1 predicted steps are left, so that probe evaluations hide the transfer; a jump is one step, or
    one per piece (``monitor = "every_step"``). 0: at the end of PREDICT."""

    def __post_init__(self) -> None:
        faults = []
        if self.optimizer_state not in _ON_HOST and (self.restore_lookahead or not self.async_restore):
            faults.append(
                f"async_restore, restore_lookahead: optimizer_state = '{self.optimizer_state}' has no state to "
                f"restore; set 'cpu' or 'pinned', or remove both"
            )
        if self.restore_lookahead and not self.async_restore:
            faults.append(f"restore_lookahead: {self.restore_lookahead} needs async_restore = true")
        check_settings(self, faults)

    def claims(self) -> Iterable[Claim]:
        """Return the claims on the state's placement in PREDICT."""
        if self.optimizer_state in _ON_HOST:
            yield Claim("optim_state.placement", Placement.HOST, Phase.PREDICT)
            yield Claim("master.placement", Placement.HOST, Phase.PREDICT)
            yield from setting_claims(self, Phase.PREDICT)
        elif self.optimizer_state == "compress":
            yield Claim("optim_state.codec", Codec.INT8_BLOCKS, Phase.PREDICT)
        elif self.optimizer_state == "drop":
            yield Claim("optim_state.placement", Placement.DROPPED, Phase.PREDICT)
        if self.discard_activations:
            yield Claim("boundary.placement", Placement.DROPPED, Phase.PREDICT)
