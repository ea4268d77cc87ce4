"""The one linear layer: all matrices of blocks use it, with or without an adapter."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridtrain.models.low_bit import low_bit_linear
from hybridtrain.models.ternary import ternary_linear
from hybridtrain.models.widening import widened, widening_of
from hybridtrain.plan.memory_plan import LinearKind


class Linear(nn.Module):
    """``x @ weight^T + bias`` with uninitialised parameters; torch's own layer initialises them, minutes at 7B."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype)) if bias else None
        self.adapter: nn.Module | None = None
        """The adapter of this layer (``models.adapter``)."""
        self.kind = LinearKind.FULL
        """Its arithmetic."""

    def forward(self, x: Tensor, *, computes_output: bool = True) -> Tensor:
        """Return (..., out_features); without ``computes_output`` values are undefined, but gradients are right."""
        if self.adapter is not None:
            return self.adapter(x, self, computes_output=computes_output)  # type: ignore[no-any-return]
        return self.multiply(x, computes_output=computes_output)

    def multiply(self, x: Tensor, *, computes_output: bool = True) -> Tensor:
        """Return ``forward`` without the adapter."""
        widen = widening_of(self.weight)
        if self.kind is LinearKind.INT8 and widen is not None and widen.row_codes is not None:
            return low_bit_linear(x, self.weight, self.bias, "int8", widen.row_codes, computes_output=computes_output)
        with widened(self.weight, is_read=self.kind is LinearKind.TERNARY or computes_output) as weight:
            if self.kind is LinearKind.TERNARY:
                return ternary_linear(x, weight, self.bias, computes_output=computes_output)
            if self.kind is LinearKind.FULL:
                return outputless_linear(x, weight, self.bias, computes_output=computes_output)
            return low_bit_linear(x, weight, self.bias, self.kind.value, computes_output=computes_output)


def outputless_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, computes_output: bool) -> Tensor:
    """Return ``x @ weight^T + bias``; without ``computes_output`` values are undefined, but gradients are right."""
    if computes_output:
        return functional.linear(x, weight, bias)
    out: Tensor = _OutputlessLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


def add_linear(residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
    """Return ``residual + linear(x)`` in one matmul, which avoids a pass over memory."""
    if linear.adapter is not None or linear.kind is not LinearKind.FULL:
        return residual + linear(x)  # type: ignore[no-any-return]
    assert linear.bias is None, "a bias beside the residual"
    with widened(linear.weight) as weight:
        flat = torch.addmm(residual.flatten(0, -2), x.flatten(0, -2), weight.t())
    return flat.view(residual.shape)


class _OutputlessLinear(torch.autograd.Function):
    """A linear layer that is recomputed for its gradients alone: they need its input, never its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, _bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.shape = x.shape
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_2d = grad.reshape(-1, weight.shape[0])
        grad_bias = grad_2d.sum(0) if ctx.needs_input_grad[2] else None
        grad_x = grad_2d.mm(weight).view(ctx.shape)
        grad_weight = grad_2d.t().mm(x.reshape(-1, weight.shape[1])) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad_bias


def dropout(x: Tensor, probability: float, *, training: bool) -> Tensor:
    """Return x with dropout: a mask of one byte per element on every device; x itself at probability 0."""
    if not training or probability == 0:
        return x
    dropped, _mask = torch.native_dropout(x, probability, train=True)
    return dropped
