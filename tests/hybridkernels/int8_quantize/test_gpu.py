"""8-bit codes on a real card: those of the CPU to the bit, whatever implementation runs."""

import math

import pytest
import torch
from torch import Tensor

from hybridkernels.int8_quantize import GROUP_SIZE, int8_dequantize, int8_quantize, num_groups
from hybridkernels.int8_quantize.philox import random_words, uniform_of
from hybridkernels.int8_quantize.reference import int8_dequantize_reference, int8_quantize_reference
from hybridkernels.provider import use_provider
from hybridkernels.triton_launch import cuda_backend
from numerics import assert_bitwise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 255, 256, 257, 5 * 1024 + 3, 2**20 + 16]
ROUNDINGS = pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])


def random_values(num_elements: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(num_elements) * 10.0 ** (-4 * torch.rand(num_elements))).to(dtype)


def empty_codes(num_elements: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty(num_elements, dtype=torch.int8, device="cuda")
    return codes, torch.empty(num_groups(num_elements), device="cuda")


def skip_without(provider: str) -> None:
    if provider == "triton" and cuda_backend() != "triton":
        pytest.skip("Triton cannot run here")


@pytest.mark.parametrize("provider", ["triton", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_elements", SIZES)
def test_cuda_gives_the_codes_of_the_reference(num_elements: int, dtype: torch.dtype, provider: str) -> None:
    skip_without(provider)
    values = random_values(num_elements, dtype)
    values[: num_elements // 4] *= 1e-37 if dtype == torch.float32 else 0
    expected, expected_G = int8_quantize_reference(values)
    codes, scales_G = empty_codes(num_elements)
    back = values.cuda()
    with use_provider("int8_quantize", provider), use_provider("int8_dequantize", provider):
        int8_quantize(back, codes, scales_G, stochastic=False)
        int8_dequantize(codes, scales_G, back)
    assert_bitwise(codes.cpu(), expected, "codes")
    assert_bitwise(scales_G.cpu(), expected_G, "scales")
    assert_bitwise(back.cpu(), int8_dequantize_reference(expected, expected_G).to(dtype), "values")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_elements", SIZES)
def test_tritons_draws_are_those_of_plain_torch(num_elements: int, dtype: torch.dtype) -> None:
    skip_without("triton")
    from hybridkernels.int8_quantize.triton_kernel import int8_quantize_triton  # noqa: PLC0415  optional

    values, seed = random_values(num_elements, dtype), torch.tensor([-12345678901234])
    expected, expected_G = int8_quantize_reference(values, uniform_P=uniform_of(random_words(seed, num_elements)))
    codes, scales_G = empty_codes(num_elements)
    int8_quantize_triton(values.cuda(), codes, scales_G, stochastic=True, static=False, seed=seed.cuda())
    assert_bitwise(codes.cpu(), expected, "codes")
    assert_bitwise(scales_G.cpu(), expected_G, "scales")


@ROUNDINGS
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("fault", [math.inf, -math.inf, math.nan])
def test_a_fault_shows_in_its_group_and_no_other(fault: float, *, static: bool, stochastic: bool) -> None:
    values = random_values(4 * GROUP_SIZE + 9, torch.float32)
    values[GROUP_SIZE + 5] = fault
    values[-1] = fault
    codes, scales_G = empty_codes(len(values))
    scales_G.fill_(0.01)
    int8_quantize(values.cuda(), codes, scales_G, stochastic=stochastic, static=static)
    assert scales_G.isfinite().tolist() == [True, False, True, True, False]
    assert not codes.view(-1)[GROUP_SIZE : 2 * GROUP_SIZE].any()


@pytest.mark.parametrize("provider", ["triton", "torch"])
@ROUNDINGS
def test_cuda_stays_within_the_stated_workspace(provider: str, *, stochastic: bool) -> None:
    skip_without(provider)
    num_elements = 2**25 + 300
    values = torch.randn(num_elements, device="cuda")
    codes, scales_G = empty_codes(num_elements)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with use_provider("int8_quantize", provider):
        int8_quantize(values, codes, scales_G, stochastic=stochastic)
    taken = torch.cuda.max_memory_allocated() - before
    # A seed; in torch's ops buffers of one slice, and 16 bytes a group for its largest magnitude, scale and masks.
    stated = 8 * stochastic if provider == "triton" else (12 if stochastic else 8) * 2**24 + 16 * 2**16
    assert taken <= -(-stated // 512) * 512  # the allocator gives out multiples of 512 bytes
