"""A product with an 8-bit weight of bitsandbytes on the virtual card, held to its CUDA code's allocations."""

import pytest
import torch

from hybridtrain.virtual_gpu import VirtualGpu, find_card

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
ROWS, INPUTS, OUTPUTS = 512, 256, 512


def test_a_product_takes_codes_scales_and_a_result_in_int32() -> None:
    with VirtualGpu(find_card("rtx-4090")) as gpu:
        layer = bitsandbytes.nn.Linear8bitLt(INPUTS, OUTPUTS, bias=False, has_fp16_weights=False, threshold=6.0)
        weight = torch.empty(OUTPUTS, INPUTS, dtype=torch.float16)
        layer.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        layer = layer.cuda()
        assert torch.cuda.memory_allocated() == OUTPUTS * INPUTS + 4 * OUTPUTS
        x = torch.empty(ROWS, INPUTS, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        out = layer(x)
        codes, result, product = ROWS * INPUTS + 4 * ROWS, 2 * ROWS * OUTPUTS, 4 * ROWS * OUTPUTS
        assert torch.cuda.max_memory_allocated() - before == codes + result + product
        assert torch.cuda.memory_allocated() - before == result
        out.sum().backward()
        assert x.grad is not None
        assert layer.weight.grad is None
        assert [*gpu.basis().approximated] == [
            "8-bit products are planned without columns of outliers, which bitsandbytes copies in 16 bits"
        ]
