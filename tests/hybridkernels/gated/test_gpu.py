"""silu(gate) * up on a real card against torch in float64."""

import pytest
import torch
from torch.nn import functional

from hybridkernels.swiglu import swiglu
from hybridkernels.swiglu.reference import swiglu_reference
from numerics import assert_error_bound

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]

FLOORS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Relative to the largest element: one rounding, in fp32 a few, for cases where torch happens to be exact."""


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("numel", [1, 15, 1023, 1024, 1025, 2500])
def test_a_card_is_as_exact_as_torch_on_it(dtype: torch.dtype, numel: int) -> None:
    gate, up, grad = ((torch.randn(numel, device="cuda") * 2).to(dtype) for _ in range(3))
    leaves = [tensor.clone().requires_grad_() for tensor in (gate, up)]
    out = swiglu(*leaves)
    results = (out.detach(), *torch.autograd.grad(out, leaves, grad))
    exact_leaves = [tensor.double().requires_grad_() for tensor in (gate, up)]
    exact_out = functional.silu(exact_leaves[0]) * exact_leaves[1]
    exact = (exact_out.detach(), *torch.autograd.grad(exact_out, exact_leaves, grad.double()))
    plain = swiglu_reference(*leaves)
    reference = (plain.detach(), *torch.autograd.grad(plain, leaves, grad))
    names = ("out", "grad_gate", "grad_up")
    for name, actual, torchs, target in zip(names, results, reference, exact, strict=True):
        floor = FLOORS[dtype] * target.abs().max().item()
        assert_error_bound(actual, torchs, target, floor=floor, name=name)
