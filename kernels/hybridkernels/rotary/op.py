"""Rotary position embedding as an op: it saves nothing but the shared tables, its gradient turns the other way."""

from typing import Any

import torch
from torch import Tensor

from hybridkernels.rotary.reference import rotary_reference


@torch.library.custom_op("hybridkernels::rotary", mutates_args=())
def _rotary(x_BTNH: Tensor, cos_TR: Tensor, sin_TR: Tensor, positions_BT: Tensor | None = None) -> Tensor:
    return rotary_reference(x_BTNH, cos_TR, sin_TR, positions_BT)


@_rotary.register_fake
def _rotary_fake(
    x_BTNH: Tensor,
    cos_TR: Tensor,  # noqa: ARG001  an op's fake has the op's signature
    sin_TR: Tensor,  # noqa: ARG001
    positions_BT: Tensor | None = None,  # noqa: ARG001
) -> Tensor:
    return x_BTNH.new_empty(x_BTNH.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[1:])


def _differentiate(ctx: Any, grad_BTNH: Tensor) -> tuple[Tensor, None, None, None]:
    cos_TR, sin_TR, positions_BT = ctx.saved_tensors
    return _rotary(grad_BTNH, cos_TR, -sin_TR, positions_BT), None, None, None


_rotary.register_autograd(_differentiate, setup_context=_save)


def rotary(x_BTNH: Tensor, cos_TR: Tensor, sin_TR: Tensor, positions_BT: Tensor | None = None) -> Tensor:
    """Return x_BTNH turned by the angles of its positions.

    Args:
        x_BTNH: Any floating point dtype.
        cos_TR: (T, R) float32, a row for each position, or (B, T, R) where rows have positions of their own; R is H/2,
            or less where only the first 2R columns turn.
        sin_TR: The same of the sines.
        positions_BT: int64 below T: the row of (T, R) tables that each token takes. None: its place in its row.

    Memory: saves the tables and the positions, which all blocks share.
    """
    turned_BTNH: Tensor = _rotary(x_BTNH, cos_TR, sin_TR, positions_BT)
    return turned_BTNH
