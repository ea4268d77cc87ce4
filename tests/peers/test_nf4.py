"""NF4 with double quantization is bitsandbytes' to the bit, on the CPU."""

import pytest
import torch

from hybridkernels.nf4.reference import nf4_dequantize_reference, nf4_quantize_reference, scale_map

functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
SHAPES = [(64, 64), (128, 300), (7, 33), (5, 130), (512, 2048)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_scales_and_values_are_those_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = (torch.randn(shape) * 0.02).to(dtype)
    weight[0] = 0  # groups without a scale
    theirs, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    codes, scale_codes, scales, mean = nf4_quantize_reference(weight.view(-1))
    assert torch.equal(theirs.view(-1), codes)
    assert torch.equal(state.absmax, scale_codes)
    assert torch.equal(state.state2.absmax, scales)
    assert torch.equal(state.state2.code, scale_map(weight.device))
    assert torch.equal(state.offset.view(1), mean)
    values = nf4_dequantize_reference(codes, scale_codes, scales, mean, weight.numel()).view(shape).to(dtype)
    assert torch.equal(functional.dequantize_4bit(theirs, state), values)
