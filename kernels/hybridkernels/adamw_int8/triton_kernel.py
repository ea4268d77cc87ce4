"""One AdamW update with 8-bit moments as a Triton kernel: every tensor is read and written once.

P parameters, G = ceil(P / 256) groups; a program holds R groups (rows) of S = 256. Weights are float32, or bfloat16 or
int8 codes that are rounded stochastically; random numbers depend on the seed and the element, not on the launch.
"""

import math

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from hybridkernels.adamw_int8.dynamic_map import map_values
from hybridkernels.adamw_int8.triton_map import decode, encode
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


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def adamw_int8_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN201
    weight_ptr,  # noqa: ANN001
    weight_scale_ptr,  # noqa: ANN001
    grad_ptr,  # noqa: ANN001
    m_codes_ptr,  # noqa: ANN001
    m_scale_ptr,  # noqa: ANN001
    v_codes_ptr,  # noqa: ANN001
    v_scale_ptr,  # noqa: ANN001
    signed_map_ptr,  # noqa: ANN001
    unsigned_map_ptr,  # noqa: ANN001
    seed_ptr,  # noqa: ANN001
    decay,  # noqa: ANN001
    step_size,  # noqa: ANN001
    inverse_root,  # noqa: ANN001
    beta1,  # noqa: ANN001
    beta2,  # noqa: ANN001
    eps,  # noqa: ANN001
    numel,  # noqa: ANN001
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
    moments: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    seed: Tensor | None = None,
) -> None:
    """Update weight and moments in place as ``adamw_int8_`` and ``adamw_int8_rounded_`` do.

    Args:
        weight: One (P,) float32 or bfloat16 tensor, or int8 codes and their scales; contiguous.
        grad_P: (P,) float32, bfloat16 or float16.
        moments: m_codes, m_scale, v_codes, v_scale.
        lr: Learning rate.
        betas: Decay of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay, multiplied by ``lr``.
        step: From 1.
        seed: (1,) int64, of weights that are not float32.
    """
    values, scales = weight if len(weight) == 2 else (weight[0], None)
    if values.numel():  # CUDA refuses an empty grid
        maps = (map_values(values.device, signed=signed) for signed in (True, False))
        correction1, correction2 = 1 - betas[0] ** step, math.sqrt(1 - betas[1] ** step)
        with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
            adamw_int8_kernel[(triton.cdiv(num_groups(values.numel()), ROWS),)](
                values, scales, grad_P.contiguous(), *moments, *maps, seed,
                1 - lr * weight_decay, lr / correction1, 1 / correction2, *betas, eps, values.numel(),
                ROWS=ROWS, num_warps=NUM_WARPS,
            )  # fmt: skip
