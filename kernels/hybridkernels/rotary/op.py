"""Rotary position embedding as an op: it saves only the shared tables; its gradient is the inverse rotation."""

from typing import Any

from torch import Tensor

from hybridkernels.define_op import define_op, empty_like
from hybridkernels.rotary.reference import rotary_reference

_rotary = define_op("rotary", rotary_reference, fake=lambda x_BTNH, *_: empty_like(x_BTNH)[0])


def _differentiate(ctx: Any, grad_BTNH: Tensor) -> tuple[Tensor, None, None, None]:
    cos_TR, sin_TR, positions_BT = ctx.saved_tensors
    return _rotary(grad_BTNH, cos_TR, -sin_TR, positions_BT), None, None, None


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG001  torch's signature
    ctx.save_for_backward(*inputs[1:])


_rotary.register_autograd(_differentiate, setup_context=_save)


def rotary(x_BTNH: Tensor, cos_TR: Tensor, sin_TR: Tensor, positions_BT: Tensor | None = None) -> Tensor:
    """Return x_BTNH, of any floating point dtype, rotated by the angles of its positions.

    Args:
        x_BTNH: As above.
        cos_TR: (T, R) float32, a row for each position, or (B, T, R) where rows have positions of their own; R is H/2,
            or less where only the first 2R columns turn.
        sin_TR: The same of the sines.
        positions_BT: int64 below T: the row of (T, R) tables that each token takes. None: its place in its row.

    Memory: saves the tables and the positions, which all blocks share.
    """
    turned_BTNH: Tensor = _rotary(x_BTNH, cos_TR, sin_TR, positions_BT)
    return turned_BTNH
