"""Gradient accumulation: several micro-batches per optimizer step."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.config.rules import below_least
from hybridtrain.plan.claim import Claim, Schedule
from hybridtrain.plan.placement import Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class GradAccumulation:
    """Split a batch into ``steps`` micro-batches; the loss of each is divided by ``steps``."""

    kind: ClassVar[str] = "grad_accumulation"

    steps: int = 4
    schedule: Literal["horizontal", "vertical"] = "horizontal"
    """vertical keeps one boundary per micro-batch and block, and sums a block's gradients in fp32 within its visit."""
    visit_micro_batches: int = 0
    """Micro-batches that a vertical schedule takes through a block per visit; 0: all of them."""
    accumulator: Literal["float32", "bfloat16"] = "float32"
    """Element type in which gradients wait for the update."""

    def __post_init__(self) -> None:
        faults = below_least(self, ("steps",)) + below_least(self, ("visit_micro_batches",), least=0)
        if self.visit_micro_batches and self.schedule == "horizontal":
            faults.append("visit_micro_batches: only with schedule = 'vertical'; a horizontal one visits one by one")
        if faults:
            raise ValueError("\n".join(faults))

    def claims(self) -> Iterable[Claim]:
        """Return the claims on the step loop and the gradient's storage."""
        yield Claim("grad_accum_steps", self.steps)
        yield Claim("schedule", Schedule(self.schedule))
        yield Claim("visit_micro_batches", self.visit_micro_batches)
        yield Claim("grad.codec", Codec(self.accumulator))
