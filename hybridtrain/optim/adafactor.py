"""Adafactor (Shazeer and Stern, 1804.04235) without momentum, at the trainer's own learning rate.

The second moment of a matrix (R, C) is kept as its row and column means. fp32 arithmetic inside, in slices of rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import ClassVar

import torch
from torch import Tensor

from hybridkernels.int8_quantize import GROUP_SIZE
from hybridtrain.memory.formats import SLICE_ELEMENTS, parts
from hybridtrain.memory.slices import StateSlice, StateSpec, WeightSlice
from hybridtrain.optim.optimizer import Optimizer, Role, UpdateStep

_DECAY_POWER = -0.8
_SMALLEST_SQUARE = 1e-30
"""Epsilon added to squared gradients, as in the paper."""
_LARGEST_RMS = 1.0
"""RMS to which updates are clipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adafactor(Optimizer):
    """Factored second moment, two vectors per matrix, without a first: little state, on the device in fp32."""

    kind: ClassVar[str] = "adafactor"

    eps: float = 1e-8
    """Epsilon of jumps scaled by the second moment; the update itself adds 1e-30 to squared gradients."""

    def state(self, role: Role) -> tuple[StateSpec, ...]:
        """Return row and column means of a matrix, all of a vector."""
        if len(role.shape) >= 2:
            return StateSpec("row", shape=role.shape[:1]), StateSpec("column", shape=role.shape[1:])
        return (StateSpec("exp_avg_sq", shape=role.shape),)

    def needs_whole(self, role: Role) -> bool:  # noqa: ARG002
        """Return True: row and column means need whole matrices."""
        return True

    def update(self, weight: WeightSlice, grad: Tensor, state: Sequence[StateSlice], step: UpdateStep) -> None:
        """Update a whole parameter, row slice by row slice."""
        moments = [moment.stored[0] for moment in state]
        decay = 1.0 - float(step.number) ** _DECAY_POWER
        rows = grad.view(weight.shape[0], -1) if len(weight.shape) >= 2 else grad.view(1, -1)
        if len(weight.shape) >= 2:
            _track_means(rows, *moments, decay=decay)
        else:
            square_C = rows[0].to(torch.float32, copy=True).square_().add_(_SMALLEST_SQUARE)
            moments[0].view(-1).mul_(decay).add_(square_C, alpha=1 - decay)
        total = torch.zeros((), dtype=torch.float32, device=grad.device)
        for part in _parts(rows):
            total += _direction(rows, moments, part).square_().sum()
        scale = step.lr / (total / grad.numel()).sqrt_().div_(_LARGEST_RMS).clamp_(min=1.0)
        for part in _parts(rows):
            piece = weight.part(slice(part.start * rows.shape[1], part.stop * rows.shape[1]))
            piece.value.mul_(1.0 - step.lr * step.weight_decay)
            piece.value.view(-1, rows.shape[1]).sub_(_direction(rows, moments, part).mul_(scale))
            piece.write()

    def second_moment(self, state: Sequence[StateSlice], part: slice) -> Tensor:
        """Return the second moment of a range of elements, from row and column means."""
        if len(state) == 1:
            return state[0].stored[0].view(-1)[part].clone()
        row_R, column_C = (moment.stored[0] for moment in state)
        columns = column_C.numel()
        rows = slice(part.start // columns, -(-part.stop // columns))
        square_SC = (row_R[rows] / row_R.mean())[:, None] * column_C.view(-1)
        first = part.start - rows.start * columns
        return square_SC.view(-1)[first : first + part.stop - part.start]

    @property
    def second_moment_names(self) -> tuple[str, ...]:
        """The names of all its state."""
        return "row", "column", "exp_avg_sq"


def _track_means(rows_RC: Tensor, row_R: Tensor, column_C: Tensor, *, decay: float) -> None:
    columns_C = torch.zeros_like(column_C)
    row_R.mul_(decay)
    for part in _parts(rows_RC):
        square_SC = rows_RC[part].to(torch.float32, copy=True).square_().add_(_SMALLEST_SQUARE)
        row_R[part].add_(square_SC.mean(1), alpha=1 - decay)
        columns_C += square_SC.sum(0)
    column_C.mul_(decay).add_(columns_C, alpha=(1 - decay) / len(rows_RC))


def _direction(rows_RC: Tensor, moments: Sequence[Tensor], part: slice) -> Tensor:
    """Return gradient over root second moment, (S, C) float32, before clipping."""
    grad_SC = rows_RC[part].to(torch.float32, copy=True)
    if len(moments) == 1:
        return grad_SC.div_(moments[0].view(1, -1).sqrt())
    row_R, column_C = moments
    return grad_SC.div_((row_R[part] / row_R.mean()).sqrt_()[:, None]).div_(column_C.sqrt())


def _parts(rows_RC: Tensor) -> Iterator[slice]:
    """Return ranges of rows whose elements begin at multiples of a quantization group."""
    multiple = GROUP_SIZE // gcd(GROUP_SIZE, rows_RC.shape[1])
    height = max(1, SLICE_ELEMENTS // rows_RC.shape[1] // multiple) * multiple
    return parts(len(rows_RC), height)
