"""Layer normalisation as an op whose saved statistics are fp32 on every device.

torch's own op keeps them in bfloat16 on the CPU and in fp32 on CUDA; one definition makes a CPU run hold the bytes
that a card would.
"""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("hybridkernels::layer_norm", mutates_args=())
def _layer_norm(x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    out, mean, rstd = torch.native_layer_norm(x, weight_D.shape, weight_D, bias_D, eps)
    return out, mean.float(), rstd.float()


@_layer_norm.register_fake
def _layer_norm_fake(x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    statistics = (*x.shape[:-1], 1)
    return (
        x.new_empty(x.shape),
        x.new_empty(statistics, dtype=torch.float32),
        x.new_empty(statistics, dtype=torch.float32),
    )


@torch.library.custom_op("hybridkernels::layer_norm_backward", mutates_args=())
def _layer_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight_D: Tensor, bias_D: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if x.device.type == "cpu":  # the CPU kernel wants its statistics in the dtype it wrote them
        mean, rstd = mean.to(x.dtype), rstd.to(x.dtype)
    dx, dweight_D, dbias_D = torch.ops.aten.native_layer_norm_backward(
        grad.contiguous(), x, weight_D.shape, mean, rstd, weight_D, bias_D, [True, True, True]
    )
    return dx, dweight_D, dbias_D


@_layer_norm_backward.register_fake
def _layer_norm_backward_fake(
    grad: Tensor,  # noqa: ARG001  an op's fake has the op's signature
    x: Tensor,
    mean: Tensor,  # noqa: ARG001
    rstd: Tensor,  # noqa: ARG001
    weight_D: Tensor,
    bias_D: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight_D.new_empty(weight_D.shape), bias_D.new_empty(bias_D.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight_D, bias_D, _eps = inputs
    _out, mean, rstd = output
    ctx.save_for_backward(x, mean, rstd, weight_D, bias_D)


def _differentiate(ctx: Any, grad: Tensor, *_statistics: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
    return *_layer_norm_backward(grad, *ctx.saved_tensors), None


_layer_norm.register_autograd(_differentiate, setup_context=_save)


def layer_norm(x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """Return x normalised over its last dimension, dtype of ``x``; saves ``x`` and 8 bytes a row."""
    out: Tensor = _layer_norm(x, weight_D, bias_D, eps)[0]
    return out
