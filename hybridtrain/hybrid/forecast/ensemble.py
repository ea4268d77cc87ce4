"""An ensemble's weights as one flat vector, with its own Adam and its own random numbers.

Every weight has a leading dimension of members, so that the ensemble is one batched product, not a loop. E members,
B rows, I inputs, O outputs. Adam after Kingma and Ba (1412.6980), gradients scaled down to a global norm.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hybridtrain.hybrid.stateful import Stateful

BYTES_PER_WEIGHT = 32
"""Float32 weight, running mean, first and second moment, root of the second, and the gradient: in one, in parts, and
the part of one use that is being added. Measured as growth of the process: 103 MiB where this gives 107."""
_MEAN_UPDATES = 50
"""Time constant of the running mean of weights, in updates: forecasts take it, for batches are few and noisy."""
_BETAS = (0.9, 0.99)
_EPS = 1e-8
_MAX_NORM = 10.0
_WEIGHT_DECAY = 1.0


def linear(inputs_EBI: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the affine map ``name`` of every member: (E, B, O)."""
    return torch.baddbmm(weights[f"{name}.bias"], inputs_EBI, weights[f"{name}.weight"])


def gaussian_loss(mean: Tensor, log_variance: Tensor, target: Tensor) -> Tensor:
    """Return the negative log-likelihood without its constant, elementwise."""
    return 0.5 * (log_variance + (target - mean).square() * (-log_variance).exp())


def bounded(log_variance: Tensor) -> Tensor:
    """Return a log-variance within [-6, 4], smoothly."""
    return 5 * torch.tanh(log_variance / 5) - 1


def require_budget(kind: str, needed_bytes: int, budget_mib: float) -> None:
    """Refuse a forecaster that does not fit.

    Raises:
        ValueError: it needs more than the budget.
    """
    needed = needed_bytes / 2**20
    if needed > budget_mib:
        raise ValueError(
            f"budget_mib: {budget_mib} is too little for forecaster '{kind}'; at least {math.ceil(needed)} is allowed; "
            "raise the budget or take 'power_law', which needs next to nothing"
        )


class Ensemble(Stateful):
    """Weights, Adam and random numbers of several affine maps.

    Args:
        layers: Name to (inputs, outputs).
        zero: Names of maps that start at zero.
        num_members: E.
        seed: Of weights and of everything drawn from ``generator``.
        lr: Of Adam.
    """

    _state = ("_flat", "_mean", "_m", "_v", "num_updates", "generator")

    def __init__(
        self, layers: Mapping[str, tuple[int, int]], zero: Sequence[str], *, num_members: int, seed: int, lr: float
    ) -> None:
        self.num_members = num_members
        self.generator = torch.Generator().manual_seed(seed)
        self._lr = lr
        self._shapes: dict[str, tuple[int, int, int]] = {}
        for name, (num_inputs, num_outputs) in layers.items():
            self._shapes[f"{name}.weight"] = (num_members, num_inputs, num_outputs)
            self._shapes[f"{name}.bias"] = (num_members, 1, num_outputs)
        self._flat = torch.zeros(sum(math.prod(shape) for shape in self._shapes.values()))
        self._mean = torch.zeros_like(self._flat)
        self._m, self._v = torch.zeros_like(self._flat), torch.zeros_like(self._flat)
        self.num_updates = 0
        for name, weight in self.weights().items():
            if name.endswith(".weight") and name.removesuffix(".weight") not in zero:
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=self.generator)

    @staticmethod
    def num_bytes(layers: Mapping[str, tuple[int, int]], num_members: int) -> int:
        """Return the bytes of weights, gradients and moments."""
        return num_members * sum((inputs + 1) * outputs for inputs, outputs in layers.values()) * BYTES_PER_WEIGHT

    def weights(self) -> dict[str, Tensor]:
        """Return the weights in training by name: views."""
        return self._views(self._flat)

    def mean_weights(self) -> dict[str, Tensor]:
        """Return the running mean of the weights by name: views."""
        return self._views(self._mean)

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        parts = torch.split(flat, sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def update(self, loss_of: Callable[[dict[str, Tensor]], Tensor]) -> float:
        """Take one step of Adam down ``loss_of(weights)``; return the loss before it."""
        with torch.enable_grad():
            self._flat.requires_grad_(True)
            loss = loss_of(self.weights())
            (grad,) = torch.autograd.grad(loss, self._flat)
        self._flat.requires_grad_(False)
        norm = float(grad.norm())
        if not math.isfinite(norm):
            return math.nan
        if norm > _MAX_NORM:
            grad.mul_(_MAX_NORM / norm)
        self.num_updates += 1
        self._m.lerp_(grad, 1 - _BETAS[0])
        self._v.lerp_(grad.square_(), 1 - _BETAS[1])
        root = (self._v / (1 - _BETAS[1] ** self.num_updates)).sqrt_().add_(_EPS)
        self._flat.mul_(1 - self._lr * _WEIGHT_DECAY)
        self._flat.addcdiv_(self._m, root, value=-self._lr / (1 - _BETAS[0] ** self.num_updates))
        self._mean.lerp_(self._flat, max(1 / _MEAN_UPDATES, 1 / self.num_updates))
        return float(loss.detach())
