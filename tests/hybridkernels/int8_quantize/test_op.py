"""8-bit codes with a scale per 256 values: against the reference, at the edges, and what rounding does to the mean."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridkernels.int8_quantize import GROUP_SIZE, int8_dequantize, int8_quantize, num_groups, op
from hybridkernels.int8_quantize.reference import int8_dequantize_reference, int8_quantize_reference
from numerics import assert_bitwise

QUANTIZE = torch.ops.hybridkernels.int8_quantize.default
DEQUANTIZE = torch.ops.hybridkernels.int8_dequantize.default
SIZES = [1, 2, 255, 256, 257, 1000, 5 * 1024 + 3]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDINGS = pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
SLACK = 1e-4
"""Of a scale: a quotient and a product of up to 127 scales round by 8e-6 of a scale each."""


def quantize(
    values: Tensor, *, stochastic: bool = False, static_scales_G: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return codes and scales from buffers that held something else."""
    codes = torch.full(values.shape, 99, dtype=torch.int8)
    scales_G = torch.full((num_groups(values.numel()),), 99.0)
    if static_scales_G is not None:
        scales_G.copy_(static_scales_G)
    int8_quantize(values, codes, scales_G, stochastic=stochastic, static=static_scales_G is not None)
    return codes, scales_G


def dequantize(codes: Tensor, scales_G: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full(codes.shape, 99.0, dtype=dtype)
    int8_dequantize(codes, scales_G, out)
    return out


def random_values(num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return values of both signs over four decades."""
    return (torch.randn(num_elements) * 10.0 ** (-4 * torch.rand(num_elements))).to(dtype)


def scale_of_each(scales_G: Tensor, num_elements: int) -> Tensor:
    return scales_G.repeat_interleave(GROUP_SIZE)[:num_elements]


@pytest.fixture(params=[256, 1024], ids=["slices of 256", "slices of 1024"])
def small_slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a few thousand values need many slices."""
    monkeypatch.setitem(op._SLICE_ELEMENTS, "cpu", request.param)


@ROUNDINGS
@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_elements", SIZES)
def test_the_op_equals_the_reference(num_elements: int, dtype: torch.dtype, *, stochastic: bool) -> None:
    values = random_values(num_elements, dtype)
    torch.manual_seed(3)
    codes, scales_G = quantize(values, stochastic=stochastic)
    torch.manual_seed(3)
    expected = int8_quantize_reference(values, uniform_P=torch.rand(num_elements) if stochastic else None)
    assert_bitwise(codes, expected[0], "codes")
    assert_bitwise(scales_G, expected[1], "scales")
    assert_bitwise(dequantize(codes, scales_G, dtype), int8_dequantize_reference(codes, scales_G).to(dtype), "values")


@ROUNDINGS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_of_full_length_equal_the_reference(dtype: torch.dtype, *, stochastic: bool) -> None:
    num_elements = op._SLICE_ELEMENTS["cpu"] + 300
    values = random_values(num_elements, dtype)
    torch.manual_seed(3)
    codes, scales_G = quantize(values, stochastic=stochastic)
    torch.manual_seed(3)
    expected = int8_quantize_reference(values, uniform_P=torch.rand(num_elements) if stochastic else None)
    assert_bitwise(codes, expected[0], "codes")
    assert_bitwise(scales_G, expected[1], "scales")


@ROUNDINGS
@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_elements", SIZES)
def test_static_scales_are_used_as_given(num_elements: int, dtype: torch.dtype, *, stochastic: bool) -> None:
    values = random_values(num_elements, dtype)
    given_G = torch.rand(num_groups(num_elements)) * 0.02
    given_G[::3] = 0.0
    torch.manual_seed(3)
    codes, scales_G = quantize(values, stochastic=stochastic, static_scales_G=given_G)
    torch.manual_seed(3)
    uniform_P = torch.rand(num_elements) if stochastic else None
    expected = int8_quantize_reference(values, scales_G=given_G, uniform_P=uniform_P)
    assert_bitwise(codes, expected[0], "codes")
    assert_bitwise(scales_G, given_G, "scales")


@ROUNDINGS
@pytest.mark.parametrize("num_elements", SIZES)
def test_static_scales_clamp_larger_values(num_elements: int, *, stochastic: bool) -> None:
    values = random_values(num_elements)
    given_G = torch.full((num_groups(num_elements),), 0.002)
    back = dequantize(*quantize(values, stochastic=stochastic, static_scales_G=given_G))
    clamped = values.clamp(-127 * 0.002, 127 * 0.002)
    assert ((back - clamped).abs() <= 0.002 * ((1.0 if stochastic else 0.5) + SLACK)).all()


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-39, -1.0])
def test_a_static_scale_that_cannot_divide_gives_zeros(scale: float) -> None:
    codes, scales_G = quantize(random_values(300), static_scales_G=torch.full((2,), scale))
    assert not codes.any()
    assert_bitwise(scales_G, torch.full((2,), scale))
    assert not dequantize(codes, scales_G).any()


