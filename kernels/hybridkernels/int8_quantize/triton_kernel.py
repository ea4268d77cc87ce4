"""Quantizing to 8 bits and back as Triton kernels: values are read once, codes written once. R rows of S = 256.

P values, G = ceil(P / 256) groups. Random numbers depend on the seed and the element, not on the launch.
"""

from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridkernels.ahead_of_time import CompileCase
from hybridkernels.int8_quantize.philox import random_seed
from hybridkernels.int8_quantize.reference import num_groups
from hybridkernels.int8_quantize.triton_rounding import (
    GROUP,
    dynamic_scales,
    group_absmax,
    group_codes,
    group_rows,
    random_words,
)

NUM_WARPS = 4


def quantize_rows(dtype: torch.dtype) -> int:
    """Return the groups a program quantizes, so that a thread reads 32 bytes of values.

    16 neighbours of a 16-bit dtype are 16 bytes of codes; as many of float32 would lie 64 bytes from the next thread's.
    """
    return 16 // dtype.itemsize


def dequantize_rows(dtype: torch.dtype) -> int:
    """Return the groups a program dequantizes, so that a thread writes 16 bytes of values."""
    return 8 // dtype.itemsize


@triton.jit
def int8_quantize_kernel(
    values_ptr,
    codes_ptr,
    scales_ptr,
    seed_ptr,
    numel,
    STOCHASTIC: tl.constexpr,
    STATIC: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write scale = absmax / 127 and code = round(value / scale) of R groups (Dettmers et al., 2110.02861)."""
    first_row = tl.program_id(0) * ROWS
    rows, offsets = group_rows(first_row, ROWS)
    inside, row_inside = offsets < numel, rows * GROUP < numel
    values = tl.load(values_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    absmax = group_absmax(values)
    if STATIC:
        scales = tl.load(scales_ptr + rows, mask=row_inside, other=0.0)
        scales = tl.where(absmax < float("inf"), scales, float("nan"))
    else:
        scales = dynamic_scales(absmax)
    words = 0
    if STOCHASTIC:
        words = random_words(tl.load(seed_ptr), first_row, ROWS)
    codes = group_codes(values, scales, words, STOCHASTIC)
    tl.store(codes_ptr + offsets, codes, mask=inside)
    tl.store(scales_ptr + rows, scales, mask=row_inside)


@triton.jit
def int8_dequantize_kernel(codes_ptr, scales_ptr, out_ptr, numel, ROWS: tl.constexpr):
    """Write code * scale of R groups, one float32 product rounded once."""
    rows, offsets = group_rows(tl.program_id(0) * ROWS, ROWS)
    inside = offsets < numel
    scales = tl.load(scales_ptr + rows, mask=rows * GROUP < numel, other=0.0)
    codes = tl.load(codes_ptr + offsets, mask=inside, other=0)
    tl.store(out_ptr + offsets, (codes.to(tl.float32) * scales[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def int8_quantize_triton(
    values_P: Tensor, codes_P: Tensor, scales_G: Tensor, stochastic: bool, static: bool, seed: Tensor | None = None
) -> None:
    """Write codes and scales as ``int8_quantize`` does; ``seed``, (1,) int64, is drawn unless given."""
    if values_P.numel():  # CUDA refuses an empty grid
        with torch.cuda.device_of(values_P):
            if seed is None and stochastic:
                seed = random_seed(values_P.device)
            rows = quantize_rows(values_P.dtype)
            int8_quantize_kernel[_grid(values_P, rows)](
                values_P, codes_P, scales_G, seed, values_P.numel(),
                STOCHASTIC=stochastic, STATIC=static, ROWS=rows, num_warps=NUM_WARPS,
            )  # fmt: skip


def int8_dequantize_triton(codes_P: Tensor, scales_G: Tensor, out_P: Tensor) -> None:
    """Write ``code * scale`` as ``int8_dequantize`` does."""
    if codes_P.numel():
        with torch.cuda.device_of(codes_P):
            rows = dequantize_rows(out_P.dtype)
            int8_dequantize_kernel[_grid(codes_P, rows)](
                codes_P, scales_G, out_P, codes_P.numel(), ROWS=rows, num_warps=NUM_WARPS
            )


def _grid(tensor_P: Tensor, rows: int) -> tuple[int]:
    return (triton.cdiv(num_groups(tensor_P.numel()), rows),)


def compile_cases(capability: int) -> list[CompileCase]:  # noqa: ARG001  the same on every card
    """Return every rounding, kind of scales and dtype; lengths are multiples of 16, and one is not."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    names, types = {False: "nearest", True: "stochastic"}, {"codes_ptr": "*i8", "numel": "i32", "seed_ptr": "*i64"}
    quantize = [
        CompileCase.of(
            f"int8_quantize/{dtype}/{names[stochastic]}/{'static' if static else 'dynamic'}",
            int8_quantize_kernel,
            {**types, "values_ptr": f"*{dtype}"},
            {"STOCHASTIC": stochastic, "STATIC": static, "ROWS": quantize_rows(dtypes[dtype])}
            | ({} if stochastic else {"seed_ptr": None}),
            num_warps=NUM_WARPS,
        )
        for dtype, stochastic, static in product(dtypes, (False, True), (False, True))
    ]
    return quantize + [
        CompileCase.of(
            f"int8_dequantize/{dtype}{'/any_length' if unaligned else ''}",
            int8_dequantize_kernel,
            {**types, "out_ptr": f"*{dtype}"},
            {"ROWS": dequantize_rows(dtypes[dtype])},
            unaligned=frozenset(unaligned),
            num_warps=NUM_WARPS,
        )
        for dtype, unaligned in [*((dtype, ()) for dtype in dtypes), ("bf16", ("numel",))]
    ]
