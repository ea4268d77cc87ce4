"""Predict-aware memory: optimizer state makes room while predicted steps need none of it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.config.rules import young
from hybridtrain.phase import Phase
from hybridtrain.plan.claim import Claim, Presets, check_settings, setting_claims
from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.placement import Codec, Placement

_ON_HOST = frozenset({"cpu", "pinned"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictMemory(Optimization):
    """Free the card of moments and master weights in PREDICT; they are back before their first use."""

    kind: ClassVar[str] = "predict_memory"
    PRESETS: ClassVar[Presets] = {
        "conservative": {"optimizer_state": "cpu", "discard_activations": False},
        "aggressive": {"optimizer_state": "drop", "discard_activations": True},
    }

    optimizer_state: Literal["none", "cpu", "pinned", "compress", "drop"] = "cpu"
    """none: they stay. cpu, pinned: they move to the host, which is always pinned for a CUDA card. compress: moments
    become 8-bit codes on the card, and stay rounded. drop: moments start from zero afterwards, bias correction too; a
    jump then averages gradients that were already divided by the root of the second moment."""
    discard_activations: bool = True
    """Keep no block inputs in PREDICT: a predicted step has no backward pass."""
    async_restore: bool = young(default=True)
    """Copy state back from the host during the next step; false: that step waits for the whole copy first."""
    restore_lookahead: int = young(0)
    """n: begin that copy when n - 1 predicted steps are left, while the probe batch is evaluated. 0: when PREDICT ends.
    A jump is one step, or as many as it has pieces (``monitor = "every_step"``)."""

    def __post_init__(self) -> None:
        faults = []
        if self.optimizer_state not in _ON_HOST and (self.restore_lookahead or not self.async_restore):
            faults.append(
                f"async_restore, restore_lookahead: optimizer_state = '{self.optimizer_state}' copies nothing back; "
                "leave both out, or set optimizer_state to 'cpu' or 'pinned'"
            )
        if self.restore_lookahead and not self.async_restore:
            faults.append(
                f"restore_lookahead: {self.restore_lookahead} copies in PREDICT, which async_restore = false forbids; "
                "set it to 0, or async_restore to true"
            )
        check_settings(self, faults)

    def claims(self) -> Iterable[Claim]:
        """Return the claims on the state's place in PREDICT."""
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
