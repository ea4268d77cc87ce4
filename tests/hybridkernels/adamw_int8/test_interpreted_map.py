"""The 8-bit map in Triton's interpreter: its codes are those of dynamic_map.py, for every float around every border."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridkernels.adamw_int8.dynamic_map import BORDERS, dynamic_map, quantize
from hybridkernels.adamw_int8.triton_kernel import encode
from numerics import assert_bitwise

SIGNS = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
ROWS = 64
NEIGHBOURS = torch.arange(-300, 301, dtype=torch.int32)
"""An index near 127 carries a rounding of 4e-6 of a cell, a cell is a hundredth of its magnitude: within 10 floats."""


@triton.jit
def encode_kernel(values_ptr, codes_ptr, scale_ptr, SIGNED: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Write codes and scales of R rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offsets = rows[:, None] * 256 + tl.arange(0, 256)[None, :]
    codes, scales = encode(tl.load(values_ptr + offsets), SIGNED)
    tl.store(codes_ptr + offsets, codes)
    tl.store(scale_ptr + rows, scales)


def assert_encoded_as_in_torch(values_GS: Tensor, *, signed: bool) -> None:
    padded_GS = torch.nn.functional.pad(values_GS, (0, 0, 0, -len(values_GS) % ROWS)).contiguous()
    codes_GS, scale_G = torch.empty(padded_GS.shape, dtype=torch.uint8), torch.empty(len(padded_GS))
    encode_kernel[(len(padded_GS) // ROWS,)](padded_GS, codes_GS, scale_G, signed, ROWS)
    expected_GS, expected_G = quantize(padded_GS, signed=signed)
    assert_bitwise(codes_GS, expected_GS, "codes")
    assert_bitwise(scale_G, expected_G, "scales")


def around_every_border(*, signed: bool) -> Tensor:
    """Return rows that begin with 1 and hold the floats around every midpoint, decade border, value, and zero."""
    values = torch.tensor(dynamic_map(signed=signed), dtype=torch.float64).abs()
    midpoints = (values[:-1] + values[1:]).abs() / 2
    borders = torch.tensor(BORDERS[signed], dtype=torch.float64)
    points = torch.cat([midpoints, borders, values]).float().view(torch.int32)
    one = torch.tensor(1.0).view(torch.int32)
    magnitudes = (points[:, None] + NEIGHBOURS).clamp(min=0).minimum(one).view(torch.float32).flatten()
    relative = torch.cat([magnitudes, -magnitudes]) if signed else magnitudes
    rows = torch.nn.functional.pad(relative, (0, -len(relative) % 255)).view(-1, 255)
    return torch.cat([torch.ones(len(rows), 1), rows], dim=1)


@SIGNS
@pytest.mark.parametrize("scale", [1.0, 3e-5, 7e20])
def test_codes_around_every_border_are_torchs(scale: float, *, signed: bool) -> None:
    assert_encoded_as_in_torch(around_every_border(signed=signed) * scale, signed=signed)


@SIGNS
def test_codes_of_any_magnitude_are_torchs(*, signed: bool) -> None:
    values = 10.0 ** (-10 * torch.rand(256, 256))
    assert_encoded_as_in_torch(values * (torch.randn(256, 256).sign() if signed else 1), signed=signed)


@SIGNS
@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-45, 1e-39, 2.0**-126, 3e38])
def test_extreme_groups_are_encoded_as_in_torch(scale: float, *, signed: bool) -> None:
    values = torch.rand(ROWS, 256) * (torch.randn(ROWS, 256).sign() if signed else 1)
    assert_encoded_as_in_torch(values * scale, signed=signed)
