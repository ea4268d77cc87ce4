"""Pipeline parallelism: consecutive blocks on several cards (1811.06965, 1806.03377)."""

from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.plan.compose import Optimization


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline(Optimization):
    """Make each rank a stage that holds only neighbouring blocks; on one card it changes nothing.

    grad_accumulation sets the order of micro-batches: horizontal is 1F1B, vertical GPipe.
    """

    kind: ClassVar[str] = "pipeline"
    PATHS: ClassVar = {"stages": "pipeline_stages"}

    stages: int = 2
    """Number of stages, equal to the ranks; each has at least one block."""

    def __post_init__(self) -> None:
        if not 2 <= self.stages <= 2**16:
            raise ValueError(f"stages: {self.stages} must be from 2 to {2**16}; drop the optimization instead")
