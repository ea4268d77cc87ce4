"""The Triton kernels in Triton's interpreter: codes and scales are the reference's to the bit, faults included."""

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridkernels.int8_quantize import GROUP_SIZE, num_groups
from hybridkernels.int8_quantize.philox import random_words, uniform_of
from hybridkernels.int8_quantize.reference import int8_dequantize_reference, int8_quantize_reference
from hybridkernels.int8_quantize.triton_kernel import int8_dequantize_triton, int8_quantize_triton
from hybridkernels.int8_quantize.triton_rounding import random_words as triton_words
from numerics import assert_bitwise

SIZES = [1, 2, 255, 256, 257, 1000, 5 * 1024 + 3]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDINGS = pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
SEED = torch.tensor([-0x123456789ABCDEF])


def quantize(
    values: Tensor, *, stochastic: bool = False, given_G: Tensor | None = None, seed: Tensor | None = SEED
) -> tuple[Tensor, Tensor]:
    """Return codes and scales from buffers that held something else."""
    codes = torch.full(values.shape, 99, dtype=torch.int8)
    scales_G = torch.full((num_groups(values.numel()),), 99.0) if given_G is None else given_G.clone()
    int8_quantize_triton(values, codes, scales_G, stochastic=stochastic, static=given_G is not None, seed=seed)
    return codes, scales_G


def expected(values: Tensor, *, stochastic: bool, given_G: Tensor | None = None) -> tuple[Tensor, Tensor]:
    uniform_P = uniform_of(random_words(SEED, values.numel())) if stochastic else None
    return int8_quantize_reference(values, scales_G=given_G, uniform_P=uniform_P)


