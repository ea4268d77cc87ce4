"""One AdamW update with 8-bit moments as a Triton kernel: every tensor is read and written once.

P parameters, G = ceil(P / 256) groups; a program holds R groups (rows) of S = 256. Weights are float32, or bfloat16 or
int8 codes that are rounded stochastically; random numbers depend on the seed and the element, not on the launch.
"""

import math
from collections.abc import Sequence
from typing import Any, Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridkernels.adamw_int8.dynamic_map import BORDERS, SLOPES, map_values
from hybridkernels.adamw_int8.reference import Settings
from hybridkernels.ahead_of_time import CompileCase
from hybridkernels.int8_quantize import num_groups
from hybridkernels.int8_quantize.reference import SMALLEST_SCALE
from hybridkernels.int8_quantize.triton_rounding import (
    GROUP,
    TO_INTEGER,
    bfloat16_stochastic,
    dynamic_scales,
    group_absmax,
    group_codes,
    group_rows,
    random_words,
)

ROWS = 4
NUM_WARPS = 8
"""4 neighbours a thread are 16 bytes of each float32 tensor, and few enough for many programs on a multiprocessor."""
_SIGNED_BORDERS, _BORDERS = tl.constexpr(BORDERS[True]), tl.constexpr(BORDERS[False])
_SIGNED_SLOPES, _SLOPES = tl.constexpr(SLOPES[True]), tl.constexpr(SLOPES[False])
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def decode(codes, scales, map_ptr):
    """Return the (R, S) float32 values of codes; the map's 1 KiB stays in the first-level cache."""
    return tl.load(map_ptr + codes.to(tl.int32)) * scales[:, None]


@triton.jit
def encode(values, SIGNED: tl.constexpr):
    """Return the codes, uint8 (R, S), of the nearest values of the map, and the scales, (R,).

    The decade is found by three comparisons, each with a border that the ones before have chosen; the index is then
    linear in the magnitude. A card fuses the line's product and sum, and its quotient by the scale is not rounded
    correctly: within a few roundings of a midpoint between two values either one may be taken.
    """
    cells: tl.constexpr = 1.0 if SIGNED else 2.0
    border: tl.constexpr = _SIGNED_BORDERS if SIGNED else _BORDERS
    slope: tl.constexpr = _SIGNED_SLOPES if SIGNED else _SLOPES
    scales = group_absmax(values)
    inverse = 1.0 / tl.maximum(scales, _SMALLEST_SCALE)
    magnitude = tl.abs(values) * inverse[:, None]
    upper = magnitude >= border[3]
    middle = magnitude >= tl.where(upper, border[5], border[1])
    lower = magnitude >= tl.where(upper, tl.where(middle, border[6], border[4]), tl.where(middle, border[2], border[0]))
    high = tl.where(middle, tl.where(lower, slope[6], slope[5]), tl.where(lower, slope[4], slope[3]))
    low = tl.where(middle, tl.where(lower, slope[2], slope[1]), slope[0])
    # 2**decade, from the exponents that the three comparisons add up to.
    power = tl.where(upper, 8.0, 0.5) * tl.where(middle, 4.0, 1.0) * tl.where(lower, 2.0, 1.0)
    first = (1 - cells) + cells * power
    index = (1 - cells) + power * (cells - cells / 9) + magnitude * tl.where(upper, high, low)
    # Below the first decade 2**decade counts as a half, and both limits come to 0.
    index = tl.minimum(tl.maximum(tl.floor(index), first), first + (cells * power - 1))
    index += tl.where(magnitude >= border[7], 1.0, 0.0)
    if SIGNED:  # 127 is zero; there is no -1, its nearest value is code 0
        sign = values.to(tl.int32, bitcast=True) & -0x80000000
        index = tl.maximum(127.0 + (index.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True), 0.0)
    return (index + TO_INTEGER).to(tl.int32, bitcast=True).to(tl.uint8), scales


