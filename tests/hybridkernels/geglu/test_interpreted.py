"""The Triton kernels in Triton's interpreter against torch in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybridkernels.gated import _run_triton
from hybridkernels.geglu.triton_kernel import geglu_backward_kernel, geglu_kernel
from numerics import assert_error_bound

NAMES = ("out", "grad_gate", "grad_up")
LENGTHS = (1, 1025, 2500)
FLOORS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Relative to the largest element: one rounding, in fp32 a few, for cases where torch happens to be exact."""
DTYPES = pytest.mark.parametrize("dtype", FLOORS, ids=str)


def random_case(numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, grad = ((torch.randn(numel) * 2).to(dtype) for _ in range(3))
    return gate, up, grad


def torchs_results(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in (gate, up)]
    out = functional.gelu(leaves[0], approximate="tanh") * leaves[1]
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def kernels_results(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return *_run_triton(geglu_kernel, gate, up), *_run_triton(geglu_backward_kernel, gate, up, grad)


def assert_as_exact_as_torch(case: tuple[Tensor, Tensor, Tensor]) -> None:
    exact = torchs_results(*(tensor.double() for tensor in case))
    for name, actual, torchs, target in zip(NAMES, kernels_results(*case), torchs_results(*case), exact, strict=True):
        assert actual.shape == case[0].shape
        assert actual.is_contiguous()
        floor = FLOORS[actual.dtype] * target.abs().max().item()
        assert_error_bound(actual, torchs, target, floor=floor, name=name)


@DTYPES
@pytest.mark.parametrize("numel", LENGTHS)
def test_the_kernels_are_as_exact_as_torch(numel: int, dtype: torch.dtype) -> None:
    assert_as_exact_as_torch(random_case(numel, dtype))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # NumPy's; infinity is what the formula needs
@DTYPES
def test_extreme_gates_give_no_nan(dtype: torch.dtype) -> None:
    gate = torch.tensor([-6e4, -200.0, -13.0, -5.0, -0.0, 0.0, 5.0, 13.0, 200.0, 6e4]).to(dtype)
    case = (gate, torch.full_like(gate, 0.5), torch.full_like(gate, -0.5))
    exact = torchs_results(*(tensor.double() for tensor in case))
    for name, actual, target in zip(NAMES, kernels_results(*case), exact, strict=True):
        assert actual.isfinite().all(), name
        # Relative to each element: one rounding of the type, and that of an exponent of up to 17 in size.
        rtol = 2 * torch.finfo(dtype).eps + 34 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(actual.double(), target, rtol=rtol, atol=1e-30 + torch.finfo(dtype).tiny, msg=name)
