"""The slow average of the gradients and the move along it: every step (AdEMAMix) or as a predicted jump.

s = b3 s + (1 - b3) g, and a move of P predicted steps is lr P s / (sqrt(v / (1 - b2^t)) + eps). AdEMAMix (Pagliardini
et al., 2409.03137) makes P = alpha moves per step; a jump after K steps makes P = alpha K of them at once.

Where the second moment is gone when a jump is made, the average is one of gradients that were divided by it before:
s = b3 s + (1 - b3) g / (sqrt(v / (1 - b2^t)) + eps), and a move is lr P s. P elements of a slice.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridtrain.config.rules import broken, refuse
from hybridtrain.memory.slices import StateSlice, WeightSlice
from hybridtrain.optim.optimizer import Optimizer, UpdateStep

LARGEST_RATIO = 1.0
"""Of s / sqrt(vhat) in a jump: a predicted step moves no weight further than the learning rate. Where gradients stop,
as of tokens that are seldom seen, v fades much sooner than s and the quotient would grow without bound."""
_USUAL_SHARE, _BOUNDS, _SHORTEST_RUN = 0.1, (0.05, 0.2), 200
"""Steps that the average spans, as a share of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowMomentum:
    """The slow average and the weight of a move along it."""

    beta: float | None = None
    """Final decay b3; None: the one that averages over a tenth of the run, 1 / (1 - b3) = total_steps / 10."""
    alpha: float = 2.0
    """Predicted steps per true step, reached at the end of the ramp."""

    def __post_init__(self) -> None:
        rules = {
            f"beta: {self.beta} must be in (0, 1)": self.beta is None or 0 < self.beta < 1,
            f"alpha: {self.alpha} must be a finite number of at least 0": 0 <= self.alpha < math.inf,
        }
        refuse(broken(rules))

    def beta_at(self, step: int, total_steps: int, beta1: float) -> float:
        """Return the decay at ``step``: its half-life grows linearly from that of ``beta1``."""
        ramp = min(1.0, step / total_steps)
        final = _decay(_USUAL_SHARE * total_steps) if self.beta is None else self.beta
        if final <= beta1 or beta1 <= 0:
            return final
        lives = (1 - ramp) * _half_life(beta1) + ramp * _half_life(final)
        return min(final, math.pow(0.5, 1 / (lives + 1)))

    def within_bounds(self, total_steps: int) -> "SlowMomentum":
        """Return the same with an average over 5 to 20 % of a run: shorter and longer ones were measured to do harm.

        Runs of fewer than 200 steps are left alone: nothing was measured there.
        """
        if self.beta is None or total_steps < _SHORTEST_RUN:
            return self
        lowest, highest = (_decay(share * total_steps) for share in _BOUNDS)
        return replace(self, beta=min(max(self.beta, lowest), highest))

    def alpha_at(self, step: int, total_steps: int) -> float:
        """Return predicted steps per true step at ``step``."""
        return self.alpha * min(1.0, step / total_steps)


@dataclass(slots=True)
class MoveNorm:
    """Sums the squares of a move over all parameters, on the device or on the host, wherever a part is made."""

    on_device: Tensor
    """Scalar float64."""
    on_host: float = 0.0

    @classmethod
    def zero(cls, device: torch.device) -> "MoveNorm":
        """Return the norm of no move."""
        return cls(torch.zeros((), dtype=torch.float64, device=device))

    def add(self, moved_P: Tensor) -> None:
        """Count a part of the move."""
        square = torch.linalg.vector_norm(moved_P, dtype=torch.float64).square_()
        if moved_P.device == self.on_device.device:
            self.on_device.add_(square)
        else:
            self.on_host += float(square)

    def rms(self, on_device: float, num_elements: int) -> float:
        """Return the root mean square; ``on_device`` is what was read of that part.

        Nine digits of a float64 sum do not depend on its order, which differs with the place of weights and state:
        the next jump's length depends on the number.
        """
        return float(f"{math.sqrt((on_device + self.on_host) / num_elements):.9g}")


