"""Stochastic rounding in Triton's interpreter with chosen random words: smallest and largest ones, ties, faults."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridkernels.adamw_int8.reference import store_weight
from hybridkernels.int8_quantize.philox import uniform_of
from hybridkernels.int8_quantize.reference import int8_quantize_reference
from hybridkernels.int8_quantize.triton_rounding import bfloat16_stochastic, group_codes, group_rows
from numerics import assert_bitwise

WORDS = [0, 511, 512, 2**15, 2**16, 2**31, 2**32 - 2**16, 2**32 - 1]


@triton.jit
def codes_kernel(values_ptr, scales_ptr, words_ptr, codes_ptr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Write the codes of two rows."""
    rows = tl.arange(0, 2)
    offsets = rows[:, None] * 256 + tl.arange(0, 256)[None, :]
    words = tl.load(words_ptr + offsets).to(tl.uint32)
    codes = group_codes(tl.load(values_ptr + offsets), tl.load(scales_ptr + rows), words, True)
    tl.store(codes_ptr + offsets, codes)


@triton.jit
def bfloat16_kernel(values_ptr, words_ptr, out_ptr, numel):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Write up to 256 values as bfloat16."""
    offsets = tl.arange(0, 256)
    inside = offsets < numel
    words = tl.load(words_ptr + offsets, mask=inside, other=0).to(tl.uint32)
    rounded = bfloat16_stochastic(tl.load(values_ptr + offsets, mask=inside, other=0.0), words)
    tl.store(out_ptr + offsets, rounded, mask=inside)


@triton.jit
def rows_kernel(rows_ptr, offsets_ptr, first_row):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Write the numbers of two rows and of their elements."""
    rows, offsets = group_rows(first_row, 2)
    tl.store(rows_ptr + tl.arange(0, 2), rows)
    tl.store(offsets_ptr + tl.arange(0, 2)[:, None] * 256 + tl.arange(0, 256)[None, :], offsets)


def rounded_bfloat16(values: Tensor, words: Tensor) -> Tensor:
    out = torch.empty(len(values), dtype=torch.bfloat16)
    bfloat16_kernel[(1,)](values, words, out, len(values))
    return out


@pytest.mark.parametrize("word", WORDS)
def test_codes_are_the_references_for_every_word(word: int) -> None:
    values = torch.arange(-256, 256).float() / 2  # whole, half, and beyond 127
    values[::7] += 2.0**-18
    words, scales = torch.full((512,), word), torch.ones(2)
    codes = torch.empty(512, dtype=torch.int8)
    codes_kernel[(1,)](values, scales, words, codes)
    assert_bitwise(codes, int8_quantize_reference(values, scales_G=scales, uniform_P=uniform_of(words))[0])


def test_whole_numbers_of_scales_never_move() -> None:
    values = torch.arange(-127, 129).clamp(max=127).float().repeat(2)
    for word in WORDS:
        codes = torch.empty(512, dtype=torch.int8)
        codes_kernel[(1,)](values, torch.ones(2), torch.full((512,), word), codes)
        assert_bitwise(codes, values.to(torch.int8))


@pytest.mark.parametrize("word", WORDS)
def test_bfloat16_values_are_the_references_for_every_word(word: int) -> None:
    values = torch.cat([torch.randn(100) * 10.0 ** (60 * torch.rand(100) - 40), torch.tensor([0.0, -0.0, 1.0, 3.4e38])])
    values = torch.cat([values, torch.tensor([torch.inf, -torch.inf, 1e-45, -1e-40])])
    words, expected = torch.full((len(values),), word), torch.empty(len(values), dtype=torch.bfloat16)
    store_weight(values, (expected,), words)
    assert_bitwise(rounded_bfloat16(values, words), expected)


@pytest.mark.parametrize("word", WORDS)
def test_every_nan_stays_one(word: int) -> None:
    # 0x7FFFFFFF is what CUDA computes; 16 random bits more would wrap it into a negative zero.
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, -0x400000], dtype=torch.int32)
    assert rounded_bfloat16(bits.view(torch.float32), torch.full((len(bits),), word)).isnan().all()


@pytest.mark.parametrize("first_row", [0, 3, 2**23 - 1, 2**31 - 2])
def test_offsets_have_64_bits(first_row: int) -> None:
    rows, offsets = torch.empty(2, dtype=torch.int64), torch.empty(512, dtype=torch.int64)
    rows_kernel[(1,)](rows, offsets, first_row)
    assert rows.tolist() == [first_row, first_row + 1]
    assert_bitwise(offsets, torch.arange(first_row * 256, first_row * 256 + 512))
