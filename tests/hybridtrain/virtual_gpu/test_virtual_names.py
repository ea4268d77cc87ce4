"""Names of torch.cuda, DLPack and NVML that scripts ask: each has an answer, or is refused in one sentence."""

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from hybridtrain.virtual_gpu import VirtualGpu, find_card
from hybridtrain.virtual_gpu.facade.placeholders import UnplannedOpError

MODULES = ("torch.cuda", "torch.cuda.memory", "torch.cuda.random", "torch.accelerator", "torch.accelerator.memory")


@pytest.fixture(autouse=True)
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_card("rtx-4090")) as opened:
        yield opened


def takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("module", MODULES)
def test_each_name_of_torch_cuda_answers_or_is_refused(module: str) -> None:
    found, refused = import_module(module), []
    names = [name for name in found.__all__ if callable(getattr(found, name)) and not name.endswith("Storage")]
    for name in names:
        function = getattr(found, name)
        if not takes_nothing(function) or name in {"CudaError", "DeferredCudaCallError", "cudaStatus"}:
            continue
        try:
            function()
        except UnplannedOpError:
            refused.append(name)
    assert len(refused) < len(names) / 3, refused


def test_streams_of_others_and_pools(gpu: VirtualGpu) -> None:
    stream = torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream)
    pool = torch.cuda.MemPool()
    with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
        tensor = torch.ones(2**20, device="cuda")
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.cuda.memory_allocated() == tensor.nbytes
    assert [*gpu.ledger.seen.approximated] == ["memory pools: their blocks are counted in the common pool"]


def test_what_is_shared_between_processes_stays_where_it_is() -> None:
    layer = nn.Linear(512, 512).cuda()
    before = torch.cuda.memory_allocated()
    assert layer.share_memory() is layer
    assert torch.ones(8).share_memory_().tolist() == [1.0] * 8
    assert torch.cuda.memory_allocated() == before


def test_an_exchange_by_dlpack_makes_no_copy() -> None:
    tensor = torch.ones(2**20, device="cuda")
    before = torch.cuda.memory_allocated()
    for other in (torch.from_dlpack(torch.to_dlpack(tensor)), torch.utils.dlpack.from_dlpack(tensor)):
        assert other.data_ptr() == tensor.data_ptr()
        assert other.is_cuda
    assert torch.cuda.memory_allocated() == before
    assert torch.from_dlpack(torch.ones(2).numpy()).tolist() == [1.0, 1.0]


def test_the_driver_is_asked_for_memory() -> None:
    import pynvml  # noqa: PLC0415  there while the card is

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    before = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    kept = torch.ones(100 * 2**20, device="cuda")
    after = pynvml.nvmlDeviceGetMemoryInfo(handle)
    assert after.used - before == kept.nbytes
    assert after.total - after.free == after.used
    assert pynvml.nvmlDeviceGetName(handle) == "NVIDIA GeForce RTX 4090"
    with pytest.raises(UnplannedOpError, match=r"pynvml\.nvmlDeviceGetFanSpeed is not planned"):
        pynvml.nvmlDeviceGetFanSpeed(handle)