@dataclass(frozen=True, slots=True)
class SlowStep:
    """Updates the slow average in one step, as a ``StepHook``."""

    beta: float
    """Decay in force."""
    predicted_steps: float = 0.0
    """P of the move after the update; 0: none."""
    norm: MoveNorm | None = None
    """Where the size of a jump is counted; AdEMAMix counts none."""
    weight_norm: MoveNorm | None = None
    """Where the size of the weights is counted before the jump."""
    normalizes: bool = False
    """Average gradients over the root of their second moment; such an average moves weights by itself."""

    @property
    def moves_weights(self) -> bool:
        """Whether there is a move."""
        return bool(self.predicted_steps)

    def __call__(
        self, optimizer: Optimizer, weight: WeightSlice, grad_P: Tensor, state: Sequence[StateSlice],
        extra: Sequence[StateSlice], part: slice, step: UpdateStep,
    ) -> None:  # fmt: skip
        """Add the gradient to the slow average, and move along it."""
        if self.normalizes:
            assert not self.predicted_steps, "a jump that needs no second moment is made without it"
            second_P, correction = optimizer.second_moment(state, part), optimizer.correction(step.number)
            grad_P = _over_root(grad_P.float(), second_P, correction=correction, eps=optimizer.eps)
        slow_P = self.track(extra[0], grad_P)
        if self.predicted_steps:
            moved_P = move(
                slow_P, optimizer.second_moment(state, part), correction=optimizer.correction(step.number),
                eps=optimizer.eps, lr_steps=step.lr * self.predicted_steps, largest_ratio=self.largest_ratio,
            )  # fmt: skip
            self.count(weight.value, moved_P)
            weight.value.add_(moved_P)

    def track(self, average: StateSlice, grad_P: Tensor) -> Tensor:
        """Add a gradient to the stored average and return its new (P,) float32 values: for a jump as they are kept."""
        slow_P = average.load()
        slow_P.lerp_(grad_P.float(), 1 - self.beta)
        average.store(slow_P)
        return slow_P if self.norm is None else average.load()  # what takes a jump back reads these

    def count(self, value_P: Tensor, moved_P: Tensor) -> None:
        """Count a part of the weights, not yet moved, and of the move."""
        if self.norm is not None and self.weight_norm is not None:
            self.norm.add(moved_P)
            self.weight_norm.add(value_P)

    @property
    def largest_ratio(self) -> float:
        """Bound of s / sqrt(vhat) in force: a jump has one, AdEMAMix as published has none."""
        return math.inf if self.norm is None else LARGEST_RATIO


def _decay(steps: float) -> float:
    """Return the decay that averages over a number of steps, at least two."""
    return 1 - 1 / max(2.0, steps)


def _half_life(beta: float) -> float:
    return math.log(0.5) / math.log(beta) - 1


def move(
    slow_P: Tensor, second_P: Tensor | None, *, correction: float, eps: float, lr_steps: float, largest_ratio: float
) -> Tensor:
    """Return the (P,) float32 displacement of ``lr_steps`` = lr * predicted steps; 0 where nothing scales it.

    Args:
        slow_P: float32.
        second_P: Second moment, float32, not bias-corrected; None: ``slow_P`` averages what was divided by it already.
        correction: 1 - b2^t, the bias correction of the second moment.
        eps: Of AdamW.
        lr_steps: Learning rate times predicted steps.
        largest_ratio: Bound of s / sqrt(vhat) for each element.
    """
    if second_P is None:
        return slow_P.clamp(-largest_ratio, largest_ratio).mul_(-lr_steps)
    ratio_P = _over_root(slow_P, second_P, correction=correction, eps=eps)
    return ratio_P.clamp_(-largest_ratio, largest_ratio).mul_(-lr_steps)


def _over_root(value_P: Tensor, second_P: Tensor, *, correction: float, eps: float) -> Tensor:
    """Return values over the root of the second moment; 0 where that is 0."""
    denominator_P = (second_P / correction).sqrt_().add_(eps)
    denominator_P.masked_fill_(second_P == 0, math.inf)  # 8 bits rounded it to nothing: eps alone is no measure
    return torch.div(value_P, denominator_P, out=denominator_P)
