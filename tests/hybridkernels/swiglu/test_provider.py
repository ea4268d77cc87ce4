"""Which implementation the op takes on CUDA, asked without a card: its CUDA functions take CPU tensors here."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hybridkernels import gated_op
from hybridkernels.provider import use_provider
from hybridkernels.swiglu import op
from hybridkernels.swiglu.plain import swiglu_backward_plain, swiglu_plain
from numerics import assert_bitwise


def triton_forward(gate: Tensor, _up: Tensor) -> Tensor:
    return torch.full_like(gate, 77)


def triton_backward(gate: Tensor, up: Tensor, _grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.full_like(gate, 78), torch.full_like(up, 79)


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    stand_in = SimpleNamespace(swiglu_triton=triton_forward, swiglu_backward_triton=triton_backward)
    monkeypatch.setitem(sys.modules, "hybridkernels.swiglu.triton_kernel", stand_in)
    monkeypatch.setattr(gated_op, "cuda_backend", lambda: getattr(request, "param", "triton"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "some card")


def results(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return what the CUDA functions give of ones."""
    gate, up, grad = torch.ones(3, 5, dtype=dtype).unbind(0)
    return op._OP.cuda(gate, up), *op._OP.backward_cuda(gate, up, grad)


def assert_torchs(dtype: torch.dtype) -> None:
    gate, up, grad = torch.ones(3, 5, dtype=dtype).unbind(0)
    expected = (swiglu_plain(gate, up), *swiglu_backward_plain(gate, up, grad))
    for actual, wanted in zip(results(dtype), expected, strict=True):
        assert_bitwise(actual, wanted)


def test_triton_is_taken_where_it_runs() -> None:
    assert [tensor[0].item() for tensor in results(torch.bfloat16)] == [77, 78, 79]


@pytest.mark.parametrize("backend", ["torch"], indirect=True)
def test_torch_is_taken_where_triton_does_not_run() -> None:
    assert_torchs(torch.float32)


def test_float64_is_torchs() -> None:
    assert_torchs(torch.float64)


def test_a_choice_is_followed() -> None:
    with use_provider("swiglu", "torch"):
        assert_torchs(torch.float32)
