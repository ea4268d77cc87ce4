"""Which implementation the ops take on CUDA, asked without a card: their CUDA functions take CPU tensors here."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridkernels import provider
from hybridkernels.int8_quantize import int8_dequantize, int8_quantize, op
from hybridkernels.provider import use_provider
from numerics import assert_bitwise

MODULE = "hybridkernels.int8_quantize.triton_kernel"


@pytest.fixture(params=["triton", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(provider, "cuda_backend", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "some card")
    return str(request.param)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List which launchers are called, and do nothing else."""
    seen: list[str] = []

    def launcher(name: str) -> Any:
        return lambda *_args, **_kwargs: seen.append(name)

    names = ("int8_quantize_triton", "int8_dequantize_triton")
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(**{name: launcher(name) for name in names}))
    return seen


def test_triton_is_taken_where_it_runs(backend: str, calls: list[str]) -> None:
    values = torch.randn(1000)
    codes, scales_G, out = torch.zeros(1000, dtype=torch.int8), torch.zeros(4), torch.zeros(1000)
    op._quantize_cuda(values, codes, scales_G, False, False)
    op._dequantize_cuda(codes, scales_G, out)
    if backend == "triton":
        assert calls == ["int8_quantize_triton", "int8_dequantize_triton"]
        return
    assert calls == []
    expected, expected_G = torch.zeros_like(codes), torch.zeros_like(scales_G)
    int8_quantize(values, expected, expected_G, stochastic=False)
    assert_bitwise(codes, expected)
    int8_dequantize(expected, expected_G, values)
    assert_bitwise(out, values)


def test_the_choice_of_each_op_is_followed(backend: str, calls: list[str]) -> None:
    codes, scales_G = torch.zeros(4, dtype=torch.int8), torch.zeros(1)
    with use_provider("int8_quantize", "torch"):
        op._quantize_cuda(torch.ones(4), codes, scales_G, False, False)
        op._dequantize_cuda(codes, scales_G, torch.zeros(4))
    assert codes.tolist() == [127] * 4
    assert calls == (["int8_dequantize_triton"] if backend == "triton" else [])
