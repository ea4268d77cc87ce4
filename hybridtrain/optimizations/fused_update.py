"""Fused update: each block is updated at the end of its backward visit, and its gradient is never stored."""

from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.placement import Placement


@dataclass(frozen=True, slots=True)
class FusedUpdate(Optimization):
    """Give gradients no place at all; accumulation needs the vertical schedule in one visit.

    Exact clipping by the global norm then costs a second forward and backward pass, because no block may be updated
    before all norms are known; ``optimizer.clip = "previous"`` clips by the norm of the step before instead.
    """

    kind: ClassVar[str] = "fused_update"
    CELLS: ClassVar = {"grad.placement": Placement.DROPPED}
