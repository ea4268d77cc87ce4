"""Data classes of one optimizer step: settings, limits, share of micro-batches, result."""

from dataclasses import dataclass

from torch import Tensor

from hybridtrain.optim.optimizer import StepHook


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one optimizer step."""

    step: int
    """Counted from 1."""
    loss: float
    """Nats per token, mean over the step's micro-batches; NaN in a dry run."""
    lr: float
    grad_norm: float | None
    """Global L2 norm before clipping; None when clipping is off."""
    num_tokens: int
    """Tokens of the step, without padding."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of loss and gradient norm; a guarded step beyond them is rejected before its update."""

    loss: float
    grad_norm: float


@dataclass(frozen=True, slots=True)
class StepShare:
    """This rank's share of a step's micro-batches."""

    first: int
    """Number of its first micro-batch, which keys random numbers."""
    num_targets: tuple[int, ...]
    """Targets of each micro-batch of the step, other ranks' included."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings of one optimizer step."""

    number: int
    """Counted from 1."""
    lr: float
    seed: int
    """Key of stochastic rounding."""
    factor: Tensor | None
    """Factor of the gradients, a device scalar; None: 1."""
    hook: StepHook | None = None
    """Work on every slice right after its update."""
