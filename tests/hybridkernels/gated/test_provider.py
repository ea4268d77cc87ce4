"""Which implementation the op takes on CUDA, asked without a card: its CUDA functions take CPU tensors here."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS

from hybridkernels import provider
from hybridkernels.gated import SILU, gated_backward_plain, gated_plain
from hybridkernels.provider import use_provider
from hybridkernels.swiglu import swiglu  # noqa: F401  defines the ops
from numerics import assert_bitwise


def launch(kernel: str, *tensors: Tensor) -> None:
    """Stand in for the launcher: outputs are the last tensors."""
    for value, out in zip({"forward": [77], "backward": [78, 79]}[kernel], tensors[-len(tensors) // 3 :], strict=False):
        out.fill_(value)


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    stand_in = SimpleNamespace(swiglu_kernel="forward", swiglu_backward_kernel="backward", launch=launch)
    monkeypatch.setitem(sys.modules, "hybridkernels.swiglu.triton_kernel", stand_in)
    monkeypatch.setattr(provider, "cuda_backend", lambda: getattr(request, "param", "triton"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "some card")


def results(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return what the CUDA functions give of ones."""
    gate, up, grad = torch.ones(3, 5, dtype=dtype).unbind(0)
    forward, backward = (
        OPDEFS[f"hybridkernels::{name}"]._backend_fns["cuda"] for name in ("swiglu", "swiglu_backward")
    )
    return forward(gate, up), *backward(gate, up, grad)


def assert_torchs(dtype: torch.dtype) -> None:
    gate, up, grad = torch.ones(3, 5, dtype=dtype).unbind(0)
    expected = (gated_plain(SILU, gate, up), *gated_backward_plain(SILU, gate, up, grad))
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
