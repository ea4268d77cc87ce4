"""Gradient accumulation: several micro-batches per optimizer step."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.plan.claim import Claim, Schedule
from hybridtrain.plan.tensor_class import Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class GradAccumulation:
    """Split a batch into ``steps`` micro-batches; the loss of each is divided by ``steps``."""

    kind: ClassVar[str] = "grad_accumulation"

    steps: int = 4
    schedule: Literal["horizontal", "vertical"] = "horizontal"
    """vertical keeps one boundary per micro-batch and block, and sums a block's gradients in fp32 within its visit."""
    accumulator: Literal["float32", "bfloat16"] = "float32"
    """Element type in which gradients wait for the update."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps: {self.steps} must be at least 1")

    def claims(self) -> Iterable[Claim]:
        """Return the claims on the step loop and the gradient's storage."""
        yield Claim("grad_accum_steps", self.steps)
        yield Claim("schedule", Schedule(self.schedule))
        yield Claim("grad.codec", Codec(self.accumulator))
