"""What one optimizer step does to every parameter."""

from dataclasses import dataclass

from torch import Tensor

from hybridtrain.optim.optimizer import StepHook


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings of one optimizer step."""

    number: int
    """Counted from 1."""
    lr: float
    seed: int
    """Keys stochastic rounding."""
    factor: Tensor | None
    """Of the gradients, a scalar of the device; None: 1."""
    hook: StepHook | None = None
    """What is done to every slice right after its update."""
