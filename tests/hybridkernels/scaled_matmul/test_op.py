"""8-bit products as ops: what they compute, on meta too, their arithmetic, and how they refuse."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hybridkernels.scaled_matmul import CODES, quantize_rows, scaled_matmul


@pytest.mark.parametrize("kind", CODES)
def test_a_product_is_near_the_exact_one(kind: str) -> None:
    a, b = torch.randn(48, 64), torch.randn(32, 64)
    found = scaled_matmul(*quantize_rows(a, kind), *quantize_rows(b, kind), torch.float32)
    error = (found - a @ b.t()).norm() / (a @ b.t()).norm()
    assert error < {"int8": 0.02, "float8": 0.06}[kind]


@pytest.mark.parametrize("inner", [96, 1024, 1025, 3000])
def test_int8_codes_are_multiplied_exactly(inner: int) -> None:
    # Rows of the largest codes alone pass what float32 can add exactly.
    a, b = (torch.randint(-127, 128, (40, inner), dtype=torch.int8) for _ in range(2))
    a[0], b[0] = 127, 127
    ones = torch.ones(40)
    found = scaled_matmul(a, ones, b, ones, torch.float32)
    assert torch.equal(found, (a.double() @ b.double().t()).float())


def test_rows_are_scaled_by_their_own_largest_value() -> None:
    x = torch.tensor([[1.0, -2.0], [0.5, 0.25], [0.0, 0.0]])
    codes, scales = quantize_rows(x, "int8")
    assert codes.tolist() == [[64, -127], [127, 64], [0, 0]]
    assert torch.allclose(scales[:2], torch.tensor([2 / 127, 0.5 / 127]))
    turned, _ = quantize_rows(x.t(), "int8")
    assert turned.shape == (2, 3)
    assert turned.is_contiguous()


def test_sizes_and_flops_are_known_without_values() -> None:
    x = torch.empty(128, 64, dtype=torch.bfloat16, device="meta")
    codes, scales = quantize_rows(x, "float8")
    assert (codes.shape, codes.dtype, scales.dtype) == ((128, 64), torch.float8_e4m3fn, torch.float32)
    with FlopCounterMode(display=False) as counter:
        out = scaled_matmul(codes, scales, codes, scales, torch.bfloat16)
    assert (out.shape, out.dtype) == ((128, 128), torch.bfloat16)
    assert counter.get_total_flops() == 2 * 128 * 64 * 128


def test_what_does_not_fit_is_refused() -> None:
    x, ones = torch.zeros(4, 8), torch.ones(4)
    codes = x.to(torch.int8)
    with pytest.raises(ValueError, match="format 'int4' is unknown; allowed: int8, float8"):
        quantize_rows(x, "int4")
    with pytest.raises(ValueError, match="allowed: a matrix of floats"):
        quantize_rows(codes, "int8")
    with pytest.raises(ValueError, match="allowed: two of one 8-bit dtype and one K"):
        scaled_matmul(codes, ones, codes[:, :4], ones, torch.float32)
    with pytest.raises(ValueError, match="allowed: float32, one of each row"):
        scaled_matmul(codes, ones[:2], codes, ones, torch.float32)
