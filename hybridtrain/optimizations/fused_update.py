"""Fused update: each block is updated at the end of its backward visit, and its gradient is never stored."""

from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.placement import Placement


@dataclass(frozen=True, slots=True)
class FusedUpdate(Optimization):
    """Update each block within its backward visit, so that gradients are never stored.

    Accumulation needs schedule = "vertical" with all micro-batches in one visit. Exact clipping needs a second forward
    and backward pass; ``optimizer.clip = "previous"`` clips by the previous step's norm instead.
    """

    kind: ClassVar[str] = "fused_update"
    CELLS: ClassVar = {"grad.placement": Placement.DROPPED}