def random_values(num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return values of both signs over four decades."""
    return (torch.randn(num_elements) * 10.0 ** (-4 * torch.rand(num_elements))).to(dtype)


def assert_as_reference(values: Tensor, *, stochastic: bool, given_G: Tensor | None = None) -> None:
    codes, scales_G = quantize(values, stochastic=stochastic, given_G=given_G)
    codes_reference, scales_reference_G = expected(values, stochastic=stochastic, given_G=given_G)
    assert_bitwise(codes, codes_reference, "codes")
    # A NaN has many patterns, and the processor's own differs from torch's constant.
    assert torch.equal(scales_G.isnan(), scales_reference_G.isnan())
    assert_bitwise(scales_G.nan_to_num(nan=-1.0), scales_reference_G.nan_to_num(nan=-1.0), "scales")


@ROUNDINGS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_elements", SIZES)
def test_codes_and_scales_are_the_references(num_elements: int, dtype: torch.dtype, *, stochastic: bool) -> None:
    assert_as_reference(random_values(num_elements, dtype), stochastic=stochastic)


@ROUNDINGS
@pytest.mark.parametrize("num_elements", SIZES)
def test_given_scales_are_used_as_given(num_elements: int, *, stochastic: bool) -> None:
    given_G = torch.rand(num_groups(num_elements)) * 0.02
    given_G[::3] = 0.0
    assert_as_reference(random_values(num_elements), stochastic=stochastic, given_G=given_G)


@ROUNDINGS
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-39, 2.0**-126, 1e38, -1.0, math.inf, math.nan])
def test_given_scales_of_every_kind_give_what_the_reference_gives(scale: float, *, stochastic: bool) -> None:
    assert_as_reference(random_values(300), stochastic=stochastic, given_G=torch.full((2,), scale))


@ROUNDINGS
@pytest.mark.parametrize("magnitude", [3.4e38, 1e30, 1.0, 1e-30, 1.6e-36, 1.5e-36, 1.4e-36, 1e-40, 1e-45, 0.0])
def test_extreme_magnitudes_are_the_references(magnitude: float, *, stochastic: bool) -> None:
    relative = torch.rand(600, dtype=torch.float64) * 2 - 1
    relative[::100] = -1.0
    assert_as_reference((relative * magnitude).float(), stochastic=stochastic)


def test_scales_around_the_smallest_normal_number_are_the_references() -> None:
    # The last bit decides between a scale and none.
    border = torch.tensor(127 * 2.0**-126).view(torch.int32)
    values = (border + torch.arange(-40, 41, dtype=torch.int32)).view(torch.float32).repeat_interleave(GROUP_SIZE)
    scales_G = quantize(values)[1]
    assert (scales_G == 0).any()
    assert (scales_G > 0).any()
    assert_as_reference(values, stochastic=False)


def test_every_quotient_by_127_is_rounded_as_the_references() -> None:
    # A group for each magnitude: 400 mantissas, where a product with 1/127 would be wrong in the last bit of some.
    values = (1 + torch.rand(400)).repeat_interleave(GROUP_SIZE)
    assert not torch.equal(values[::GROUP_SIZE] * (1 / 127), values[::GROUP_SIZE] / 127)
    assert_as_reference(values, stochastic=False)


def test_ties_and_their_neighbours_are_rounded_to_nearest_even() -> None:
    ties = torch.arange(-126, 127).float() + 0.5
    values = torch.cat([ties, torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)])
    given_G = torch.ones(num_groups(len(values)))
    assert_as_reference(values, stochastic=False, given_G=given_G)
    assert torch.equal(quantize(ties, given_G=given_G[:1])[0], ties.round().to(torch.int8))


@ROUNDINGS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("fault", [math.inf, -math.inf, math.nan])
def test_a_fault_shows_in_its_group_and_no_other(
    fault: float, dtype: torch.dtype, *, static: bool, stochastic: bool
) -> None:
    values = random_values(4 * GROUP_SIZE + 9, dtype)
    values[GROUP_SIZE + 5] = fault
    values[-1] = fault
    given_G = torch.full((5,), 0.01) if static else None
    scales_G = quantize(values, stochastic=stochastic, given_G=given_G)[1]
    assert scales_G.isfinite().tolist() == [True, False, True, True, False]
    assert_as_reference(values, stochastic=stochastic, given_G=given_G)


@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.9])
@pytest.mark.parametrize("whole", [-126, 0])
def test_stochastic_rounding_keeps_the_mean(whole: int, fraction: float) -> None:
    values_GS = torch.full((60, GROUP_SIZE), (whole + fraction) / 8)
    values_GS[:, 0] = 127 / 8  # makes the scale 1/8
    codes_GS = quantize(values_GS, stochastic=True)[0][:, 1:]
    exact = values_GS[0, 1].double().item() * 8
    probability = exact - whole
    # Binomial: five standard deviations are passed once in two million draws of this test.
    tolerance = 5 * math.sqrt(probability * (1 - probability) / codes_GS.numel())
    assert abs(codes_GS.double().mean().item() - exact) <= tolerance
    assert set(codes_GS.unique().tolist()) <= {whole, whole + 1}


def test_stochastic_is_less_than_a_scale_away() -> None:
    values = random_values(5000)
    codes, scales_G = quantize(values, stochastic=True)
    error = (int8_dequantize_reference(codes, scales_G) - values).abs()
    # A quotient and a product of up to 127 scales round by 8e-6 of a scale each.
    assert (error < scales_G.repeat_interleave(GROUP_SIZE)[:5000] * (1 + 1e-4)).all()


def test_without_a_seed_the_global_generator_decides() -> None:
    values, draws = random_values(1000), []
    for start in (1, 1, 2):
        torch.manual_seed(start)
        draws.append(quantize(values, stochastic=True, seed=None)[0])
    assert_bitwise(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    state = torch.get_rng_state()
    quantize(values, seed=None)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("num_elements", SIZES)
def test_products_are_rounded_once(num_elements: int, dtype: torch.dtype) -> None:
    # The interpreter cuts float32 to bfloat16 instead of rounding it; a card is asked in test_gpu.py.
    codes, scales_G = quantize(random_values(num_elements))
    codes[-1] = -128
    out = torch.full((num_elements,), 99.0, dtype=dtype)
    int8_dequantize_triton(codes, scales_G, out)
    assert_bitwise(out, int8_dequantize_reference(codes, scales_G).to(dtype))


@pytest.mark.parametrize("num_elements", [1, 300, 2048, 2049])
def test_nothing_is_written_outside(num_elements: int) -> None:
    groups, room = num_groups(num_elements), 4096
    codes = torch.full((num_elements + 2 * room,), 99, dtype=torch.int8)
    scales_G = torch.full((groups + 2 * room,), 99.0)
    out = torch.full((num_elements + 2 * room,), 99.0)
    part, part_G = slice(room, room + num_elements), slice(room, room + groups)
    values = torch.full((num_elements,), 3.0)
    int8_quantize_triton(values, codes[part], scales_G[part_G], stochastic=True, static=False)
    int8_dequantize_triton(codes[part], scales_G[part_G], out[part])
    assert (codes[part] >= 126).all()
    assert (out[part] != 99.0).all()
    for buffer, written in ((codes, num_elements), (scales_G, groups), (out, num_elements)):
        assert (buffer == 99).sum() == buffer.numel() - written


def test_no_values_are_no_work() -> None:
    codes, scales_G = quantize(torch.empty(0))
    int8_dequantize_triton(codes, scales_G, torch.empty(0))
    assert codes.shape == scales_G.shape == (0,)


@triton.jit
def words_kernel(out_ptr, seed_ptr, first_row, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Write the words of R rows of 256 elements."""
    offsets = tl.arange(0, ROWS)[:, None] * 256 + tl.arange(0, 256)[None, :]
    tl.store(out_ptr + offsets, triton_words(tl.load(seed_ptr), first_row, ROWS).to(tl.int64))


@pytest.mark.parametrize("first_row", [0, 3, 2**26 - 2, 2**31 - 2])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1])
def test_the_words_are_those_of_plain_torch(seed: int, first_row: int) -> None:
    # Rows beyond 2^26 have counters of more than 32 bits.
    words = torch.empty(2 * 256, dtype=torch.int64)
    words_kernel[(1,)](words, torch.tensor([seed]), first_row, ROWS=2)
    assert_bitwise(words, random_words(torch.tensor([seed]), 2 * 256, first_row * 256))
