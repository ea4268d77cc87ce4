"""NF4 to values as a Triton kernel: codes are read once, values written once, nothing between. P values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridkernels.ahead_of_time import CompileCase
from hybridkernels.nf4 import reference
from hybridkernels.nf4.reference import quantiles, scale_map

_GROUP = tl.constexpr(reference.GROUP_SIZE)
_SCALE_GROUP = tl.constexpr(reference.SCALE_GROUP_SIZE)
NUM_WARPS = 4
BYTES = 1024
"""Codes of a program, two values each."""


@triton.jit
def nf4_dequantize_kernel(
    codes_ptr, scale_codes_ptr, scales_ptr, mean_ptr, quantiles_ptr, scale_map_ptr, out_ptr, numel, BYTES: tl.constexpr
):
    """Write quantile * (scale of the group) of two values per byte; both tables stay in the first-level cache."""
    offsets = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    inside = offsets * 2 < numel
    codes = tl.load(codes_ptr + offsets, mask=inside, other=0)
    groups = offsets * 2 // _GROUP
    scale_codes = tl.load(scale_codes_ptr + groups, mask=inside, other=0)
    wide = tl.load(scales_ptr + groups // _SCALE_GROUP, mask=inside, other=0.0)
    scale = tl.load(scale_map_ptr + scale_codes.to(tl.int32)) * wide + tl.load(mean_ptr)
    upper = tl.load(quantiles_ptr + (codes >> 4).to(tl.int32)) * scale
    lower = tl.load(quantiles_ptr + (codes & 15).to(tl.int32)) * scale
    values = tl.interleave(upper, lower).to(out_ptr.dtype.element_ty)
    places = tl.program_id(0).to(tl.int64) * BYTES * 2 + tl.arange(0, BYTES * 2)
    tl.store(out_ptr + places, values, mask=places < numel)


def nf4_dequantize_triton(codes: Tensor, scale_codes: Tensor, scales: Tensor, mean: Tensor, out_P: Tensor) -> None:
    """Write values as ``nf4_dequantize`` does; the sum with the mean may be fused with the product before it."""
    if out_P.numel():
        with torch.cuda.device_of(out_P):
            nf4_dequantize_kernel[(triton.cdiv(codes.numel(), BYTES),)](
                codes, scale_codes, scales, mean, quantiles(out_P.device), scale_map(out_P.device), out_P,
                out_P.numel(), BYTES=BYTES, num_warps=NUM_WARPS,
            )  # fmt: skip


def compile_cases(capability: int) -> list[CompileCase]:  # noqa: ARG001  the same on every card
    """Return every dtype of the values."""
    types = {"codes_ptr": "*u8", "scale_codes_ptr": "*u8", "numel": "i32"}
    kernel, constants = nf4_dequantize_kernel, {"BYTES": BYTES}
    return [
        CompileCase.of(
            f"nf4/dequantize/{dtype}", kernel, {**types, "out_ptr": f"*{dtype}"}, constants, num_warps=NUM_WARPS
        )
        for dtype in ("fp32", "bf16", "fp16")
    ]