@triton.jit
def adamw_int8_kernel(
    weight_ptr, weight_scale_ptr, grad_ptr, m_codes_ptr, m_scale_ptr, v_codes_ptr, v_scale_ptr, signed_map_ptr,
    unsigned_map_ptr, seed_ptr, decay, step_size, inverse_root, beta1, beta2, eps, numel, ROWS: tl.constexpr,
):  # fmt: skip
    """Write w * decay - step_size * m / (sqrt(v) * inverse_root + eps) and both moments (1711.05101, 2110.02861)."""
    first_row = tl.program_id(0) * ROWS
    rows, offsets = group_rows(first_row, ROWS)
    inside, row_inside = offsets < numel, rows * GROUP < numel
    # The moments' buffers hold whole groups.
    whole = row_inside[:, None]
    m_codes = tl.load(m_codes_ptr + offsets, mask=whole, other=0)
    v_codes = tl.load(v_codes_ptr + offsets, mask=whole, other=0)
    grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offsets, mask=inside, other=0).to(tl.float32)
    m = decode(m_codes, tl.load(m_scale_ptr + rows, mask=row_inside, other=0.0), signed_map_ptr)
    v = decode(v_codes, tl.load(v_scale_ptr + rows, mask=row_inside, other=0.0), unsigned_map_ptr)
    if weight_ptr.dtype.element_ty == tl.int8:
        weight *= tl.load(weight_scale_ptr + rows, mask=row_inside, other=0.0)[:, None]
    m = beta1 * m + (1.0 - beta1) * grad
    v = beta2 * v + (1.0 - beta2) * grad * grad
    weight = weight * decay - step_size * m / (tl.sqrt(v) * inverse_root + eps)
    if weight_ptr.dtype.element_ty == tl.float32:
        tl.store(weight_ptr + offsets, weight, mask=inside)
    else:
        words = random_words(tl.load(seed_ptr), first_row, ROWS)
        if weight_ptr.dtype.element_ty == tl.int8:
            # What is beyond the end of a short group has no part in its scale.
            weight_scales = dynamic_scales(group_absmax(tl.where(inside, weight, 0.0)))
            tl.store(weight_ptr + offsets, group_codes(weight, weight_scales, words, True), mask=inside)
            tl.store(weight_scale_ptr + rows, weight_scales, mask=row_inside)
        else:
            tl.store(weight_ptr + offsets, bfloat16_stochastic(weight, words), mask=inside)
    m_codes, m_scales = encode(m, True)
    v_codes, v_scales = encode(v, False)
    tl.store(m_codes_ptr + offsets, m_codes, mask=whole)
    tl.store(v_codes_ptr + offsets, v_codes, mask=whole)
    tl.store(m_scale_ptr + rows, m_scales, mask=row_inside)
    tl.store(v_scale_ptr + rows, v_scales, mask=row_inside)


def adamw_int8_triton(
    weight: tuple[Tensor, ...],
    grad_P: Tensor,
    moments: Sequence[Tensor],
    *,
    seed: Tensor | None = None,
    **settings: Unpack[Settings],
) -> None:
    """Update weight and moments in place as ``adamw_int8_`` and ``adamw_int8_rounded_`` do.

    The weight is one (P,) float32 or bfloat16 tensor, or int8 codes and their scales; contiguous. ``grad_P`` is (P,)
    float32, bfloat16 or float16; ``seed`` is (1,) int64, of weights that are not float32.
    """
    lr, betas, eps, step = settings["lr"], settings["betas"], settings["eps"], settings["step"]
    values, scales = weight if len(weight) == 2 else (weight[0], None)
    if values.numel():  # CUDA refuses an empty grid
        maps = (map_values(values.device, signed=signed) for signed in (True, False))
        correction1, correction2 = 1 - betas[0] ** step, math.sqrt(1 - betas[1] ** step)
        with torch.cuda.device_of(values):
            adamw_int8_kernel[(triton.cdiv(num_groups(values.numel()), ROWS),)](
                values, scales, grad_P.contiguous(), *moments, *maps, seed,
                1 - lr * settings["weight_decay"], lr / correction1, 1 / correction2, *betas, eps, values.numel(),
                ROWS=ROWS, num_warps=NUM_WARPS,
            )  # fmt: skip


def compile_cases(capability: int) -> list[CompileCase]:  # noqa: ARG001  the same on every card
    """Return every kind of weights and gradients; lengths are multiples of 16."""
    scalars = ("decay", "step_size", "inverse_root", "beta1", "beta2", "eps")
    shared = {"m_codes_ptr": "*u8", "v_codes_ptr": "*u8", "seed_ptr": "*i64", "numel": "i32"}
    shared |= dict.fromkeys(scalars, "fp32")
    weights: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
        "fp32": ({**shared, "weight_ptr": "*fp32"}, {"ROWS": ROWS, "weight_scale_ptr": None, "seed_ptr": None}),
        "bf16": ({**shared, "weight_ptr": "*bf16"}, {"ROWS": ROWS, "weight_scale_ptr": None}),
        "int8": ({**shared, "weight_ptr": "*i8"}, {"ROWS": ROWS}),
    }
    return [
        CompileCase.of(
            f"adamw_int8/{weight}/grad_{grad}",
            adamw_int8_kernel,
            {**types, "grad_ptr": f"*{grad}"},
            constants,
            num_warps=NUM_WARPS,
        )
        for weight, (types, constants) in weights.items()
        for grad in ("fp32", "bf16", "fp16")
    ]
