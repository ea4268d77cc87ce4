"""The Triton kernel in Triton's interpreter: values are the reference's."""

import pytest
import torch

from hybridkernels.nf4.reference import nf4_dequantize_reference, nf4_quantize_reference
from hybridkernels.nf4.triton_kernel import nf4_dequantize_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("num_values", [1, 63, 64, 65, 1000, 5 * 2048 + 3])
def test_values_are_the_references(num_values: int, dtype: torch.dtype) -> None:
    found = nf4_quantize_reference(torch.randn(num_values) * 0.02)
    out = torch.full((num_values + 9,), 7.0, dtype=dtype)
    nf4_dequantize_triton(*found, out[:num_values])
    assert torch.equal(out[:num_values], nf4_dequantize_reference(*found, num_values).to(dtype))
    assert (out[num_values:] == 7).all(), "written beyond the end"
