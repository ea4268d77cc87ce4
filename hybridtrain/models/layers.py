"""The few layers both families share. B batch, T sequence, D width, V vocabulary, R half a head dim."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridkernels.layer_norm import layer_norm
from hybridkernels.rms_norm import rms_norm


class Linear(nn.Module):
    """``x @ weight^T + bias`` with uninitialised parameters; torch's own layer initialises, minutes at 7B."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype)) if bias else None

    def forward(self, x: Tensor, *, computes_output: bool = True) -> Tensor:
        """Return (..., out_features); without ``computes_output`` undefined values, but the right gradients."""
        if computes_output:
            return functional.linear(x, self.weight, self.bias)
        out: Tensor = _OutputlessLinear.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


def add_linear(residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
    """Return ``residual + linear(x)`` in one call: the sum is the matmul's own, nothing passes memory twice."""
    assert linear.bias is None, "the matmul adds one term only"
    flat = torch.addmm(residual.flatten(0, -2), x.flatten(0, -2), linear.weight.t())
    return flat.view(residual.shape)


class _OutputlessLinear(torch.autograd.Function):
    """A linear layer that is recomputed for its gradients alone: they need its input, never its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_2d = grad.reshape(-1, weight.shape[0])
        grad_bias = grad_2d.sum(0) if ctx.has_bias else None
        return grad_2d.mm(weight).view(x.shape), grad_2d.t().mm(x.reshape(-1, weight.shape[1])), grad_bias


class LayerNorm(nn.Module):
    """Layer normalisation with fp32 statistics."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalised over its last dimension."""
        return layer_norm(x, self.weight, self.bias, self.eps)


class RmsNorm(nn.Module):
    """Root-mean-square normalisation with fp32 statistics."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalised over its last dimension."""
        return rms_norm(x, self.weight, self.eps)


class RotaryTable(nn.Module):
    """Cosine and sine of every position's angles, (max_seq_len, R) float32, shared by all blocks."""

    cos_TR: Tensor
    sin_TR: Tensor

    def __init__(self, max_seq_len: int, head_dim: int, theta: float) -> None:
        super().__init__()
        frequencies_R = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles_TR = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), frequencies_R)
        self.register_buffer("cos_TR", angles_TR.cos(), persistent=False)
        self.register_buffer("sin_TR", angles_TR.sin(), persistent=False)


def dropout(x: Tensor, probability: float, *, training: bool) -> Tensor:
    """Return x with elements dropped; one byte of mask per element on every device, nothing at probability 0."""
    if not training or probability == 0:
        return x
    dropped, _mask = torch.native_dropout(x, probability, train=True)
    return dropped
