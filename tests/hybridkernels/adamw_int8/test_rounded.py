"""The update of weights that are bfloat16 or 8-bit codes, on the CPU: its rounding, its edges, and what it refuses."""

import math

import pytest
import torch
from torch import Tensor

from hybridkernels.adamw_int8 import QUANT_GROUP_SIZE, adamw_int8_, adamw_int8_rounded_, op
from hybridkernels.adamw_int8.reference import store_weight
from hybridkernels.int8_quantize.philox import random_words
from hybridkernels.int8_quantize.reference import int8_dequantize_reference, int8_quantize_reference
from numerics import assert_bitwise, assert_follows

OP = torch.ops.hybridkernels.adamw_int8_rounded_.default
HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
KINDS = pytest.mark.parametrize("kind", ["bfloat16", "int8"])
SEED = torch.tensor([7])
Moments = tuple[Tensor, Tensor, Tensor, Tensor]


def fresh_moments(num_elements: int) -> Moments:
    groups = math.ceil(num_elements / QUANT_GROUP_SIZE)
    m_codes, v_codes = (torch.full((groups * QUANT_GROUP_SIZE,), code, dtype=torch.uint8) for code in (127, 0))
    return m_codes, torch.zeros(groups), v_codes, torch.zeros(groups)


def weight_of(value: Tensor, kind: str) -> tuple[Tensor, ...]:
    return int8_quantize_reference(value) if kind == "int8" else (value.bfloat16(),)


def value_of(weight: tuple[Tensor, ...]) -> Tensor:
    return weight[0].float() if len(weight) == 1 else int8_dequantize_reference(*weight)


def copied(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.clone() for tensor in tensors)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_elements", [1, 255, 256, 257, 1000])
def test_it_is_the_float32_update_rounded_with_the_seeds_words(
    num_elements: int, dtype: torch.dtype, kind: str
) -> None:
    weight, moments = weight_of(torch.randn(num_elements), kind), fresh_moments(num_elements)
    expected, expected_moments = value_of(weight), fresh_moments(num_elements)
    for step in (1, 2):
        grad = torch.randn(num_elements).to(dtype)
        adamw_int8_(expected, grad, expected_moments, step=step, **HYPER)
        wanted = copied(weight)
        store_weight(expected, wanted, random_words(SEED, num_elements))
        adamw_int8_rounded_(weight, grad, moments, step=step, seed=SEED, **HYPER)
        for actual, tensor in zip((*weight, *moments), (*wanted, *expected_moments), strict=True):
            assert_bitwise(actual, tensor)
        expected = value_of(weight)


@KINDS
def test_slices_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for length in (op._SLICE_ELEMENTS, 512):
        torch.manual_seed(0)
        monkeypatch.setattr(op, "_SLICE_ELEMENTS", length)
        weight, moments = weight_of(torch.randn(1500), kind), fresh_moments(1500)
        adamw_int8_rounded_(weight, torch.randn(1500), moments, step=1, seed=SEED, **HYPER)
        results.append((*weight, *moments))
    for whole, sliced in zip(*results, strict=True):
        # The compiled loop takes whole groups, the reference a short one: which is which does not depend on slices.
        assert_bitwise(whole, sliced)


def test_bfloat16_goes_to_one_of_its_neighbours_with_the_probability_of_its_distance() -> None:
    value = torch.full((100_000,), 1 + 0.3 * 2.0**-7)
    weight = (torch.empty(100_000, dtype=torch.bfloat16),)
    store_weight(value, weight, random_words(SEED, 100_000))
    assert set(weight[0].unique().tolist()) == {1.0, 1 + 2.0**-7}
    share = (weight[0] > 1).double().mean().item()
    # Five standard deviations, and the 16th bit that the words lack.
    assert abs(share - 0.3) <= 5 * (0.3 * 0.7 / 100_000) ** 0.5 + 2.0**-16


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_bfloat16_values_stay_what_they_are(sign: float) -> None:
    smallest = torch.finfo(torch.bfloat16).smallest_normal
    kept = torch.tensor([0.0, 1.0, 1.5, smallest, torch.finfo(torch.bfloat16).max, torch.inf]) * sign
    weight = (torch.empty(len(kept), dtype=torch.bfloat16),)
    store_weight(kept, weight, torch.full((len(kept),), 2**32 - 1))
    assert_bitwise(weight[0].float(), kept)


def test_every_nan_stays_one() -> None:
    # 0x7FFFFFFF is what CUDA computes; 16 random bits more would wrap it into a negative zero.
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, -0x400000], dtype=torch.int32)
    for word in (0, 2**32 - 1):
        weight = (torch.zeros(len(bits), dtype=torch.bfloat16),)
        store_weight(bits.view(torch.float32), weight, torch.full((len(bits),), word))
        assert weight[0].isnan().all()


