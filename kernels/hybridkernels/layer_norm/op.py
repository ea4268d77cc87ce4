"""Layer normalisation as an op whose saved statistics are fp32 on every device.

torch's own op keeps them in bfloat16 on the CPU and in fp32 on CUDA; one definition makes a CPU run hold the bytes
that a card would.
"""

from typing import Any

import torch
from torch import Tensor

from hybridkernels.define_op import define_op, empty_like


def _forward(x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    if x.device.type == "cpu":  # fp32 parameters make torch's CPU kernel keep fp32 statistics
        weight_D, bias_D = weight_D.float(), bias_D.float()
    return torch.native_layer_norm(x.contiguous(), weight_D.shape, weight_D, bias_D, eps)


def _fake(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    statistics = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return *empty_like(x, statistics), statistics


def _backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight_D: Tensor, bias_D: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight_D, dbias_D = _grads(grad, x, mean, rstd, weight_D, bias_D, wants_parameters=True)
    return dx, dweight_D, dbias_D


def _backward_of_input(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight_D: Tensor, bias_D: Tensor) -> Tensor:
    return _grads(grad, x, mean, rstd, weight_D, bias_D, wants_parameters=False)[0]


def _grads(grad: Tensor, x: Tensor, *others: Tensor, wants_parameters: bool) -> list[Tensor]:
    """Return the gradients of x and, where they are wanted, of weight and bias."""
    mean, rstd, weight_D, bias_D = others
    dtypes = (x.dtype, weight_D.dtype, bias_D.dtype)
    if x.device.type == "cpu":  # torch's CPU kernel sums 16-bit parameter gradients in 16 bits, its CUDA kernel in fp32
        grad, x, weight_D, bias_D = (tensor.float() for tensor in (grad, x, weight_D, bias_D))
    wanted = [True, wants_parameters, wants_parameters]
    grads = torch.ops.aten.native_layer_norm_backward(
        grad.contiguous(), x.contiguous(), weight_D.shape, mean, rstd, weight_D, bias_D, wanted
    )
    return [grad.to(dtype) for grad, dtype, is_wanted in zip(grads, dtypes, wanted, strict=True) if is_wanted]


_layer_norm = define_op("layer_norm", _forward, fake=_fake)
_layer_norm_backward = define_op(
    "layer_norm_backward", _backward, fake=lambda _grad, x, _mean, _rstd, *parameters: empty_like(x, *parameters)
)
_input_grad = define_op("layer_norm_input_grad", _backward_of_input, fake=lambda _grad, x, *_: empty_like(x)[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight_D, bias_D, _eps = inputs
    ctx.save_for_backward(x, *output[1:], weight_D, bias_D)


def _differentiate(ctx: Any, grad: Tensor, *_statistics: Tensor | None) -> tuple[Tensor | None, ...]:
    if not any(ctx.needs_input_grad[1:3]):
        return _input_grad(grad, *ctx.saved_tensors), None, None, None
    return *_layer_norm_backward(grad, *ctx.saved_tensors), None


_layer_norm.register_autograd(_differentiate, setup_context=_save)


def layer_norm(x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """Return x normalised over its last dimension, dtype of ``x``; saves ``x`` and 8 bytes per row.

    Parameters neither of which needs a gradient have none computed, nor memory for it.
    """
    out: Tensor = _layer_norm(x, weight_D, bias_D, eps)[0]
    return out
