"""The 8-bit map: its values, nearest codes without a search, and the way back. G groups of S = 256 elements."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hybridkernels.adamw_int8.dynamic_map import (
    QUANT_GROUP_SIZE,
    dequantize,
    dynamic_map,
    map_values,
    quantize,
)

SIGNS = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
CPU = torch.device("cpu")


def bitsandbytes_map(*, signed: bool) -> list[float]:
    """Return ``create_dynamic_map`` of bitsandbytes, 8 bits with 7 exponent bits, written as it is there."""
    values = [0.0, 1.0]
    for exponent in range(7):
        fraction_items = 2**exponent + 1 if signed else 2 ** (exponent + 1) + 1
        boundaries = torch.linspace(0.1, 1, fraction_items, dtype=torch.float32)
        means = (boundaries[:-1] + boundaries[1:]) / 2.0
        centres = (10.0 ** (-6 + exponent) * means).tolist()
        values += centres
        if signed:
            values += [-centre for centre in centres]
    return sorted(values)


def search_nearest(relative: Tensor, *, signed: bool) -> Tensor:
    """Return the codes of the nearest values by a search, in float64."""
    values = torch.tensor(dynamic_map(signed=signed), dtype=torch.float64)
    midpoints = (values[:-1] + values[1:]) / 2
    return torch.bucketize(relative.double(), midpoints)


def whole_groups(relative: Tensor) -> Tensor:
    """Return values as groups whose largest magnitude is exactly 1: the first element is put there."""
    padded = torch.nn.functional.pad(relative.flatten(), (0, -relative.numel() % (QUANT_GROUP_SIZE - 1)))
    rest = padded.view(-1, QUANT_GROUP_SIZE - 1)
    return torch.cat([torch.ones(len(rest), 1), rest], dim=1)


def random_magnitudes(num_groups: int, *, signed: bool) -> Tensor:
    """Return values between 1e-8 and 1, evenly spread over the decades."""
    shape = (num_groups, QUANT_GROUP_SIZE - 1)
    magnitudes = 10.0 ** (-8 * torch.rand(shape))
    return magnitudes * torch.randint(0, 2, shape).mul(2).sub(1) if signed else magnitudes


@SIGNS
def test_there_are_256_increasing_values(*, signed: bool) -> None:
    values = dynamic_map(signed=signed)
    assert len(values) == 256
    assert all(low < high for low, high in pairwise(values))
    assert values[0] == (pytest.approx(-0.99296875) if signed else 0.0)
    assert values[-1] == 1.0


@SIGNS
def test_the_values_are_those_of_bitsandbytes(*, signed: bool) -> None:
    # bitsandbytes computes in float32: a few roundings of 6e-8.
    assert dynamic_map(signed=signed) == pytest.approx(bitsandbytes_map(signed=signed), rel=3e-7, abs=0)


@SIGNS
def test_every_code_gives_its_value(*, signed: bool) -> None:
    codes_GS = torch.arange(256, dtype=torch.uint8)[None]
    actual = dequantize(codes_GS, torch.ones(1), signed=signed)[0]
    # Three roundings of 6e-8 on the way, one of the table.
    torch.testing.assert_close(actual, map_values(CPU, signed=signed), rtol=4e-7, atol=0)


@SIGNS
def test_every_value_gives_its_code(*, signed: bool) -> None:
    values_GS = map_values(CPU, signed=signed)[None]
    codes_GS, scale_G = quantize(values_GS, signed=signed)
    assert codes_GS[0].tolist() == list(range(256))
    assert scale_G.tolist() == [1.0]


@SIGNS
def test_codes_are_those_of_the_nearest_value(*, signed: bool) -> None:
    values_GS = whole_groups(random_magnitudes(800, signed=signed))
    codes_GS, _ = quantize(values_GS, signed=signed)
    expected = search_nearest(values_GS, signed=signed)
    wrong = codes_GS.long() != expected
    # 204,000 magnitudes; one within a rounding of a midpoint may go either way, up to 2 were seen.
    assert wrong.sum() <= 4
    assert ((codes_GS.long() - expected).abs() <= 1).all()


@SIGNS
def test_codes_change_at_the_midpoints(*, signed: bool) -> None:
    values = torch.tensor(dynamic_map(signed=signed), dtype=torch.float64)
    midpoints = (values[:-1] + values[1:]) / 2
    # The index is floor(a + b * magnitude) in float32: an index near 127 carries a rounding of 4e-6 of a cell, and
    # a cell is a tenth to a hundredth of its magnitude.
    margin = 1e-6
    below = whole_groups(torch.where(midpoints > 0, midpoints * (1 - margin), midpoints * (1 + margin)).float())
    above = whole_groups(torch.where(midpoints > 0, midpoints * (1 + margin), midpoints * (1 - margin)).float())
    assert quantize(below, signed=signed)[0][0, 1:].tolist() == list(range(255))
    assert quantize(above, signed=signed)[0][0, 1:].tolist() == list(range(1, 256))


@SIGNS
def test_exact_midpoints_give_one_of_their_neighbours(*, signed: bool) -> None:
    values = torch.tensor(dynamic_map(signed=signed), dtype=torch.float64)
    midpoints = whole_groups(((values[:-1] + values[1:]) / 2).float())
    codes = quantize(midpoints, signed=signed)[0][0, 1:].long()
    lower = torch.arange(255)
    assert ((codes == lower) | (codes == lower + 1)).all()


@SIGNS
@pytest.mark.parametrize("magnitude", [1e-30, 1e-4, 1.0, 1e30])
def test_codes_do_not_depend_on_the_scale(magnitude: float, *, signed: bool) -> None:
    values_GS = whole_groups(random_magnitudes(20, signed=signed))
    codes_GS, scale_G = quantize(values_GS * magnitude, signed=signed)
    expected, _ = quantize(values_GS, signed=signed)
    assert torch.equal(scale_G, torch.full((20,), magnitude))
    # The product and the quotient by the scale round once each: only a value on a midpoint may move.
    assert (codes_GS != expected).sum() <= 1


@SIGNS
def test_a_group_of_zeros_has_scale_zero_and_stays_zero(*, signed: bool) -> None:
    zeros_GS = torch.zeros(2, QUANT_GROUP_SIZE)
    codes_GS, scale_G = quantize(zeros_GS, signed=signed)
    assert scale_G.tolist() == [0.0, 0.0]
    assert torch.equal(dequantize(codes_GS, scale_G, signed=signed), zeros_GS)


def test_each_group_has_a_scale_of_its_own() -> None:
    values_GS = torch.ones(3, QUANT_GROUP_SIZE) * torch.tensor([[1e-3], [2.0], [-50.0]])
    codes_GS, scale_G = quantize(values_GS, signed=True)
    torch.testing.assert_close(scale_G, torch.tensor([1e-3, 2.0, 50.0]), rtol=0, atol=0)
    assert codes_GS[0].unique().tolist() == [255]
    assert codes_GS[2].unique().tolist() == [0]  # there is no -1: its nearest value is -0.993


@SIGNS
def test_the_error_is_at_most_half_the_gap_between_values(*, signed: bool) -> None:
    values_GS = whole_groups(random_magnitudes(50, signed=signed))
    back = dequantize(*quantize(values_GS, signed=signed), signed=signed)
    values = map_values(CPU, signed=signed)
    half_gap = (values[1:] - values[:-1]).max() / 2
    # float32 rounding of values up to 1
    assert (back - values_GS).abs().max() <= half_gap + 1e-6
