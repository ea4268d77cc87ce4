"""Gradient accumulation: several micro-batches per optimizer step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from hybridtrain.plan.claim import Claim, Presets, check_settings, setting_claims
from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.placement import Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class GradAccumulation(Optimization):
    """Split a batch into ``grad_accum_steps`` micro-batches; a step's loss is the mean over all targets that count."""

    kind: ClassVar[str] = "grad_accumulation"
    PRESETS: ClassVar[Presets] = {
        "conservative": {"grad_accum_steps": 2},
        "aggressive": {"grad_accum_steps": 4, "schedule": "vertical", "accumulator": "bfloat16"},
    }

    grad_accum_steps: int = 4
    schedule: Literal["horizontal", "vertical"] = "horizontal"
    """vertical keeps one boundary per micro-batch and block, and sums a block's gradients in fp32 within its visit."""
    visit_micro_batches: int = 0
    """Micro-batches that a vertical schedule takes through a block per visit; 0: all of them."""
    accumulator: Literal["float32", "bfloat16"] | None = "float32"
    """Element type in which gradients wait for the update; None: that of the arithmetic, phase by phase."""
    normalize_gradients: bool = True
    """Divide by the number of micro-batches, as one large batch would. Without it gradients add up, and so does what
    clipping by a norm sees."""
    scale_lr: bool = False
    """Multiply the learning rate with the number of micro-batches: a rate that was chosen for one of them then suits
    the larger batch (Goyal et al., 1706.02677)."""

    def __post_init__(self) -> None:
        fault = "visit_micro_batches: only with schedule = 'vertical'; a horizontal one visits one by one"
        check_settings(self, [fault] if self.visit_micro_batches and self.schedule == "horizontal" else [])

    def claims(self) -> Iterable[Claim]:
        """Return the claims on the step loop and the gradient's storage."""
        yield from setting_claims(self)
        if self.accumulator is not None:
            yield Claim("grad.codec", Codec(self.accumulator))


def with_accumulation(stack: Sequence[Optimization], grad_accum_steps: int | None) -> tuple[Optimization, ...]:
    """Return a stack with another number of micro-batches per step, all else as it was; None leaves the stack's.

    A stack that accumulates keeps its schedule; any other takes the micro-batches one by one and sums gradients in the
    element type that it stores them in.

    Raises:
        ValueError: fewer than one micro-batch.
    """
    found = [item for item in stack if isinstance(item, GradAccumulation)]
    if grad_accum_steps is None or (grad_accum_steps == 1 and not found):
        return tuple(stack)
    if found:
        changed = replace(found[0], grad_accum_steps=grad_accum_steps)
        return tuple(changed if item is found[0] else item for item in stack)
    return (*stack, GradAccumulation(grad_accum_steps=grad_accum_steps, accumulator=None))
