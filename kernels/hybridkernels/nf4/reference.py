"""NF4 with double quantization in plain torch (Dettmers et al., 2305.14314).

P values in G groups of 64, each with a scale: its largest magnitude. Scales, less their mean, are themselves 8-bit
codes of the signed dynamic map in S groups of 256. Layout and values are those of bitsandbytes' CPU functions, to the
bit: the value of even number is in the upper half of a byte.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

GROUP_SIZE = 64
SCALE_GROUP_SIZE = 256
_GRID = 1 << 16
_SMALLEST = 1e-38
"""bitsandbytes divides by at least this."""

QUANTILES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution, scaled to [-1, 1] (appendix E of the paper)."""


@dataclass(frozen=True, slots=True)
class Nf4Sizes:
    """Lengths of the stored tensors of P values."""

    codes: int
    """uint8, two values each."""
    scale_codes: int
    """uint8, one of each group."""
    scales: int
    """float32, one of 256 groups; one more float32 is the mean of all scales."""

    @classmethod
    def of(cls, num_values: int) -> "Nf4Sizes":
        """Return the lengths for this many values."""
        groups = -(-num_values // GROUP_SIZE)
        return cls(-(-num_values // 2), groups, -(-groups // SCALE_GROUP_SIZE))


@cache
def quantiles(device: torch.device) -> Tensor:
    """Return the 16 values, float32."""
    return torch.tensor(QUANTILES, dtype=torch.float32, device=device)


@cache
def scale_map(device: torch.device) -> Tensor:
    """Return the 256 values of the signed dynamic map, float32, increasing (bitsandbytes' create_dynamic_map)."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        centres = ((edges[:-1] + edges[1:]) / 2.0 * 10.0 ** (decade - 6)).tolist()
        values += [*centres, *(-centre for centre in centres)]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


def relative_to_largest(values_P: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return each float32 value over the largest magnitude of its ``group_size`` neighbours, and those magnitudes.

    The number of values is a multiple of ``group_size``.
    """
    rows = values_P.view(-1, group_size)
    largest = rows.abs().amax(-1)
    return (rows * (1.0 / largest.clamp(min=_SMALLEST))[:, None]).clamp_(-1, 1).view(-1), largest


def nearest(values_P: Tensor, table: Tensor) -> Tensor:
    """Return the index, int32, of the nearest number of an increasing table; half way, of the lower one."""
    return torch.bucketize(values_P, (table[:-1] + table[1:]) / 2, out_int32=True)


@cache
def _grid_codes(device: torch.device) -> Tensor:
    """Return the code of each of 65536 even steps from -1 to 1: bitsandbytes' CPU function knows no finer ones."""
    steps = torch.arange(_GRID, dtype=torch.float32, device=device) / (_GRID - 1)
    return nearest(steps * 2 - 1, scale_map(device)).to(torch.uint8)


def padded(values_P: Tensor, multiple: int) -> Tensor:
    """Return the values with zeros up to a multiple, which change no group's largest magnitude."""
    missing = -values_P.numel() % multiple
    return torch.nn.functional.pad(values_P, (0, missing)) if missing else values_P


def encode_scales(largest_G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the groups' scales as (G,) uint8 codes, (S,) float32 scales of those, and the (1,) mean."""
    mean = largest_G.mean()
    relative_G, scales_S = relative_to_largest(padded(largest_G - mean, SCALE_GROUP_SIZE), SCALE_GROUP_SIZE)
    steps_G = ((relative_G[: largest_G.numel()] + 1.0) * 0.5 * (_GRID - 1) + 0.5).int()
    return _grid_codes(largest_G.device)[steps_G], scales_S, mean.view(1)


def decode_scales(scale_codes_G: Tensor, scales_S: Tensor, mean: Tensor) -> Tensor:
    """Return the groups' scales, (G,) float32."""
    table = scale_map(scales_S.device)
    wide_S = scales_S.repeat_interleave(SCALE_GROUP_SIZE)[: scale_codes_G.numel()]
    return table[scale_codes_G.int()] * wide_S + mean


def encode_codes(values_P: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values' codes, (ceil(P / 2),) uint8, and their groups' largest magnitudes, (G,) float32."""
    relative_P, largest_G = relative_to_largest(padded(values_P.float(), GROUP_SIZE), GROUP_SIZE)
    index = nearest(relative_P, quantiles(values_P.device)).to(torch.uint8)
    pairs = index[: values_P.numel() + values_P.numel() % 2].view(-1, 2)
    return (pairs[:, 0] << 4) | pairs[:, 1], largest_G


def values_of(codes: Tensor, scales_G: Tensor, count: int) -> Tensor:
    """Return ``count`` float32 values of codes and decoded scales of their groups."""
    index = torch.stack([codes >> 4, codes & 15], dim=1).view(-1)[:count]
    return quantiles(codes.device)[index.int()].mul_(scales_G.repeat_interleave(GROUP_SIZE)[:count])


def nf4_quantize_reference(values_P: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes, codes of scales, their scales and the mean scale of flat values."""
    codes, largest_G = encode_codes(values_P)
    return codes, *encode_scales(largest_G)


def nf4_dequantize_reference(
    codes: Tensor, scale_codes_G: Tensor, scales_S: Tensor, mean: Tensor, count: int
) -> Tensor:
    """Return ``count`` float32 values."""
    return values_of(codes, decode_scales(scale_codes_G, scales_S, mean), count)
