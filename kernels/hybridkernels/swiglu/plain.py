"""silu(gate) * up in torch's own ops."""

from torch import Tensor

from hybridkernels.gated_plain import SILU, gated_backward_plain, gated_plain


def swiglu_plain(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, contiguous."""
    return gated_plain(SILU, gate, up)


def swiglu_backward_plain(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, both contiguous."""
    return gated_backward_plain(SILU, gate, up, grad)
