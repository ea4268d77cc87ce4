"""gelu(gate) * up , gelu by its tanh approximation, in torch's own ops."""

from torch import Tensor

from hybridkernels.gated_plain import GELU, gated_backward_plain, gated_plain


def geglu_plain(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up, contiguous."""
    return gated_plain(GELU, gate, up)


def geglu_backward_plain(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, both contiguous."""
    return gated_backward_plain(GELU, gate, up, grad)
