"""How a tensor that remembers a weight's trajectory is stored, and how a slice of it is read and written.

P elements of a flat slice. int8 codes are those of the signed dynamic map, as of first moments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from hybridkernels.adamw_int8.dynamic_map import QUANT_GROUP_SIZE, dequantize, quantize
from hybridtrain.memory.master_codec import round_stochastically

ZERO_CODE = 127
"""Code of the value zero in the signed map."""


@dataclass(frozen=True, slots=True)
class MomentSpec:
    """How one stored tensor of moments or history looks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    zero: int = 0
    """Stored value of the number zero."""


def grouped_specs(num_elements: int, zero: int) -> tuple[MomentSpec, MomentSpec]:
    """Return codes and scales of ``num_elements`` in whole groups of 256."""
    groups = -(-num_elements // QUANT_GROUP_SIZE)
    return MomentSpec((groups * QUANT_GROUP_SIZE,), torch.uint8, zero), MomentSpec((groups,), torch.float32)


def part_of(dtype: torch.dtype, part: slice, *, is_grouped: bool) -> slice:
    """Return the range of a stored tensor's elements that belongs to a range of the parameter's."""
    if not is_grouped:
        return part
    groups = slice(part.start // QUANT_GROUP_SIZE, -(-part.stop // QUANT_GROUP_SIZE))
    if dtype == torch.uint8:
        return slice(groups.start * QUANT_GROUP_SIZE, groups.stop * QUANT_GROUP_SIZE)
    return groups


def read_history(stored: Sequence[Tensor], num_elements: int) -> Tensor:
    """Return the (P,) float32 values: the stored tensor itself where it is float32."""
    if len(stored) == 1:
        return stored[0].float()
    codes, scales = stored
    return dequantize(codes.view(-1, QUANT_GROUP_SIZE), scales, signed=True).view(-1)[:num_elements]


def write_history(value_P: Tensor, stored: Sequence[Tensor]) -> None:
    """Store values that ``read_history`` returned and the caller changed; bfloat16 is rounded stochastically."""
    if len(stored) == 1:
        if stored[0].dtype != torch.float32:
            round_stochastically(value_P, stored[0])
        elif value_P is not stored[0]:
            stored[0].copy_(value_P)
        return
    codes, scales = stored
    padded_P = value_P
    if value_P.numel() < codes.numel():
        padded_P = value_P.new_zeros(codes.numel())
        padded_P[: value_P.numel()].copy_(value_P)
    new_codes, new_scales = quantize(padded_P.view(-1, QUANT_GROUP_SIZE), signed=True)
    codes.copy_(new_codes.view(-1))
    scales.copy_(new_scales)


def split_history(flat: Sequence[Tensor], num_tensors: int) -> list[list[Tensor]]:
    """Return the stored parts of each of ``num_tensors`` tensors."""
    if not num_tensors:
        return []
    rest = iter(flat)
    parts = len(flat) // num_tensors
    return [list(islice(rest, parts)) for _ in range(num_tensors)]
