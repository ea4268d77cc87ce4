"""The dynamic 8-bit map: seven decades, each with twice the values of the one below (Dettmers et al., 2110.02861).

Signed for first moments, unsigned for second ones. A code is the index of the nearest value; values are relative to
the largest magnitude of a group of 256. Layout and values are those of bitsandbytes: states move between CPU and CUDA.
"""

from functools import cache

import torch
from torch import Tensor

QUANT_GROUP_SIZE = 256
_DECADES = 7


def dynamic_map(*, signed: bool) -> tuple[float, ...]:
    """Return the 256 values in increasing order, from -0.993 (signed) or 0 (unsigned) to 1."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2**decade * (1 if signed else 2)
        centres = [10.0 ** (decade + 1 - _DECADES) * (0.1 + 0.9 * (cell + 0.5) / count) for cell in range(count)]
        values += centres
        if signed:
            values += [-centre for centre in centres]
    return tuple(sorted(values))


@cache
def map_values(device: torch.device, *, signed: bool) -> Tensor:
    """Return the map as a (256,) float32 tensor on ``device``."""
    return torch.tensor(dynamic_map(signed=signed), device=device)


def _borders(*, signed: bool) -> tuple[float, ...]:
    """Return the magnitudes from which on decade 0, 1, ... 6 and the single value 1.0 are the nearest."""
    magnitudes = [value for value in dynamic_map(signed=signed) if value >= 0]
    firsts = [_first_index(decade, signed=signed) for decade in range(_DECADES + 1)]
    return tuple((magnitudes[first - 1] + magnitudes[first]) / 2 for first in firsts)


def _first_index(decade: int, *, signed: bool) -> int:
    """Return the index, among magnitudes, of a decade's smallest value; 0 is the value zero."""
    return 1 + (1 if signed else 2) * ((1 << decade) - 1)


BORDERS = {signed: _borders(signed=signed) for signed in (True, False)}
SLOPES = {
    signed: tuple((1 if signed else 2) / 0.9 * 10.0 ** (_DECADES - 1) * 0.2**decade for decade in range(_DECADES))
    for signed in (True, False)
}
"""Cells per unit of magnitude, by decade."""


def quantize(values_GS: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return (codes_GS uint8, scale_G float32) of (G, 256) float32 values; an all-zero group has scale 0.

    No search and no table: decade d holds ``c * 2**d`` equal cells between 0.1 and 1 times ``10**(d - 6)``, so the
    index is linear in the magnitude with a slope of ``0.2**d``. Compares and multiplies vectorise, gathers do not.
    """
    cells = 1.0 if signed else 2.0
    scale_G = values_GS.abs().amax(-1)
    inverse_G = 1.0 / scale_G.clamp_min(torch.finfo(torch.float32).tiny)
    magnitude = values_GS.abs() * inverse_G[:, None]
    power = torch.zeros_like(magnitude)  # 2**decade, 0 below the smallest value
    slope = torch.zeros_like(magnitude)
    for decade, border in enumerate(BORDERS[signed][:-1]):
        above = magnitude >= border
        power = torch.where(above, 2.0**decade, power)
        slope = torch.where(above, SLOPES[signed][decade], slope)
    first = (1 - cells) + cells * power
    index = torch.floor((1 - cells) + power * (cells - cells / 9) + magnitude * slope)
    index = torch.minimum(torch.maximum(index, first), first + (cells * power - 1))
    index = torch.where(power > 0, index, 0.0) + torch.where(magnitude >= BORDERS[signed][-1], 1.0, 0.0)
    if signed:  # 127 is zero; there is no -1, its nearest value is code 0
        index = torch.where(values_GS < 0, 127 - index.clamp_max(127), 127 + index)
    return index.to(torch.int32).to(torch.uint8), scale_G


def dequantize(codes_GS: Tensor, scale_G: Tensor, *, signed: bool) -> Tensor:
    """Return the (G, 256) float32 values of codes and scales; the inverse of the line in ``quantize``."""
    cells = 1.0 if signed else 2.0
    code = codes_GS.to(torch.float32)
    index = (code - 127).abs() if signed else code
    power = torch.zeros_like(index)
    width = torch.zeros_like(index)
    for decade in range(_DECADES):
        above = index >= _first_index(decade, signed=signed)
        power = torch.where(above, 2.0**decade, power)
        width = torch.where(above, 0.9 / cells * 10.0 ** (1 - _DECADES) * 5.0**decade, width)
    magnitude = (index + (cells - 0.5) + power * (cells / 9 - cells)) * width
    magnitude = torch.where(index >= _first_index(_DECADES, signed=signed), 1.0, magnitude)
    if signed:
        magnitude = torch.where(code < 127, -magnitude, magnitude)
    return magnitude * scale_G[:, None]
