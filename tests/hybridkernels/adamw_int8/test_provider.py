"""Which implementation the ops take on CUDA, asked without a card: their CUDA functions take CPU tensors here."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridkernels import provider
from hybridkernels.adamw_int8 import adamw_int8_, op
from hybridkernels.provider import takes_triton, use_provider
from numerics import assert_bitwise

ARGUMENTS = (1e-2, 0.9, 0.95, 1e-8, 0.1, 1)
CUDA = torch.device("cuda")


def fresh_tensors() -> tuple[Tensor, ...]:
    """Return a parameter of two groups, a gradient and moments."""
    codes = [torch.full((512,), code, dtype=torch.uint8) for code in (127, 0)]
    return torch.randn(300), torch.randn(300), codes[0], torch.zeros(2), codes[1], torch.zeros(2)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """List which implementations are called, and do nothing else."""
    seen: list[str] = []

    def stand_in(module: str, function: str) -> Any:
        replacement = ModuleType(module)
        setattr(replacement, function, lambda *_args, **_kwargs: seen.append(function))
        monkeypatch.setitem(sys.modules, module, replacement)

    stand_in("hybridkernels.adamw_int8.triton_kernel", "adamw_int8_triton")
    stand_in("bitsandbytes.functional", "optimizer_update_8bit_blockwise")
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "some card")
    op._cuda_providers.cache_clear()
    yield seen
    op._cuda_providers.cache_clear()


def with_library(monkeypatch: pytest.MonkeyPatch, *, library: bool, backend: str) -> None:
    monkeypatch.setattr(op, "_loads_bitsandbytes", lambda: library)
    monkeypatch.setattr(op, "cuda_backend", lambda: backend)
    monkeypatch.setattr(provider, "cuda_backend", lambda: backend)


@pytest.mark.parametrize(
    ("library", "backend", "taken"),
    [
        (True, "triton", "optimizer_update_8bit_blockwise"),
        (True, "torch", "optimizer_update_8bit_blockwise"),
        (False, "triton", "adamw_int8_triton"),
    ],
)
def test_the_library_comes_before_triton(
    taken: str, backend: str, calls: list[str], monkeypatch: pytest.MonkeyPatch, *, library: bool
) -> None:
    with_library(monkeypatch, library=library, backend=backend)
    op._update_cuda(*fresh_tensors(), *ARGUMENTS)
    assert calls == [taken]


class Native:
    """Class of the library's compiled part."""


@pytest.mark.parametrize(("lib", "loads"), [(Native(), True), (object(), False)])
def test_a_library_without_its_compiled_part_is_left_alone(
    lib: object, monkeypatch: pytest.MonkeyPatch, *, loads: bool
) -> None:
    monkeypatch.setattr(op, "find_spec", lambda _name: "found")
    assert not op._loads_bitsandbytes()  # nothing of that name can be imported
    extension = ModuleType("bitsandbytes.cextension")
    extension.CudaBNBNativeLibrary, extension.lib = Native, lib  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitsandbytes.cextension", extension)
    assert op._loads_bitsandbytes() is loads
    monkeypatch.setattr(op, "find_spec", lambda _name: None)
    assert not op._loads_bitsandbytes()


def test_without_both_the_reference_runs(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with_library(monkeypatch, library=False, backend="torch")
    actual = fresh_tensors()
    expected = tuple(tensor.clone() for tensor in actual)
    op._update_cuda(*actual, *ARGUMENTS)
    param, grad, m_codes, m_scale, v_codes, v_scale = expected
    moments = (m_codes, m_scale, v_codes, v_scale)
    adamw_int8_(param, grad, moments, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=1)
    for tensor, wanted in zip(actual, expected, strict=True):
        assert_bitwise(tensor, wanted)
    assert calls == []


@pytest.mark.parametrize("chosen", ["bitsandbytes", "triton", "torch"])
def test_the_choice_is_followed(chosen: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with_library(monkeypatch, library=True, backend="triton")
    with use_provider("adamw_int8", chosen):
        op._update_cuda(*fresh_tensors(), *ARGUMENTS)
    names = {"bitsandbytes": ["optimizer_update_8bit_blockwise"], "triton": ["adamw_int8_triton"], "torch": []}
    assert calls == names[chosen]


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_ops_take_triton_where_it_runs(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_library(monkeypatch, library=True, backend=backend)
    assert takes_triton("adamw_int8_rounded", CUDA) is (backend == "triton")
    assert not takes_triton("adamw_int8_rounded", CUDA, fits=False)
    with use_provider("adamw_int8_rounded", "torch"):
        assert not takes_triton("adamw_int8_rounded", CUDA)


def test_the_launcher_gets_what_the_op_got(calls: list[str]) -> None:
    param, grad, *moments = fresh_tensors()
    op._triton_update((param.bfloat16(),), grad, *moments, *ARGUMENTS, seed=torch.tensor([7]))
    assert calls == ["adamw_int8_triton"]
