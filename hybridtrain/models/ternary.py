"""Linear layers with ternary weights: BitNet b1.58 (2402.17764, 2410.16144).

x (..., D), weight (F, D). Both are rounded, with straight-through gradients.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_EPS = 1e-5
"""Smallest divisor, as in Microsoft's training recipe."""
_LARGEST = 127.0


def ternary_weight(weight_FD: Tensor) -> Tensor:
    """Return gamma * round(weight / gamma) with values -gamma, 0 and gamma; gamma is the mean magnitude."""
    gamma = weight_FD.abs().mean().clamp(min=_EPS)
    return weight_FD.div(gamma).round_().clamp_(-1, 1).mul_(gamma)


def int8_activation(x: Tensor) -> Tensor:
    """Quantize x to 255 even steps over each token's largest magnitude."""
    steps = _LARGEST / x.abs().amax(-1, keepdim=True).clamp(min=_EPS)
    return x.mul(steps).round_().clamp_(-_LARGEST - 1, _LARGEST).div_(steps)


class _TernaryLinear(torch.autograd.Function):
    """Keeps what the plain layer keeps: both roundings are done again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_FD: Tensor, bias_F: Tensor | None, computes_output: bool) -> Tensor:
        ctx.save_for_backward(x, weight_FD)
        if not computes_output:
            return x.new_empty(*x.shape[:-1], weight_FD.shape[0])
        return functional.linear(int8_activation(x), ternary_weight(weight_FD), bias_F)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight_FD = ctx.saved_tensors
        grad_2d = grad.reshape(-1, weight_FD.shape[0])
        grad_x = grad_2d.mm(ternary_weight(weight_FD)).view(x.shape)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = grad_2d.t().mm(int8_activation(x).reshape(-1, weight_FD.shape[1]))
        return grad_x, grad_weight, grad_2d.sum(0) if ctx.needs_input_grad[2] else None, None


def ternary_linear(x: Tensor, weight_FD: Tensor, bias_F: Tensor | None, *, computes_output: bool) -> Tensor:
    """Return int8(x) @ ternary(weight)^T + bias; without ``computes_output`` values are undefined, gradients right."""
    out: Tensor = _TernaryLinear.apply(x, weight_FD, bias_F, computes_output)  # type: ignore[no-untyped-call]
    return out
