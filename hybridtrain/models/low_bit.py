"""Linear layers multiplied in 8 bits: int8 or float8, a scale for each row (torchao's row-wise scaling).

x (M, D), weight (F, D), grad (M, F). Of each product both factors are rounded along the dimension that is summed over,
to codes that live for that product; sums are exact (int8) or of float32. A weight that is stored as codes is not
rounded again: its rows' scales are those of the output, and in the backward pass factors of the gradient.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor, autograd

from hybridkernels.scaled_matmul import quantize_rows, scaled_matmul

Rows: TypeAlias = tuple[Tensor, Tensor]
"""Codes of a matrix, and the scale of each row, float32."""


def low_bit_product(a_MK: Tensor, b_NK: Tensor, kind: str) -> Tensor:
    """Return ``a @ b^T`` of 8-bit codes, (M, N) of a's dtype; each row of a and of b has a scale."""
    return scaled_matmul(*quantize_rows(a_MK, kind), *quantize_rows(b_NK, kind), a_MK.dtype)


def _times_codes(grad_MF: Tensor, rows: Rows, kind: str) -> Tensor:
    """Return ``grad @ weight``, (M, D), of a weight's stored codes."""
    codes_FD, scales_F = rows
    largest = scales_F.amax()  # factors of at most 1: no gradient leaves its dtype's range
    scaled_MF = grad_MF * torch.where(largest > 0, scales_F / largest, 0.0).to(grad_MF.dtype)
    columns_DF = codes_FD.t().contiguous()
    scales_D = largest.expand(columns_DF.shape[0]).contiguous()
    return scaled_matmul(*quantize_rows(scaled_MF, kind), columns_DF, scales_D, grad_MF.dtype)


class _LowBitLinear(autograd.Function):
    """Keeps what the plain layer keeps: codes are made again in the backward pass, along other dimensions."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_FD: Tensor, bias_F: Tensor | None, kind: str, rows: Rows | None,
        computes_output: bool,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x if weight_FD.requires_grad else None, weight_FD if rows is None else None)
        ctx.shape, ctx.kind, ctx.rows = x.shape, kind, rows
        if not computes_output:
            return x.new_empty(*x.shape[:-1], weight_FD.shape[0])
        x_MD = x.reshape(-1, x.shape[-1])
        weight_codes = quantize_rows(weight_FD, kind) if rows is None else rows
        out = scaled_matmul(*quantize_rows(x_MD, kind), *weight_codes, x.dtype)
        return (out if bias_F is None else out.add_(bias_F)).view(*x.shape[:-1], weight_FD.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_FD = ctx.saved_tensors
        grad_MF = grad.reshape(-1, grad.shape[-1])
        if ctx.rows is None:
            grad_x = low_bit_product(grad_MF, weight_FD.t(), ctx.kind)
        else:
            grad_x = _times_codes(grad_MF, ctx.rows, ctx.kind)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = low_bit_product(grad_MF.t(), x.reshape(-1, ctx.shape[-1]).t(), ctx.kind)
        grad_bias = grad_MF.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x.view(ctx.shape), grad_weight, grad_bias, None, None, None


def low_bit_linear(
    x: Tensor, weight_FD: Tensor, bias_F: Tensor | None, kind: str, rows: Rows | None = None, *, computes_output: bool
) -> Tensor:
    """Return ``x @ weight^T + bias`` in 8 bits; without ``computes_output`` values are undefined, gradients right.

    Args:
        x: (..., D), float32, bfloat16 or float16.
        weight_FD: Matrix of the same dtype.
        bias_F: Bias, or None.
        kind: ``int8`` or ``float8``, of all three products.
        rows: The matrix as codes of that format, which are multiplied as they are; its own values are not read. They
            must be the same in the backward pass. None: it is rounded at each use.
        computes_output: Whether values are needed.
    """
    out: Tensor = _LowBitLinear.apply(x, weight_FD, bias_F, kind, rows, computes_output)  # type: ignore[no-untyped-call]
    return out
