"""The slow average of gradients and the weight change along it: every step (AdEMAMix) or as a predicted jump.

s = b3 s + (1 - b3) g, and a move of P predicted steps is lr P s / (sqrt(v / (1 - b2^t)) + eps). AdEMAMix (Pagliardini
et al., 2409.03137) makes P = alpha moves per step; a jump after K steps makes P = alpha K of them at once.

If the second moment is dropped before a jump, the average is of gradients already divided by it:
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
"""Limit on s / sqrt(vhat) in a jump: no weight moves further per predicted step than the learning rate. Without it the
ratio of rarely seen tokens grows without bound, as v decays sooner than s."""
_USUAL_SHARE, _BOUNDS, _SHORTEST_RUN = 0.1, (0.05, 0.2), 200
"""Span of the average as a fraction of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowMomentum:
    """Settings of the slow average: its decay, and the length of a move along it."""

    beta: float | None = None
    """Final decay b3; None: averages over a tenth of the run, 1 / (1 - b3) = total_steps / 10."""
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
        """Return settings limited to an average over 5 to 20 % of the run: others were measured to do harm.

        Runs below 200 steps, which were not measured, are unchanged.
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
    """Sums the squares of a weight change over all parameters, on device and host."""

    on_device: Tensor
    """Scalar float64."""
    on_host: float = 0.0

    @classmethod
    def zero(cls, device: torch.device) -> "MoveNorm":
        """Return a zero norm."""
        return cls(torch.zeros((), dtype=torch.float64, device=device))

    def add(self, moved_P: Tensor) -> None:
        """Add a part of the change."""
        square = torch.linalg.vector_norm(moved_P, dtype=torch.float64).square_()
        if moved_P.device == self.on_device.device:
            self.on_device.add_(square)
        else:
            self.on_host += float(square)

    def rms(self, on_device: float, num_elements: int) -> float:
        """Return the RMS; ``on_device`` is the device's sum.

        It is rounded to nine digits, so that it does not depend on the order of summation: the next jump's length does
        depend on it.
        """
        return float(f"{math.sqrt((on_device + self.on_host) / num_elements):.9g}")


@dataclass(frozen=True, slots=True)
class SlowStep:
    """Updates the slow average in one step, as a ``StepHook``."""

    beta: float
    """Present decay."""
    predicted_steps: float = 0.0
    """Predicted steps P of the move after the update; 0: no move."""
    norm: MoveNorm | None = None
    """Accumulates the RMS of the jump; AdEMAMix has none."""
    weight_norm: MoveNorm | None = None
    """Accumulates the RMS of the weights before the jump."""
    normalizes: bool = False
    """Whether gradients are divided by the root of their second moment before averaging."""

    @property
    def moves_weights(self) -> bool:
        """Whether weights are moved."""
        return bool(self.predicted_steps)

    def __call__(
        self, optimizer: Optimizer, weight: WeightSlice, grad_P: Tensor, state: Sequence[StateSlice],
        extra: Sequence[StateSlice], part: slice, step: UpdateStep,
    ) -> None:  # fmt: skip
        """Add the gradient to the slow average, and move along it."""
        if self.normalizes:
            assert not self.predicted_steps, "a second moment for a jump that needs none"
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
        """Add a gradient to the stored average; return its new (P,) float32 values, for a jump the stored ones."""
        slow_P = average.load()
        slow_P.lerp_(grad_P.float(), 1 - self.beta)
        average.store(slow_P)
        return slow_P if self.norm is None else average.load()  # what takes a jump back reads these

    def count(self, value_P: Tensor, moved_P: Tensor) -> None:
        """Add a part of the weights (before the move) and of the move to the norms."""
        if self.norm is not None and self.weight_norm is not None:
            self.norm.add(moved_P)
            self.weight_norm.add(value_P)

    @property
    def largest_ratio(self) -> float:
        """Limit on s / sqrt(vhat); AdEMAMix as published has none."""
        return math.inf if self.norm is None else LARGEST_RATIO


def _decay(steps: float) -> float:
    """Return the decay that averages over a number of steps, at least two."""
    return 1 - 1 / max(2.0, steps)


def _half_life(beta: float) -> float:
    return math.log(0.5) / math.log(beta) - 1


def move(
    slow_P: Tensor, second_P: Tensor | None, *, correction: float, eps: float, lr_steps: float, largest_ratio: float
) -> Tensor:
    """Return the (P,) float32 displacement of ``lr_steps`` = lr * predicted steps; 0 where the second moment is 0.

    Args:
        slow_P: float32.
        second_P: Second moment, float32, not bias-corrected; None: ``slow_P`` averages already divided gradients.
        correction: 1 - b2^t, the bias correction of the second moment.
        eps: AdamW's epsilon.
        lr_steps: Learning rate times predicted steps.
        largest_ratio: Limit on s / sqrt(vhat) of each element.
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
