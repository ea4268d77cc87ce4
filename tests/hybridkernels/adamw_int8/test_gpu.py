"""The update on a real card against the CPU's, whatever implementation runs."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from hybridkernels.adamw_int8 import adamw_int8_, adamw_int8_rounded_
from hybridkernels.int8_quantize.reference import int8_quantize_reference
from hybridkernels.provider import use_provider
from hybridkernels.triton_launch import cuda_backend
from numerics import assert_bitwise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]

HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SIZES = pytest.mark.parametrize("num_elements", [1, 255, 256, 257, 5 * 1024 + 77, 2**20])
SEED = torch.tensor([-5])
Moments = tuple[Tensor, Tensor, Tensor, Tensor]


def trained_moments(num_elements: int) -> Moments:
    groups = -(-num_elements // 256)
    m_codes, v_codes = (torch.full((groups * 256,), code, dtype=torch.uint8) for code in (127, 0))
    moments = (m_codes, torch.zeros(groups), v_codes, torch.zeros(groups))
    for step in (1, 2, 3):
        adamw_int8_(torch.zeros(num_elements), random_grad(num_elements), moments, step=step, **HYPER)
    return moments


def random_grad(num_elements: int) -> Tensor:
    return torch.randn(num_elements) * 10.0 ** (-4 * torch.rand(num_elements))


def on_card(tensors: Moments) -> Moments:
    m_codes, m_scale, v_codes, v_scale = (tensor.cuda() for tensor in tensors)
    return m_codes, m_scale, v_codes, v_scale


def assert_same_moments(actual: Moments, expected: Moments) -> None:
    for tensor, wanted in zip(actual, expected, strict=True):
        if wanted.dtype == torch.float32:
            torch.testing.assert_close(tensor.cpu(), wanted, rtol=2e-6, atol=0)  # a few roundings, some of them fused
        else:
            gap = (tensor.cpu().int() - wanted.int()).abs()
            assert gap.max() <= 1
            # Values within a few roundings of a midpoint: a cell is a tenth to a hundredth of its magnitude.
            assert (gap > 0).sum() <= 3 + len(gap) * 1e-4


def skip_without(provider: str) -> None:
    if provider == "triton" and cuda_backend() != "triton":
        pytest.skip("Triton cannot run here")
    if provider == "bitsandbytes" and find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")


@DTYPES
@SIZES
@pytest.mark.parametrize("provider", ["bitsandbytes", "triton", "torch"])
def test_a_card_gives_the_update_of_the_cpu(provider: str, num_elements: int, dtype: torch.dtype) -> None:
    skip_without(provider)
    param, grad, moments = torch.randn(num_elements), random_grad(num_elements).to(dtype), trained_moments(num_elements)
    param_card, moments_card = param.cuda(), on_card(moments)
    with use_provider("adamw_int8", provider):
        adamw_int8_(param_card, grad.cuda(), moments_card, step=4, **HYPER)
    adamw_int8_(param, grad, moments, step=4, **HYPER)
    # A few roundings of the update, lr / 0.1 at most, and of quotients that cards approximate to two units.
    torch.testing.assert_close(param_card.cpu(), param, rtol=1e-6, atol=2e-6)
    assert_same_moments(moments_card, moments)


@DTYPES
@SIZES
@pytest.mark.parametrize("provider", ["triton", "torch"])
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_a_card_draws_the_numbers_of_the_cpu(kind: str, provider: str, num_elements: int, dtype: torch.dtype) -> None:
    skip_without(provider)
    value, grad, moments = torch.randn(num_elements), random_grad(num_elements).to(dtype), trained_moments(num_elements)
    weight = int8_quantize_reference(value) if kind == "int8" else (value.bfloat16(),)
    weight_card, moments_card = tuple(tensor.cuda() for tensor in weight), on_card(moments)
    with use_provider("adamw_int8_rounded", provider):
        adamw_int8_rounded_(weight_card, grad.cuda(), moments_card, step=4, seed=SEED.cuda(), **HYPER)
    adamw_int8_rounded_(weight, grad, moments, step=4, seed=SEED, **HYPER)
    assert_same_moments(moments_card, moments)
    # Values a few roundings apart part with a probability of some units of 2^-16, or of an int8 scale's digits.
    differ = (weight_card[0].cpu().float() != weight[0].float()).sum()
    assert differ <= 3 + num_elements * 1e-3
    if kind == "int8":
        torch.testing.assert_close(weight_card[1].cpu(), weight[1], rtol=2e-6, atol=0)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_equal_seeds_give_equal_weights(kind: str) -> None:
    value, grad = torch.randn(10_000, device="cuda"), torch.randn(10_000, device="cuda")
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        weight = (
            tuple(t.cuda() for t in int8_quantize_reference(value.cpu())) if kind == "int8" else (value.bfloat16(),)
        )
        moments = (
            torch.full((40 * 256,), 127, dtype=torch.uint8, device="cuda"), torch.zeros(40, device="cuda"),
            torch.zeros(40 * 256, dtype=torch.uint8, device="cuda"), torch.zeros(40, device="cuda"),
        )  # fmt: skip
        adamw_int8_rounded_(weight, grad, moments, step=1, **HYPER)
        results.append(weight)
    for first, second in zip(*results, strict=True):
        assert_bitwise(first.cpu(), second.cpu())
