"""Rotary position embedding as an op: it saves nothing but the shared tables, its gradient turns the other way."""

from typing import Any

import torch
from torch import Tensor

from hybridkernels.rotary.reference import rotary_reference


@torch.library.custom_op("hybridkernels::rotary", mutates_args=())
def _rotary(x_BTNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    return rotary_reference(x_BTNH, cos_TR, sin_TR)


@_rotary.register_fake
def _rotary_fake(x_BTNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:  # noqa: ARG001
    return x_BTNH.new_empty(x_BTNH.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[1:])


def _differentiate(ctx: Any, grad_BTNH: Tensor) -> tuple[Tensor, None, None]:
    cos_TR, sin_TR = ctx.saved_tensors
    return _rotary(grad_BTNH, cos_TR, -sin_TR), None, None


_rotary.register_autograd(_differentiate, setup_context=_save)


def rotary(x_BTNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Return x_BTNH turned by the angles of the first T positions; tables are (T, H/2) float32."""
    turned_BTNH: Tensor = _rotary(x_BTNH, cos_TR, sin_TR)
    return turned_BTNH
