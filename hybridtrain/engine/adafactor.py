"""Adafactor (Shazeer and Stern, 1804.04235) without momentum, at the trainer's own learning rate.

The second moment of a matrix (R, C) is kept as its row and column means. fp32 arithmetic inside, in slices of rows.
"""

from collections.abc import Iterator, Sequence
from math import gcd

import torch
from torch import Tensor

from hybridkernels.int8_quantize import GROUP_SIZE
from hybridtrain.engine.adamw import AdamWStep
from hybridtrain.memory.master_codec import MasterCodec, StoredWeight, weight_part

_DECAY_POWER = -0.8
_SMALLEST_SQUARE = 1e-30
"""Added to squared gradients, as in the paper."""
_LARGEST_RMS = 1.0
"""Updates are scaled down to this root mean square."""
_SLICE_ELEMENTS = 1 << 23


def update_factored(
    weight: StoredWeight,
    companion: Tensor | None,
    grad: Tensor,
    moments: Sequence[Tensor],
    codec: MasterCodec,
    step: AdamWStep,
) -> None:
    """Apply one update to a whole parameter: ``grad`` has its shape, ``weight`` and ``companion`` any."""
    decay = 1.0 - float(step.number) ** _DECAY_POWER
    rows = grad.view(grad.shape[0], -1) if grad.dim() >= 2 else grad.view(1, -1)
    if len(moments) == 2:
        _track_means(rows, *moments, decay=decay)
    else:
        square_C = rows[0].to(torch.float32, copy=True).square_().add_(_SMALLEST_SQUARE)
        moments[0].view(-1).mul_(decay).add_(square_C, alpha=1 - decay)
    total = torch.zeros((), dtype=torch.float32, device=grad.device)
    for part in _parts(rows):
        total += _direction(rows, moments, part).square_().sum()
    scale = step.lr / (total / grad.numel()).sqrt_().div_(_LARGEST_RMS).clamp_(min=1.0)
    for part in _parts(rows):
        flat = slice(part.start * rows.shape[1], part.stop * rows.shape[1])
        piece = weight_part(weight, flat)
        companion_P = None if companion is None else companion.view(-1)[flat]
        value_P = codec.load(piece, companion_P)
        value_P.mul_(1.0 - step.lr * step.weight_decay)
        value_P.view(-1, rows.shape[1]).sub_(_direction(rows, moments, part).mul_(scale))
        codec.store(value_P, piece, companion_P)


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
    """Yield ranges of rows whose elements begin at multiples of a quantization group."""
    count = len(rows_RC)
    multiple = GROUP_SIZE // gcd(GROUP_SIZE, rows_RC.shape[1])
    height = max(1, _SLICE_ELEMENTS // rows_RC.shape[1] // multiple) * multiple
    yield from (slice(start, min(start + height, count)) for start in range(0, count, height))


def factored_second_moment(moments: Sequence[Tensor], part: slice) -> Tensor:
    """Return the (P,) float32 second moment of a range of a parameter's elements, from its row and column means."""
    if len(moments) == 1:
        return moments[0].view(-1)[part].clone()
    row_R, column_C = moments
    columns = column_C.numel()
    rows = slice(part.start // columns, -(-part.stop // columns))
    square_SC = (row_R[rows] / row_R.mean())[:, None] * column_C.view(-1)
    first = part.start - rows.start * columns
    return square_SC.view(-1)[first : first + part.stop - part.start]
