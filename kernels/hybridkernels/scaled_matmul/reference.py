"""8-bit products in plain torch. M and N rows, K inner dimension.

A row of x is ``codes * scale``, scale being its largest magnitude over the largest code (torchao's row-wise scaling).
int8 codes are rounded to nearest, ties to even, and added exactly; float8 (e4m3) codes are added in float32.
"""

import torch
from torch import Tensor

CODES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
"""Format to dtype of codes."""
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST = 1e-12
"""Largest magnitude that a row of zeros is given."""
EXACT_INNER = 1024
"""Inner dimension up to which float32 holds every sum of int8 products: 127^2 * 1024 < 2^24."""


def quantize_rows_reference(x_MK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes (M, K) and scales (M,) float32 of a matrix."""
    values = x_MK.float()
    largest_M = values.abs().amax(-1).clamp(min=SMALLEST)
    steps = values * (LARGEST[dtype] / largest_M)[:, None]
    codes = (steps.round_() if dtype is torch.int8 else steps.clamp_(-LARGEST[dtype], LARGEST[dtype])).to(dtype)
    return codes.contiguous(), largest_M / LARGEST[dtype]


def scaled_matmul_reference(
    a_MK: Tensor, scales_M: Tensor, b_NK: Tensor, scales_N: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return ``(a * scales) @ (b * scales)^T``, (M, N) of ``dtype``."""
    sums = _int8_sums(a_MK, b_NK) if a_MK.dtype is torch.int8 else a_MK.float() @ b_NK.float().t()
    return (sums * scales_M[:, None] * scales_N).to(dtype)


def _int8_sums(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """Return the exact sums, (M, N) float32. On the CPU by float32 products: without VNNI many times faster."""
    if a_MK.is_cuda:
        return torch._int_mm(a_MK.contiguous(), b_NK.t()).float()
    if a_MK.shape[1] <= EXACT_INNER:
        return a_MK.float() @ b_NK.float().t()
    sums_MN = torch.zeros(a_MK.shape[0], b_NK.shape[0], dtype=torch.int32)
    for a, b in zip(torch.split(a_MK, EXACT_INNER, 1), torch.split(b_NK, EXACT_INNER, 1), strict=True):
        sums_MN += (a.float() @ b.float().t()).to(torch.int32)
    return sums_MN.float()
