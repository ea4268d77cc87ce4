"""NF4: the ops against the definition, the definition against what the paper says of it."""

import pytest
import torch
from torch import Tensor

from hybridkernels.nf4 import Nf4Sizes, nf4_dequantize, nf4_quantize
from hybridkernels.nf4.reference import (
    QUANTILES,
    nf4_dequantize_reference,
    nf4_quantize_reference,
    relative_to_largest,
    scale_map,
)

SIZES = [1, 63, 64, 65, 1000, 64 * 256 + 1, (1 << 18) + 70]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def stored(num_values: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = Nf4Sizes.of(num_values)
    return (
        torch.full((sizes.codes,), 99, dtype=torch.uint8, device=device),
        torch.full((sizes.scale_codes,), 99, dtype=torch.uint8, device=device),
        torch.full((sizes.scales,), 99.0, device=device),
        torch.full((1,), 99.0, device=device),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_values", SIZES)
def test_ops_in_slices_are_the_definition(num_values: int, dtype: torch.dtype) -> None:
    values, found = (torch.randn(num_values) * 0.02).to(dtype), stored(num_values)
    nf4_quantize(values, *found)
    expected = nf4_quantize_reference(values)
    for part, reference in zip(found, expected, strict=True):
        assert torch.equal(part, reference)
    out = torch.full_like(values, 7.0)
    nf4_dequantize(*found, out)
    assert torch.equal(out, nf4_dequantize_reference(*expected, num_values).to(dtype))


def test_a_value_is_the_nearest_quantile_of_its_groups_scale() -> None:
    values = torch.randn(64 * 300)
    codes, scale_codes, scales, mean = nf4_quantize_reference(values)
    index = torch.stack([codes >> 4, codes & 15], dim=1).view(-1)
    relative, largest = relative_to_largest(values, 64)
    distances = (relative[:, None].double() - torch.tensor(QUANTILES).double()).abs()
    chosen = distances.gather(1, index.long()[:, None])[:, 0]
    assert torch.allclose(chosen, distances.amin(1), rtol=0, atol=1e-7)  # midpoints are rounded to float32
    # The scale's code stands for a value between neighbours of the map; a step of it is at most 0.0141 of the largest.
    decoded = nf4_dequantize_reference(torch.full_like(codes, 0xFF), scale_codes, scales, mean, values.numel())[::64]
    gaps = scale_map(torch.device("cpu")).diff().max()
    assert ((decoded - largest).abs() <= gaps / 2 * scales.repeat_interleave(256)[:300] + 2e-5).all()


def test_zeros_come_back() -> None:
    values = torch.zeros(640)
    out = torch.ones(640)
    nf4_dequantize(*nf4_quantize_reference(values), out)
    assert (out == 0).all()


def test_bytes_per_parameter_are_those_of_the_paper() -> None:
    sizes = Nf4Sizes.of(4096 * 4096)
    num_bits = 8 * (sizes.codes + sizes.scale_codes + 4 * sizes.scales + 4) / 4096**2
    assert num_bits == pytest.approx(4.127, abs=1e-3)  # 4 + 8/64 + 32/(64 * 256), section 3 of 2305.14314


def test_meta_computes_nothing() -> None:
    found = stored(1000, "meta")
    nf4_quantize(torch.empty(1000, device="meta"), *found)
    nf4_dequantize(*found, torch.empty(1000, device="meta"))


def test_wrong_sizes_are_named_all_at_once() -> None:
    codes, scale_codes, scales, mean = stored(1000)
    with pytest.raises(ValueError, match=r"codes is torch.uint8 \(499,\); allowed: torch.uint8 \(500,\).*mean is"):
        nf4_dequantize(codes[:-1], scale_codes, scales, mean.double(), torch.empty(1000))
