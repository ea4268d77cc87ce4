"""Whether Triton runs on the machine's card, asked on machines without one."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from hybridkernels import triton_launch
from hybridkernels.triton_launch import compute_capability, cuda_backend


@pytest.fixture(autouse=True)
def _fresh_answers() -> Iterator[None]:
    """Forget what was asked before, and what the test makes of it."""
    cuda_backend.cache_clear()
    compute_capability.cache_clear()
    yield
    cuda_backend.cache_clear()
    compute_capability.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_the_backend_is_torch() -> None:
    assert cuda_backend() == "torch"


def test_without_triton_the_backend_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton_launch, "find_spec", lambda _name: None)
    assert cuda_backend() == "torch"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is a card and a triton; its tensors are the processor's."""
    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton_launch, "find_spec", lambda _name: "found")
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: zeros(*size, dtype=dtype))  # noqa: ARG005


@pytest.mark.usefixtures("card")
def test_a_triton_that_cannot_run_is_named_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hybridkernels.swiglu.triton_kernel", None)
    with pytest.warns(UserWarning, match="Triton cannot run kernels here .*swiglu.*; training goes on with torch"):
        assert cuda_backend() == "torch"


@pytest.mark.usefixtures("card")
def test_one_launch_that_works_makes_the_backend_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    trial = SimpleNamespace(swiglu_kernel="kernel", launch=lambda *arguments: launches.append(arguments))
    monkeypatch.setitem(sys.modules, "hybridkernels.swiglu.triton_kernel", trial)
    assert [cuda_backend(), cuda_backend()] == ["triton", "triton"]
    ((kernel, *tensors),) = launches
    assert (kernel, [tensor.shape for tensor in tensors]) == ("kernel", [(16,)] * 3)


def test_the_compute_capability_is_asked_once_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    capabilities = {0: (8, 9), 1: (12, 0)}

    def capability_of(device: torch.device) -> tuple[int, int]:
        asked.append(device.index)
        return capabilities[device.index]

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability_of)
    found = [compute_capability(torch.device("cuda", index)) for index in (0, 1, 0)]
    assert found == [89, 120, 89]
    assert asked == [0, 1]
