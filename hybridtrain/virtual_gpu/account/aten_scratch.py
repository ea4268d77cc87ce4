"""Scratch that torch's own ops take inside, unseen by the dispatcher: from ATen's sources of torch 2.13."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridtrain.virtual_gpu.account.op_rules import ScratchRule, register_scratch

_ATEN = torch.ops.aten
_DIRECT_INDICES = 3072
"""Up to so many indices an embedding's gradient is added row by row."""
_ROWS_PER_PART = 10
_KEEPS_ELEMENTS = 0


def _softmax_backward(args: Sequence[Any]) -> int:
    """Gradient times output, before the kernel (cuda/SoftMax.cu, ``softmax_backward_cuda_out``)."""
    gradient: Tensor = args[0]
    return gradient.nbytes


def _embedding_backward(args: Sequence[Any]) -> int:
    """Sorted indices, and fp32 sums of at most ten rows each (cuda/EmbeddingBackwardKernel.cu)."""
    gradient, indices, num_weights = args[0], args[1], int(args[2])
    count = indices.numel()
    if count <= _DIRECT_INDICES and not args[4]:
        return 0
    segments = min(count, num_weights)
    parts = count // _ROWS_PER_PART + segments
    lists: int = 2 * indices.nbytes + (count + 2 * segments + parts) * indices.element_size()
    sums: int = parts * gradient.shape[-1] * max(torch.float32.itemsize, gradient.element_size())
    return lists + sums


def _logsumexp(args: Sequence[Any]) -> int:
    """Exponentials of the input less its largest values (ReduceOps.cpp)."""
    logits: Tensor = args[0]
    return logits.nbytes


def _loss_of_logits(args: Sequence[Any]) -> int:
    """log(sigmoid) beside the loss, which is itself scratch where it is reduced (Loss.cpp)."""
    logits: Tensor = args[0]
    return logits.nbytes * (1 if _reduction(args, 4) == _KEEPS_ELEMENTS else 2)


def _huber_loss(args: Sequence[Any]) -> int:
    """The loss by element, where it is reduced (Loss.cpp)."""
    guess: Tensor = args[0]
    return 0 if _reduction(args, 2) == _KEEPS_ELEMENTS else guess.nbytes


def _operands(first: int) -> ScratchRule:
    """Return the copies of operands that lie in neither order, as an expanded gradient (cuda/Blas.cpp)."""

    def scratch(args: Sequence[Any]) -> int:
        return sum(tensor.nbytes for tensor in args[first : first + 2] if not _is_ordered(tensor))

    return scratch


def _is_ordered(x: Tensor) -> bool:
    """Whether rows or columns are dense, one after the other (``prepare_matrix_for_cublas`` and its batched twin)."""
    (rows, columns), (row, column) = x.shape[-2:], x.stride()[-2:]
    return bool(
        (x.ndim == 2 and torch.ops.aten.is_non_overlapping_and_dense(x))
        or (row == 1 and column >= max(1, rows))
        or (column == 1 and row >= max(1, columns))
        or x.is_contiguous()
    )


def _reduction(args: Sequence[Any], place: int) -> Any:
    return args[place] if len(args) > place else 1


register_scratch(_ATEN._softmax_backward_data.default, _softmax_backward)
register_scratch(_ATEN.embedding_dense_backward.default, _embedding_backward)
register_scratch(_ATEN.logsumexp.default, _logsumexp)
register_scratch(_ATEN.binary_cross_entropy_with_logits.default, _loss_of_logits)
for _op, _first in ((_ATEN.mm, 0), (_ATEN.bmm, 0), (_ATEN.addmm, 1), (_ATEN.baddbmm, 1)):
    register_scratch(_op.default, _operands(_first))
register_scratch(_ATEN.huber_loss.default, _huber_loss)
