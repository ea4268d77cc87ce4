"""Activation offload: kept block inputs are moved to host or disk until their backward pass."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.plan.compose import Optimization


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationOffload(Optimization):
    """Move each boundary off the device; needs gradient checkpointing."""

    kind: ClassVar[str] = "activation_offload"
    PATHS: ClassVar = {"tier": "boundary.placement"}

    tier: Literal["host", "disk"] = "host"
    """Tier of the boundaries."""
