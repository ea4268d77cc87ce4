"""One AdamW update with 8-bit moments as a Triton kernel: every tensor is read and written once.

P parameters, G = ceil(P / 256) groups; a program holds R groups (rows) of S = 256. Weights are float32, or bfloat16 or
int8 codes that are rounded stochastically; random numbers depend on the seed and the element, not on the launch.
"""

import math
from collections.abc import Sequence
from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridkernels.adamw_int8.dynamic_map import map_values
from hybridkernels.adamw_int8.op import Settings
from hybridkernels.adamw_int8.triton_map import decode, encode
from hybridkernels.ahead_of_time import CompileCase
from hybridkernels.int8_quantize import num_groups
from hybridkernels.int8_quantize.triton_rounding import (
    GROUP,
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


@triton.jit
def adamw_int8_kernel(
    weight_ptr,
    weight_scale_ptr,
    grad_ptr,
    m_codes_ptr,
    m_scale_ptr,
    v_codes_ptr,
    v_scale_ptr,
    signed_map_ptr,
    unsigned_map_ptr,
    seed_ptr,
    decay,
    step_size,
    inverse_root,
    beta1,
    beta2,
    eps,
    numel,
    ROWS: tl.constexpr,
):
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
    floats = ("m_scale_ptr", "v_scale_ptr", "signed_map_ptr", "unsigned_map_ptr")
    scalars = ("decay", "step_size", "inverse_root", "beta1", "beta2", "eps")
    shared = {"m_codes_ptr": "*u8", "v_codes_ptr": "*u8", "numel": "i32"}
    shared |= dict.fromkeys(floats, "*fp32") | dict.fromkeys(scalars, "fp32")
    weights = {
        "fp32": {"weight_ptr": "*fp32"},
        "bf16": {"weight_ptr": "*bf16", "seed_ptr": "*i64"},
        "int8": {"weight_ptr": "*i8", "weight_scale_ptr": "*fp32", "seed_ptr": "*i64"},
    }
    return [
        CompileCase(
            name=f"adamw_int8/{weight}/grad_{grad}",
            kernel=adamw_int8_kernel,
            arguments={**types, **shared, "grad_ptr": f"*{grad}"},
            constants={name: None for name in ("weight_scale_ptr", "seed_ptr") if name not in types} | {"ROWS": ROWS},
            num_warps=NUM_WARPS,
        )
        for weight, types in weights.items()
        for grad in ("fp32", "bf16", "fp16")
    ]
