"""Linear layers multiplied in 8 bits: int8 or float8, a scale for each row (torchao's row-wise scaling).

x (M, D), weight (F, D), grad (M, F). Of each product both factors are rounded along the dimension that is summed over,
to codes that live for that product; sums are exact (int8) or of float32.
"""

from typing import Any

from torch import Tensor, autograd

from hybridkernels.scaled_matmul import quantize_rows, scaled_matmul


def low_bit_product(a_MK: Tensor, b_NK: Tensor, kind: str) -> Tensor:
    """Return ``a @ b^T`` of 8-bit codes, (M, N) of a's dtype; each row of a and of b has a scale."""
    return scaled_matmul(*quantize_rows(a_MK, kind), *quantize_rows(b_NK, kind), a_MK.dtype)


class _LowBitLinear(autograd.Function):
    """Keeps what the plain layer keeps: codes are made again in the backward pass, along other dimensions."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_FD: Tensor, bias_F: Tensor | None, kind: str, computes_output: bool
    ) -> Tensor:
        ctx.save_for_backward(x if weight_FD.requires_grad else None, weight_FD)
        ctx.shape, ctx.kind = x.shape, kind
        if not computes_output:
            return x.new_empty(*x.shape[:-1], weight_FD.shape[0])
        out = low_bit_product(x.reshape(-1, x.shape[-1]), weight_FD, kind)
        return (out if bias_F is None else out.add_(bias_F)).view(*x.shape[:-1], weight_FD.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        x, weight_FD = ctx.saved_tensors
        grad_MF = grad.reshape(-1, weight_FD.shape[0])
        grad_x = low_bit_product(grad_MF, weight_FD.t(), ctx.kind).view(ctx.shape)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = low_bit_product(grad_MF.t(), x.reshape(-1, weight_FD.shape[1]).t(), ctx.kind)
        return grad_x, grad_weight, grad_MF.sum(0) if ctx.needs_input_grad[2] else None, None, None


def low_bit_linear(x: Tensor, weight_FD: Tensor, bias_F: Tensor | None, *, kind: str, computes_output: bool) -> Tensor:
    """Return ``x @ weight^T + bias`` in 8 bits; without ``computes_output`` values are undefined, gradients right.

    Args:
        x: (..., D), float32, bfloat16 or float16.
        weight_FD: Matrix of the same dtype.
        bias_F: Bias, or None.
        kind: ``int8`` or ``float8``, of all three products.
        computes_output: Whether values are needed.
    """
    out: Tensor = _LowBitLinear.apply(x, weight_FD, bias_F, kind, computes_output)  # type: ignore[no-untyped-call]
    return out
