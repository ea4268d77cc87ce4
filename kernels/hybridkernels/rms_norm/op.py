"""Root-mean-square normalisation as an op that saves one fp32 number per row."""

from typing import Any

import torch
from torch import Tensor

from hybridkernels.define_op import define_op, empty_like

_ATEN = torch.ops.aten


def _plain(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x_fp32 = x.contiguous().float()
    rstd = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)
    return (x_fp32 * rstd * weight_D).to(x.dtype), rstd


def _cuda(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x_work = x.contiguous().to(weight_D.dtype)  # torch's kernel takes one type
    out, rstd = _ATEN._fused_rms_norm(x_work, list(weight_D.shape), weight_D, eps)
    return out.to(x.dtype), rstd


def _fake(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _backward_plain(grad: Tensor, x: Tensor, rstd: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
    grad_fp32 = grad.contiguous().float()
    normed = x.contiguous().float() * rstd
    dweight_D = (grad_fp32 * normed).flatten(0, -2).sum(0)
    return _dx(grad_fp32, normed, rstd, weight_D).to(x.dtype), dweight_D.to(weight_D.dtype)


def _backward_cuda(grad: Tensor, x: Tensor, rstd: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
    grad_work, x_work = (tensor.contiguous().to(weight_D.dtype) for tensor in (grad, x))
    shape = list(weight_D.shape)
    dx, dweight_D = _ATEN._fused_rms_norm_backward(grad_work, x_work, shape, rstd, weight_D, [True, True])
    return dx.to(x.dtype), dweight_D


def _input_grad_plain(grad: Tensor, x: Tensor, rstd: Tensor, weight_D: Tensor) -> Tensor:
    normed = x.contiguous().float() * rstd
    return _dx(grad.contiguous().float(), normed, rstd, weight_D).to(x.dtype)


def _input_grad_cuda(grad: Tensor, x: Tensor, rstd: Tensor, weight_D: Tensor) -> Tensor:
    if weight_D.dtype != x.dtype:
        return _input_grad_plain(grad, x, rstd, weight_D)
    grad, x, shape = grad.contiguous(), x.contiguous(), list(weight_D.shape)
    dx: Tensor = _ATEN._fused_rms_norm_backward(grad, x, shape, rstd, weight_D, [True, False])[0]
    return dx


def _dx(grad_fp32: Tensor, normed: Tensor, rstd: Tensor, weight_D: Tensor) -> Tensor:
    dnormed = grad_fp32 * weight_D
    return (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True)) * rstd


_rms_norm = define_op("rms_norm", _plain, cuda=_cuda, fake=_fake)
_rms_norm_backward = define_op(
    "rms_norm_backward", _backward_plain, cuda=_backward_cuda,
    fake=lambda _grad, x, _rstd, weight_D: empty_like(x, weight_D),
)  # fmt: skip
_input_grad = define_op(
    "rms_norm_input_grad", _input_grad_plain, cuda=_input_grad_cuda, fake=lambda _grad, x, *_: empty_like(x)[0]
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight_D, _eps = inputs
    ctx.save_for_backward(x, output[1], weight_D)


def _differentiate(ctx: Any, grad: Tensor, _rstd: Tensor | None) -> tuple[Tensor | None, ...]:
    if not ctx.needs_input_grad[1]:
        return _input_grad(grad, *ctx.saved_tensors), None, None
    return *_rms_norm_backward(grad, *ctx.saved_tensors), None


_rms_norm.register_autograd(_differentiate, setup_context=_save)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return x normalised over its last dimension, dtype of ``x``; saves ``x`` and 4 bytes per row.

    The weight may be float32 where ``x`` is not; on CUDA these are torch's own ops with fp32 scratch. One that needs no
    gradient has none computed, nor memory for it.
    """
    out: Tensor = _rms_norm(x, weight_D, eps)[0]
    return out