@ROUNDINGS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_elements", SIZES)
def test_nearest_is_at_most_half_a_scale_away_and_stochastic_a_whole_one(
    num_elements: int, dtype: torch.dtype, *, stochastic: bool
) -> None:
    values = random_values(num_elements, dtype)
    codes, scales_G = quantize(values, stochastic=stochastic)
    error = (dequantize(codes, scales_G) - values.float()).abs()
    assert (error <= scale_of_each(scales_G, num_elements) * ((1.0 if stochastic else 0.5) + SLACK)).all()


@ROUNDINGS
def test_the_largest_value_of_a_group_has_the_largest_code(*, stochastic: bool) -> None:
    values = random_values(64 * GROUP_SIZE)
    codes_GS = quantize(values, stochastic=stochastic)[0].view(-1, GROUP_SIZE).int()
    # Its quotient is 127 up to one rounding: stochastic rounding may take that for 126.99999.
    assert (codes_GS.abs().amax(1) >= (126 if stochastic else 127)).all()
    assert codes_GS.min() >= -127


@ROUNDINGS
def test_multiples_of_the_scale_come_back_exactly(*, stochastic: bool) -> None:
    values = torch.arange(-127, 128).float().mul(0.125)
    codes, scales_G = quantize(values, stochastic=stochastic)
    assert codes.tolist() == list(range(-127, 128))
    assert_bitwise(dequantize(codes, scales_G), values)


def test_ties_go_to_the_even_code() -> None:
    values = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    assert quantize(values)[0].tolist() == [127, 0, 2, 2, 0, -2, -2]


@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.9])
@pytest.mark.parametrize("whole", [-126, 0, 126])
def test_stochastic_rounding_keeps_the_mean(whole: int, fraction: float) -> None:
    values_GS = torch.full((1000, GROUP_SIZE), (whole + fraction) / 8)
    values_GS[:, 0] = 127 / 8  # makes the scale 1/8
    codes_GS = quantize(values_GS, stochastic=True)[0][:, 1:]
    exact = values_GS[0, 1].double().item() * 8
    share = exact - whole
    draws = codes_GS.numel()
    # Binomial: five standard deviations are passed once in two million draws of this test.
    tolerance = 5 * math.sqrt(share * (1 - share) / draws)
    assert abs(codes_GS.double().mean().item() - exact) <= tolerance
    assert set(codes_GS.unique().tolist()) <= {whole, whole + 1}


def test_neighbours_are_rounded_independently() -> None:
    values_GS = torch.full((2000, GROUP_SIZE), 0.5)
    values_GS[:, 0] = 127.0
    up = quantize(values_GS, stochastic=True)[0][:, 1:].double() - 0.5
    for lag in (1, 2, 16):
        products = up[:, lag:] * up[:, :-lag] * 4  # each +1 or -1 equally probable
        assert abs(products.mean().item()) <= 5 / math.sqrt(products.numel())


def test_a_seed_decides_the_draws() -> None:
    values = random_values(5000)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(quantize(values, stochastic=True)[0])
    assert_bitwise(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_nearest_draws_nothing() -> None:
    values = random_values(5000)
    state = torch.get_rng_state()
    quantize(values)
    assert torch.equal(torch.get_rng_state(), state)


@ROUNDINGS
@pytest.mark.parametrize("static", [False, True])
def test_no_values_are_no_work(*, stochastic: bool, static: bool) -> None:
    codes, scales_G = quantize(
        torch.empty(0), stochastic=stochastic, static_scales_G=torch.empty(0) if static else None
    )
    assert codes.shape == scales_G.shape == dequantize(codes, scales_G).shape == (0,)


@ROUNDINGS
def test_a_group_of_zeros_stays_zero(*, stochastic: bool) -> None:
    values = random_values(4 * GROUP_SIZE)
    values[GROUP_SIZE : 2 * GROUP_SIZE] = 0
    values[3 * GROUP_SIZE :] = -0.0
    codes, scales_G = quantize(values, stochastic=stochastic)
    back_GS = dequantize(codes, scales_G).view(4, GROUP_SIZE)
    assert (scales_G == 0).tolist() == [False, True, False, True]
    assert not codes.view(4, GROUP_SIZE)[1::2].any()
    assert not back_GS[1::2].any()
    assert back_GS[0].any()


@ROUNDINGS
@pytest.mark.parametrize("magnitude", [3.4e38, 1e30, 1.0, 1e-30, 1.6e-36])
def test_extreme_magnitudes_keep_the_bound(magnitude: float, *, stochastic: bool) -> None:
    relative = torch.rand(GROUP_SIZE, dtype=torch.float64) * 2 - 1
    relative[7] = -1.0
    values = (relative * magnitude).float()
    codes, scales_G = quantize(values, stochastic=stochastic)
    error = (dequantize(codes, scales_G).double() - values.double()).abs()
    assert scales_G.item() == pytest.approx(magnitude / 127)
    assert (error <= scales_G.double() * ((1.0 if stochastic else 0.5) + SLACK)).all()


@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, 1.4e-36])
def test_a_group_too_small_for_a_normal_scale_counts_as_zero(magnitude: float) -> None:
    codes, scales_G = quantize(torch.full((300,), magnitude))
    assert scales_G.tolist() == [0.0, 0.0]
    assert not codes.any()