def test_values_beyond_the_largest_bfloat16_may_become_infinite() -> None:
    weight = (torch.zeros(2, dtype=torch.bfloat16),)
    store_weight(torch.tensor([3.4e38, -3.4e38]), weight, torch.full((2,), 2**32 - 1))
    assert weight[0].tolist() == [math.inf, -math.inf]


@KINDS
def test_it_follows_fp32_weights_on_a_quadratic(kind: str) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        target, curvature = torch.randn(2048), 10.0 ** (-2 * torch.rand(2048))
        weight, moments = weight_of(torch.zeros(2048), kind), fresh_moments(2048)
        exact, exact_moments = torch.zeros(2048), fresh_moments(2048)
        losses: dict[str, list[float]] = {"rounded": [], "float32": []}
        hyper = {**HYPER, "weight_decay": 0.0}
        for step in range(1, 201):
            for name, value in (("rounded", value_of(weight)), ("float32", exact)):
                losses[name].append((0.5 * curvature * (value - target).square()).mean().item())
            adamw_int8_rounded_(weight, curvature * (value_of(weight) - target), moments, step=step, **hyper)
            adamw_int8_(exact, curvature * (exact - target), exact_moments, step=step, **hyper)
        # Rounding to nearest would stand still at the beginning, 8 bits being 1 / 127 of a group's largest.
        assert_follows(losses["rounded"], losses["float32"], band=0.02 * losses["float32"][0])


@KINDS
def test_the_seed_comes_from_the_global_generator_unless_given(kind: str) -> None:
    start = weight_of(torch.randn(1000), kind)
    grad, draws = torch.randn(1000), []
    for seed, given in ((1, None), (1, None), (2, None), (1, SEED), (2, SEED)):
        weight = copied(start)
        torch.manual_seed(seed)
        adamw_int8_rounded_(weight, grad, fresh_moments(1000), step=1, seed=given, **HYPER)
        draws.append(weight[0])
    assert_bitwise(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert_bitwise(draws[3], draws[4])


@KINDS
@pytest.mark.parametrize("num_elements", [0, 256, 300])
def test_the_op_passes_torchs_own_checks(num_elements: int, kind: str) -> None:
    weight, moments = weight_of(torch.randn(num_elements), kind), fresh_moments(num_elements)
    values, scales = weight if kind == "int8" else (weight[0], None)
    arguments = (values, scales, torch.randn(num_elements), *moments, 1e-2, 0.9, 0.95, 1e-8, 0.1, 4, SEED)
    torch.library.opcheck(OP, arguments, test_utils=("test_schema", "test_faketensor"))


@KINDS
def test_meta_tensors_pass(kind: str) -> None:
    tensors = [torch.empty_like(tensor, device="meta") for tensor in weight_of(torch.zeros(1000), kind)]
    m_codes, m_scale, v_codes, v_scale = (torch.empty_like(tensor, device="meta") for tensor in fresh_moments(1000))
    grad = torch.empty(1000, device="meta")
    adamw_int8_rounded_(tuple(tensors), grad, (m_codes, m_scale, v_codes, v_scale), step=1, **HYPER)


@pytest.mark.parametrize(
    ("position", "wrong", "named"),
    [
        ("weight", (torch.zeros(300),), r"weight is torch.float32 \(300,\) on cpu; allowed: torch.bfloat16 \(300,\)"),
        ("weight", (torch.zeros(600).bfloat16()[::2],), "on cpu, not contiguous; allowed"),
        ("weight", (torch.zeros(300, dtype=torch.int8), torch.zeros(1)), r"weight scales is torch.float32 \(1,\)"),
        ("grad", torch.zeros(300, dtype=torch.int64), "torch.float32 or torch.bfloat16 or torch.float16"),
        ("grad", torch.zeros(301), r"weight is torch.bfloat16 \(300,\)"),
        ("moments", fresh_moments(200), r"m codes is torch.uint8 \(256,\) on cpu; allowed: torch.uint8 \(512,\)"),
        ("seed", torch.zeros(1), r"seed is torch.float32 \(1,\) on cpu; allowed: torch.int64 \(1,\)"),
    ],
)
def test_a_wrong_argument_is_named(position: str, wrong: Tensor | tuple[Tensor, ...], named: str) -> None:
    arguments = {
        "weight": (torch.zeros(300, dtype=torch.bfloat16),),
        "grad": torch.zeros(300),
        "moments": fresh_moments(300),
        "seed": SEED,
    }
    with pytest.raises(ValueError, match=named):
        adamw_int8_rounded_(**{**arguments, position: wrong}, step=1, **HYPER)
