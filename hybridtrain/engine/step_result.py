"""What an optimizer step did, and what a guarded one may do."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    step: int
    """Counted from 1."""
    loss: float
    """Nats per token, mean over the step's micro-batches; NaN in a dry run."""
    lr: float
    grad_norm: float | None
    """Global L2 norm before clipping; None when clipping is off."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Values beyond which a guarded step is refused before it is applied."""

    loss: float
    grad_norm: float