@ROUNDINGS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("fault", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_no_number_shows_in_its_whole_group_and_no_other(
    fault: float, dtype: torch.dtype, *, static: bool, stochastic: bool
) -> None:
    values = random_values(4 * GROUP_SIZE + 9, dtype)
    values[GROUP_SIZE + 5] = fault
    values[-1] = fault
    static_scales_G = torch.full((5,), 0.01) if static else None
    codes, scales_G = quantize(values, stochastic=stochastic, static_scales_G=static_scales_G)
    finite = dequantize(codes, scales_G, dtype).isfinite()
    assert scales_G.isfinite().tolist() == [True, False, True, True, False]
    assert torch.equal(finite, scale_of_each(scales_G, len(values)).isfinite())


def test_a_static_scale_that_is_no_number_shows() -> None:
    codes, scales_G = quantize(random_values(512), static_scales_G=torch.tensor([math.inf, math.nan]))
    assert not dequantize(codes, scales_G).isfinite().any()


def test_any_shape_is_read_in_memory_order() -> None:
    values = random_values(6 * 100)
    codes, scales_G = quantize(values)
    shaped_codes, shaped_scales_G = quantize(values.view(2, 3, 100))
    assert_bitwise(shaped_codes.flatten(), codes)
    assert_bitwise(shaped_scales_G, scales_G)
    assert_bitwise(dequantize(shaped_codes, shaped_scales_G).flatten(), dequantize(codes, scales_G))


def test_a_whole_buffer_may_be_filled_piece_by_piece() -> None:
    values = random_values(10 * GROUP_SIZE)
    codes, scales_G = torch.empty(values.shape, dtype=torch.int8), torch.empty(10)
    for first in range(0, 10, 5):
        part = slice(first * GROUP_SIZE, (first + 5) * GROUP_SIZE)
        int8_quantize(values[part], codes[part], scales_G[first : first + 5], stochastic=False)
    expected = quantize(values)
    assert_bitwise(codes, expected[0])
    assert_bitwise(scales_G, expected[1])


@pytest.mark.parametrize(
    ("values", "codes", "scales_G", "named"),
    [
        (torch.zeros(300).double(), torch.zeros(300, dtype=torch.int8), torch.zeros(2), "values is torch.float64"),
        (torch.zeros(300), torch.zeros(300, dtype=torch.uint8), torch.zeros(2), "codes is torch.uint8"),
        (torch.zeros(300), torch.zeros(299, dtype=torch.int8), torch.zeros(2), "int8 of 300 elements"),
        (torch.zeros(300), torch.zeros(300, dtype=torch.int8), torch.zeros(1), r"float32 of shape \(2,\)"),
        (torch.zeros(300), torch.zeros(300, dtype=torch.int8), torch.zeros(2).half(), "scales is torch.float16"),
        (torch.zeros(600)[::2], torch.zeros(300, dtype=torch.int8), torch.zeros(2), "not contiguous"),
    ],
)
def test_a_wrong_argument_is_named(values: Tensor, codes: Tensor, scales_G: Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        int8_quantize(values, codes, scales_G, stochastic=False)
    with pytest.raises(ValueError, match=named):
        int8_dequantize(codes, scales_G, values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_elements", [1, 300])
def test_the_ops_pass_torchs_own_checks(num_elements: int, dtype: torch.dtype) -> None:
    values = random_values(num_elements, dtype)
    codes, scales_G = quantize(values)
    checks = ("test_schema", "test_faketensor")
    for static in (False, True):
        arguments = (values, codes, scales_G, False, static)
        torch.library.opcheck(QUANTIZE, arguments, test_utils=(*checks, "test_aot_dispatch_dynamic"))
        torch.library.opcheck(QUANTIZE, (values, codes, scales_G, True, static), test_utils=checks)
    torch.library.opcheck(DEQUANTIZE, (codes, scales_G, values), test_utils=(*checks, "test_aot_dispatch_dynamic"))


@ROUNDINGS
def test_meta_tensors_pass(*, stochastic: bool) -> None:
    values = torch.empty(3_000_000_000, dtype=torch.bfloat16, device="meta")
    codes = torch.empty(3_000_000_000, dtype=torch.int8, device="meta")
    scales_G = torch.empty(num_groups(3_000_000_000), device="meta")
    int8_quantize(values, codes, scales_G, stochastic=stochastic)
    int8_dequantize(codes, scales_G, values)


class SeenOps(TorchDispatchMode):
    """Lists what the dispatcher is asked while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch._ops.OpOverload] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_dispatch_mode_sees_the_ops_and_nothing_inside(device: str) -> None:
    values = torch.zeros(1000, dtype=torch.bfloat16, device=device)
    codes, scales_G = torch.empty(1000, dtype=torch.int8, device=device), torch.empty(4, device=device)
    with SeenOps() as mode:
        int8_quantize(values, codes, scales_G, stochastic=True)
        int8_dequantize(codes, scales_G, values)
    assert mode.seen == [QUANTIZE, DEQUANTIZE]
