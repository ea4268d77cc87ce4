"""Gradient accumulation: several micro-batches per optimizer step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from hybridtrain.plan.claim import Claim, Presets, check_settings, setting_claims
from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.placement import Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class GradAccumulation(Optimization):
    """Split a batch into ``grad_accum_steps`` micro-batches; the loss is the mean over all targets."""

    kind: ClassVar[str] = "grad_accumulation"
    PRESETS: ClassVar[Presets] = {
        "conservative": {"grad_accum_steps": 2},
        "aggressive": {"grad_accum_steps": 4, "schedule": "vertical", "accumulator": "bfloat16"},
    }

    grad_accum_steps: int = 4
    schedule: Literal["horizontal", "vertical"] = "horizontal"
    """Order: horizontal, one micro-batch after another; vertical, block by block, with one boundary per micro-batch and
    block, and fp32 sums."""
    visit_micro_batches: int = 0
    """Micro-batches per block visit of a vertical schedule; 0: all."""
    accumulator: Literal["float32", "bfloat16"] | None = "float32"
    """Dtype of stored gradients; None: each phase's compute dtype."""
    normalize_gradients: bool = True
    """Average gradients over micro-batches, as one large batch would. Without it they are summed, which also raises the
    norm for clipping."""
    scale_lr: bool = False
    """Multiply the learning rate by the number of micro-batches (linear scaling rule of Goyal et al., 1706.02677)."""

    def __post_init__(self) -> None:
        fault = "visit_micro_batches: needs schedule = 'vertical'; remove it, or set the schedule"
        check_settings(self, [fault] if self.visit_micro_batches and self.schedule == "horizontal" else [])

    def claims(self) -> Iterable[Claim]:
        """Return the claims on the step loop and the gradient's storage."""
        yield from setting_claims(self)
        if self.accumulator is not None:
            yield Claim("grad.codec", Codec(self.accumulator))


def with_accumulation(stack: Sequence[Optimization], grad_accum_steps: int | None) -> tuple[Optimization, ...]:
    """Return a stack with another number of micro-batches per step; None changes nothing.

    An accumulating stack keeps its schedule; others become horizontal and sum gradients in their storage dtype.

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
