"""Whether Triton runs on the machine's card, asked on machines without one."""

import sys
from collections.abc import Iterator

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
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton_launch, "find_spec", lambda _name: "found")
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, device: empty(*size, dtype=dtype))  # noqa: ARG005


@pytest.mark.usefixtures("card")
def test_a_triton_that_cannot_run_is_named_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hybridkernels.trial_kernel", None)
    with pytest.warns(
        UserWarning, match="Triton cannot run kernels here .*trial_kernel.*; training goes on with torch"
    ):
        assert cuda_backend() == "torch"


class TrialKernel:
    """Stands in for the module of the trial launch."""

    def __init__(self) -> None:
        self.launches = 0

    def fill_ones(self, out: torch.Tensor) -> None:
        self.launches += 1
        out.fill_(1)


@pytest.mark.usefixtures("card")
def test_one_launch_that_works_makes_the_backend_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = TrialKernel()
    monkeypatch.setitem(sys.modules, "hybridkernels.trial_kernel", trial)
    assert [cuda_backend(), cuda_backend()] == ["triton", "triton"]
    assert trial.launches == 1


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_the_trial_kernel_fills_what_it_is_given_on_a_card() -> None:
    if cuda_backend() != "triton":
        pytest.skip("Triton cannot run here")
    from hybridkernels.trial_kernel import fill_ones  # noqa: PLC0415  optional

    for length in (1, 16, 64):
        buffer = torch.zeros(100, device="cuda")
        fill_ones(buffer[10 : 10 + length])
        assert buffer[10 : 10 + length].eq(1).all()
        assert buffer.sum().item() == length
