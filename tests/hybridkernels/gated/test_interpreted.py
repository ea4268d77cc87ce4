"""The Triton kernels in Triton's interpreter against torch in float64."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybridkernels.gated import _run_triton
from hybridkernels.geglu.triton_kernel import geglu_backward_kernel, geglu_kernel
from hybridkernels.swiglu.triton_kernel import BLOCK, launch, swiglu_backward_kernel, swiglu_kernel
from numerics import assert_error_bound

NAMES = ("out", "grad_gate", "grad_up")
LENGTHS = (1, 15, BLOCK - 1, BLOCK, BLOCK + 1, 2500)
FLOORS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Relative to the largest element: one rounding, in fp32 a few, for cases where torch happens to be exact."""
DTYPES = pytest.mark.parametrize("dtype", FLOORS, ids=str)
GUARD = 7.0
ACTIVATIONS = {
    "swiglu": (functional.silu, swiglu_kernel, swiglu_backward_kernel),
    "geglu": (partial(functional.gelu, approximate="tanh"), geglu_kernel, geglu_backward_kernel),
}
OPS = pytest.mark.parametrize("op", ACTIVATIONS)


def random_case(numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, grad = ((torch.randn(numel) * 2).to(dtype) for _ in range(3))
    return gate, up, grad


def torchs_results(op: str, gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in (gate, up)]
    out = ACTIVATIONS[op][0](leaves[0]) * leaves[1]
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def kernels_results(op: str, gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    _, forward, backward = ACTIVATIONS[op]
    return *_run_triton(forward, gate, up), *_run_triton(backward, gate, up, grad)


def assert_as_exact_as_torch(op: str, case: tuple[Tensor, Tensor, Tensor]) -> None:
    exact = torchs_results(op, *(tensor.double() for tensor in case))
    found = zip(NAMES, kernels_results(op, *case), torchs_results(op, *case), exact, strict=True)
    for name, actual, torchs, target in found:
        assert actual.shape == case[0].shape
        assert actual.is_contiguous()
        floor = FLOORS[actual.dtype] * target.abs().max().item()
        assert_error_bound(actual, torchs, target, floor=floor, name=name)


@OPS
@DTYPES
@pytest.mark.parametrize("numel", LENGTHS)
def test_the_kernels_are_as_exact_as_torch(op: str, numel: int, dtype: torch.dtype) -> None:
    assert_as_exact_as_torch(op, random_case(numel, dtype))


@DTYPES
def test_strided_tensors_are_taken(dtype: torch.dtype) -> None:
    gate, up, grad = torch.randn(30, 3 * 50).to(dtype).chunk(3, dim=-1)
    assert not gate.is_contiguous()
    assert_as_exact_as_torch("swiglu", (gate, up, grad))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # NumPy's; infinity is what the formula needs
@OPS
@DTYPES
def test_extreme_gates_give_no_nan(op: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max if op == "swiglu" else 6e4
    gate = torch.tensor([-largest, -1e4, -200.0, -88.5, -13.0, -5.0, -0.0, 0.0, 5.0, 13.0, 88.5, 200.0, 1e4, largest])
    case = (gate.to(dtype), torch.full_like(gate, 0.5).to(dtype), torch.full_like(gate, -0.5).to(dtype))
    exact = torchs_results(op, *(tensor.double() for tensor in case))
    for name, actual, target in zip(NAMES, kernels_results(op, *case), exact, strict=True):
        assert actual.isfinite().all(), name
        # Relative to each element: one rounding of the type, and fp32's few in front of it; of gelu also that of an
        # exponent of up to 17 in size.
        rtol = 2 * torch.finfo(dtype).eps + (34 * torch.finfo(torch.float32).eps if op == "geglu" else 0.0)
        torch.testing.assert_close(actual.double(), target, rtol=rtol, atol=1e-30 + torch.finfo(dtype).tiny, msg=name)


def test_nothing_is_written_outside() -> None:
    inputs = torch.ones(3, BLOCK + 5).unbind(0)
    buffers = torch.full((3, 3 * BLOCK), GUARD).unbind(0)
    outputs = [buffer[BLOCK : 2 * BLOCK + 5] for buffer in buffers]
    launch(swiglu_kernel, *inputs[:2], outputs[0])
    launch(swiglu_backward_kernel, *inputs, *outputs[1:])
    for buffer, output in zip(buffers, outputs, strict=True):
        assert (output != GUARD).all()
        assert (buffer == GUARD).sum() == buffer.numel() - output.numel()


def test_an_empty_tensor_is_no_work() -> None:
    assert [tensor.shape for tensor in kernels_results("swiglu", *torch.empty(3, 0, 8).unbind(0))] == [(0, 8)] * 3
