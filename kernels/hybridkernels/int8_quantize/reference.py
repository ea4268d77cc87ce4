"""Symmetric 8-bit quantization in groups of 256, in plain torch: the definition, without slices. P values, G groups.

The absolute-maximum rule of block-wise quantization (Dettmers et al., 2110.02861) with evenly spaced codes:
``scale = absmax / 127``, ``code = round(value * (1 / scale))``. Every step is one correctly rounded float32
operation, so all devices can give the same codes.
"""

import torch
from torch import Tensor

GROUP_SIZE = 256
LARGEST_CODE = 127
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Smaller scales count as zero: a subnormal one has too few digits, and some devices flush it."""


def num_groups(num_elements: int) -> int:
    """Return the number of scales of ``num_elements`` values; the last group may be short."""
    return -(-num_elements // GROUP_SIZE)


def int8_quantize_reference(
    values_P: Tensor, *, scales_G: Tensor | None = None, uniform_P: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (codes_P int8, scales_G float32) of (P,) float32, bfloat16 or float16 values.

    ``scales_G`` are given float32 scales of a static quantization; ``uniform_P`` are float32 random numbers in [0, 1)
    for stochastic rounding, None rounds to nearest even.
    """
    num_elements = values_P.numel()
    padding = (0, num_groups(num_elements) * GROUP_SIZE - num_elements)
    values_GS = torch.nn.functional.pad(values_P.float(), padding).view(-1, GROUP_SIZE)
    absmax_G = values_GS.abs().amax(-1)
    if scales_G is None:
        scales_G = absmax_G / absmax_G.new_full((), LARGEST_CODE)
        scales_G = torch.where(scales_G < SMALLEST_SCALE, 0.0, scales_G)
    else:
        scales_G = torch.where(absmax_G.isfinite(), scales_G, torch.nan)
    usable_G = (scales_G >= SMALLEST_SCALE) & scales_G.isfinite()
    inverse_G = torch.where(usable_G, scales_G.reciprocal(), 0.0)
    steps_P = (values_GS * inverse_G[:, None]).flatten()[:num_elements]
    steps_P = steps_P.clamp(-LARGEST_CODE, LARGEST_CODE).nan_to_num(nan=0.0)
    if uniform_P is None:
        return steps_P.round().to(torch.int8), scales_G
    floor_P = steps_P.floor()
    return torch.where(steps_P - floor_P > uniform_P, floor_P + 1, floor_P).to(torch.int8), scales_G


def int8_dequantize_reference(codes_P: Tensor, scales_G: Tensor) -> Tensor:
    """Return the (P,) float32 values ``code * scale``."""
    return codes_P.float() * scales_G.repeat_interleave(GROUP_SIZE)[: codes_P.numel()]
