"""Activation offload: kept block inputs wait on the host or on disk for their backward pass."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.plan.claim import Claim
from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationOffload(Optimization):
    """Move each boundary off the device; needs gradient checkpointing, which makes boundaries all that is kept."""

    kind: ClassVar[str] = "activation_offload"

    tier: Literal["host", "disk"] = "host"
    """Where boundaries wait."""

    def claims(self) -> Iterable[Claim]:
        """Return the claim on the boundaries' place."""
        yield Claim("boundary.placement", Placement(self.tier))
