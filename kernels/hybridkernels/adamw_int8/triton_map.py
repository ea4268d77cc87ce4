"""The dynamic 8-bit map in Triton: ``dynamic_map.quantize`` and its inverse. R groups (rows) of S = 256 elements."""

import triton
import triton.language as tl

from hybridkernels.adamw_int8.dynamic_map import BORDERS, SLOPES
from hybridkernels.int8_quantize.reference import SMALLEST_SCALE
from hybridkernels.int8_quantize.triton_rounding import TO_INTEGER, group_absmax

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
