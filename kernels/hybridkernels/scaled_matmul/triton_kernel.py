"""8-bit products as Triton kernels. M and N rows, K inner dimension."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridkernels.ahead_of_time import CompileCase
from hybridkernels.scaled_matmul.reference import LARGEST, SMALLEST

ROWS, COLUMNS = 32, 128
"""Tile of quantization: several rows, so that a transposed matrix is read in whole lines of memory too."""
TILE_M, TILE_N, TILE_K, GROUP = 128, 128, 128, 8
NUM_WARPS, NUM_STAGES = 8, 3
_FIRST_FLOAT8 = 89


@triton.jit
def quantize_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, num_rows, num_columns, stride_row, stride_column, LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr, ROUNDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Find the largest magnitude of each row, then write codes; the second pass reads the cache."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = rows < num_rows
    largest = tl.full([ROWS], SMALLEST, tl.float32)
    for start in range(0, num_columns, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = in_rows[:, None] & (columns < num_columns)[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride_row + columns[None, :] * stride_column, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(x.to(tl.float32)), axis=1))
    steps = tl.div_rn(tl.full([ROWS], LARGEST, tl.float32), largest)
    tl.store(scales_ptr + rows, tl.div_rn(largest, tl.full([ROWS], LARGEST, tl.float32)), mask=in_rows)
    for start in range(0, num_columns, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = in_rows[:, None] & (columns < num_columns)[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride_row + columns[None, :] * stride_column, mask=inside, other=0.0)
        values = x.to(tl.float32) * steps[:, None]
        if ROUNDS:  # to even, by the last bit of a float of that size
            magic = 12582912.0
            values = (values + magic) - magic
        else:
            values = tl.minimum(tl.maximum(values, -LARGEST), LARGEST)
        out = codes_ptr + rows[:, None] * num_columns + columns[None, :]
        tl.store(out, values.to(codes_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scaled_matmul_kernel(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, out_ptr, m, n, k, IS_INTEGER: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Multiply tiles, neighbours in M first, so that a group shares columns of b in the second-level cache."""
    program, tiles_m, tiles_n = tl.program_id(0), tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    group = program // (GROUP * tiles_n)
    height = min(tiles_m - group * GROUP, GROUP)
    tile_m = group * GROUP + (program % (GROUP * tiles_n)) % height
    tile_n = (program % (GROUP * tiles_n)) // height
    rows = tile_m.to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    columns = tile_n.to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    inner = tl.arange(0, TILE_K)
    sums = tl.zeros([TILE_M, TILE_N], dtype=tl.int32 if IS_INTEGER else tl.float32)
    for start in range(0, k, TILE_K):
        in_k = start + inner < k
        a = tl.load(
            a_ptr + rows[:, None] * k + start + inner[None, :], mask=(rows < m)[:, None] & in_k[None, :], other=0.0
        )
        b = tl.load(
            b_ptr + columns[None, :] * k + start + inner[:, None], mask=(columns < n)[None, :] & in_k[:, None],
            other=0.0,
        )  # fmt: skip
        sums = tl.dot(a, b, sums, out_dtype=tl.int32 if IS_INTEGER else tl.float32)
    a_scales = tl.load(a_scales_ptr + rows, mask=rows < m, other=0.0)
    b_scales = tl.load(b_scales_ptr + columns, mask=columns < n, other=0.0)
    values = sums.to(tl.float32) * a_scales[:, None] * b_scales[None, :]
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(out_ptr + rows[:, None] * n + columns[None, :], values.to(out_ptr.dtype.element_ty), mask=inside)


def quantize_rows_triton(x_MK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes (M, K) and scales (M,) of a matrix of any strides."""
    rows, columns = x_MK.shape
    codes, scales = x_MK.new_empty((rows, columns), dtype=dtype), x_MK.new_empty(rows, dtype=torch.float32)
    quantize_rows_kernel[triton.cdiv(rows, ROWS),](
        x_MK, codes, scales, rows, columns, *x_MK.stride(), LARGEST[dtype], SMALLEST, dtype is torch.int8, ROWS, COLUMNS
    )
    return codes, scales


def scaled_matmul_triton(
    a_MK: Tensor, scales_M: Tensor, b_NK: Tensor, scales_N: Tensor, dtype: torch.dtype, *,
    tile: tuple[int, int, int] = (TILE_M, TILE_N, TILE_K),
) -> Tensor:  # fmt: skip
    """Return the scaled product, (M, N) of ``dtype``."""
    (m, k), n = a_MK.shape, b_NK.shape[0]
    out = a_MK.new_empty((m, n), dtype=dtype)
    scaled_matmul_kernel[triton.cdiv(m, tile[0]) * triton.cdiv(n, tile[1]),](
        a_MK, scales_M, b_NK, scales_N, out, m, n, k, a_MK.dtype is torch.int8, *tile, GROUP, num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )  # fmt: skip
    return out


def compile_cases(capability: int) -> list[CompileCase]:
    """Return both formats where the card multiplies them."""
    formats = {"int8": ("*i8", True, 127.0)}
    if capability >= _FIRST_FLOAT8:
        formats["float8"] = ("*fp8e4nv", False, 448.0)
    cases = []
    sizes = dict.fromkeys(("m", "n", "k", "num_rows", "num_columns", "stride_row", "stride_column"), "i32")
    for name, (codes, is_integer, largest) in formats.items():
        cases.append(
            CompileCase.of(
                f"scaled_matmul/quantize/{name}",
                quantize_rows_kernel,
                {**sizes, "x_ptr": "*bf16", "codes_ptr": codes},
                {"LARGEST": largest, "SMALLEST": SMALLEST, "ROUNDS": is_integer, "ROWS": ROWS, "COLUMNS": COLUMNS},
            )
        )
        cases.append(
            CompileCase.of(
                f"scaled_matmul/{name}", scaled_matmul_kernel,
                {**sizes, "a_ptr": codes, "b_ptr": codes, "out_ptr": "*bf16"},
                {"IS_INTEGER": is_integer, "TILE_M": TILE_M, "TILE_N": TILE_N, "TILE_K": TILE_K, "GROUP": GROUP},
                num_warps=NUM_WARPS, num_stages=NUM_STAGES,
            )
        )  # fmt: skip
    return cases
