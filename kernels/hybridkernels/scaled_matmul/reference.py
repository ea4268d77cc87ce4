"""8-bit products in plain torch. M and N rows, K inner dimension.

A row of x is ``codes * scale``, scale being its largest magnitude over the largest code (torchao's row-wise scaling).
int8 codes are rounded to nearest, ties to even, and added in int32; float8 (e4m3) codes are added in float32.
"""

import torch
from torch import Tensor

CODES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
"""Format to dtype of codes."""
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST = 1e-12
"""Largest magnitude that a row of zeros is given."""


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
    if a_MK.dtype is torch.int8:
        sums = torch._int_mm(a_MK.contiguous(), b_NK.t()).float()
    else:
        sums = a_MK.float() @ b_NK.float().t()
    return (sums * scales_M[:, None] * scales_N).to(dtype)
