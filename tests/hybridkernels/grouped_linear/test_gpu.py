"""torch's grouped kernel on a real card against float64."""

import pytest
import torch

from hybridkernels.grouped_linear import grouped_linear, op
from hybridkernels.grouped_linear.reference import grouped_linear_reference
from numerics import assert_error_bound

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]


@pytest.mark.parametrize("ends", [[100, 100, 301, 500], [0, 0, 0, 500]], ids=str)
def test_a_card_is_as_exact_as_torch_on_it(ends: list[int]) -> None:
    x, weight, grad = (
        torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in ((500, 64), (4, 96, 64), (500, 96))
    )
    ends_E = torch.tensor(ends, dtype=torch.int32, device="cuda")
    if torch.cuda.get_device_capability() >= (8, 0):
        assert op._takes_grouped_mm(x, weight)
    found = []
    for function, dtype in (
        (grouped_linear, torch.bfloat16),
        (grouped_linear_reference, torch.bfloat16),
        (grouped_linear_reference, torch.float64),
    ):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (x, weight)]
        out = function(*leaves, ends_E)
        found.append((out.detach(), *torch.autograd.grad(out, leaves, grad.detach().to(dtype))))
    for name, *tensors in zip(("out", "dx", "dweight"), *found, strict=True):
        assert_error_bound(*tensors, floor=0.1, name=name)  # one rounding of sums of up to some tens
