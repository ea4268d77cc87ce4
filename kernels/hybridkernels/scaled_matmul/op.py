"""8-bit products as ops: plain torch, Triton on CUDA, sizes alone on meta. M and N rows, K inner dimension."""

from typing import Any

import torch
from torch import Tensor

from hybridkernels.define_op import define_op, describe, triton_or_fallback
from hybridkernels.scaled_matmul.reference import CODES, LARGEST, quantize_rows_reference, scaled_matmul_reference


def _quantize(x_MK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return quantize_rows_reference(x_MK, dtype)


def _quantize_fake(x_MK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x_MK.new_empty(x_MK.shape, dtype=dtype), x_MK.new_empty(x_MK.shape[:1], dtype=torch.float32)


def _matmul(a_MK: Tensor, scales_M: Tensor, b_NK: Tensor, scales_N: Tensor, dtype: torch.dtype) -> Tensor:
    return scaled_matmul_reference(a_MK, scales_M, b_NK, scales_N, dtype)


def _matmul_fake(a_MK: Tensor, _scales_M: Tensor, b_NK: Tensor, _scales_N: Tensor, dtype: torch.dtype) -> Tensor:
    return a_MK.new_empty((a_MK.shape[0], b_NK.shape[0]), dtype=dtype)


def _matmul_flops(a_shape: Any, _scales_M: Any, b_shape: Any, *_: Any, **__: Any) -> int:
    return int(2 * a_shape[0] * a_shape[1] * b_shape[0])


_quantize_rows = define_op(
    "quantize_rows", _quantize, cuda=triton_or_fallback(_quantize, "scaled_matmul.quantize_rows_triton"),
    fake=_quantize_fake,
)  # fmt: skip
_scaled_matmul = define_op(
    "scaled_matmul", _matmul, cuda=triton_or_fallback(_matmul, "scaled_matmul.scaled_matmul_triton"),
    fake=_matmul_fake, flops=_matmul_flops,
)  # fmt: skip


def quantize_rows(x_MK: Tensor, format: str) -> tuple[Tensor, Tensor]:  # noqa: A002  the field's word
    """Return 8-bit codes and the scale of each row; for the columns pass ``x.t()``.

    Args:
        x_MK: (M, K), float32, bfloat16 or float16, of any strides.
        format: ``int8`` or ``float8`` (e4m3).

    Returns:
        Codes (M, K), contiguous, and scales (M,), float32.

    Raises:
        ValueError: another format, dtype, or number of dimensions.
    """
    if format not in CODES:
        raise ValueError(f"quantize_rows: format '{format}' is unknown; allowed: {', '.join(CODES)}")
    if x_MK.dim() != 2 or not x_MK.dtype.is_floating_point:
        raise ValueError(f"quantize_rows: x is {describe(x_MK)}; allowed: a matrix of floats")
    codes, scales = _quantize_rows(x_MK, CODES[format])
    return codes, scales


def scaled_matmul(a_MK: Tensor, scales_M: Tensor, b_NK: Tensor, scales_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product ``(a * scales) @ (b * scales)^T``, rounded once.

    Args:
        a_MK: Codes (M, K), int8 or float8_e4m3fn, contiguous, as of ``quantize_rows``.
        scales_M: (M,), float32.
        b_NK: Codes (N, K) of the same dtype, contiguous.
        scales_N: (N,), float32.
        dtype: Dtype of the result: float32, bfloat16 or float16.

    Returns:
        (M, N) of ``dtype``. int8 codes are added exactly, float8 codes in float32.

    Raises:
        ValueError: dtypes or shapes that do not fit.
    """
    sizes = (a_MK.shape[:1], b_NK.shape[:1])
    if a_MK.dtype not in LARGEST or a_MK.dtype != b_NK.dtype or a_MK.shape[1:] != b_NK.shape[1:]:
        raise ValueError(f"scaled_matmul: codes are {describe(a_MK, b_NK)}; allowed: two of one 8-bit dtype and one K")
    if (scales_M.shape, scales_N.shape) != sizes or {scales_M.dtype, scales_N.dtype} != {torch.float32}:
        raise ValueError(f"scaled_matmul: scales are {describe(scales_M, scales_N)}; allowed: float32, one of each row")
    product: Tensor = _scaled_matmul(a_MK, scales_M, b_NK, scales_N, dtype)
    return product
