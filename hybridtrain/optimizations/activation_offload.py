"""Activation offload: kept block inputs wait on the host or on disk for their backward pass."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.plan.compose import Optimization


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationOffload(Optimization):
    """Move each boundary off the device; needs gradient checkpointing, which makes boundaries all that is kept."""

    kind: ClassVar[str] = "activation_offload"
    PATHS: ClassVar = {"tier": "boundary.placement"}

    tier: Literal["host", "disk"] = "host"
    """Where boundaries wait."""
