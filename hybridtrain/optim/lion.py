"""Lion (Chen et al., 2302.06675): the sign of an interpolated momentum; one state tensor. P elements of a slice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hybridtrain.memory.slices import StateSlice, StateSpec, WeightSlice
from hybridtrain.optim.optimizer import Optimizer, Role, UpdateStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Lion(Optimizer):
    """c = b1 m + (1 - b1) g;  w = w (1 - lr d) - lr sign(c);  m = b2 m + (1 - b2) g. 4 bytes per parameter in fp32."""

    kind: ClassVar[str] = "lion"

    lr: float = 1e-4
    """Peak learning rate: a third to a tenth of AdamW's, with a weight decay larger by the same factor."""
    beta1: float = 0.9
    """Weight of the momentum in a step's direction."""
    beta2: float = 0.99
    """Decay of the momentum."""
    weight_decay: float = 1.0
    """Decoupled; applied to matrices only, not to norms and biases."""

    def state(self, role: Role) -> tuple[StateSpec, ...]:  # noqa: ARG002  the same for all
        """Return the momentum."""
        return (StateSpec("exp_avg"),)

    def update(self, weight: WeightSlice, grad: Tensor, state: Sequence[StateSlice], step: UpdateStep) -> None:
        """Update a slice."""
        (momentum,) = state
        value_P, momentum_P, grad_P = weight.value, momentum.load(), grad.float()
        direction_P = momentum_P.lerp(grad_P, 1 - self.beta1).sign_()
        value_P.mul_(1 - step.lr * step.weight_decay).add_(direction_P, alpha=-step.lr)
        momentum.store(momentum_P.lerp_(grad_P, 1 - self.beta2))
