"""Names of torch.cuda, DLPack and NVML that scripts ask: each has an answer, or is refused in one sentence."""

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
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


def test_a_card_that_the_machine_lacks_is_refused_as_cuda_does() -> None:
    for use in (
        lambda: torch.zeros(2, device="cuda:1"), lambda: torch.zeros(2).to("cuda:1"), lambda: torch.zeros(2).cuda(1),
        lambda: torch.cuda.set_device(1),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"invalid device ordinal .*cuda:1|1 on a machine with 1 card"):
            use()


def test_numpy_takes_no_tensor_of_the_card() -> None:
    with pytest.raises(TypeError, match=r"Tensor\.cpu"):
        np.asarray(torch.ones(2, device="cuda"))
    assert np.asarray(torch.ones(2, device="cuda").cpu()).tolist() == [1.0, 1.0]


def test_the_old_default_type_puts_tensors_on_the_card() -> None:
    try:
        torch.set_default_tensor_type("torch.cuda.HalfTensor")
        made = torch.rand(4)
        assert (made.is_cuda, made.dtype) == (True, torch.float16)
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
    assert torch.rand(4).device.type == "cpu"


def test_lazy_layers_get_their_parameters_on_the_card() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(4)).cuda()
    assert model(torch.ones(2, 16, device="cuda")).shape == (2, 4)
    assert model[0].weight.shape == (8, 16)
    assert model[0].weight.is_cuda


def test_statistics_that_are_not_counted_are_not_0() -> None:
    assert torch.cuda.memory_stats().get("allocated_bytes.all.peak") == 0
    with pytest.raises(UnplannedOpError, match="not counted"):
        torch.cuda.memory_stats().get("segment.all.peak", 0)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is for Linux alone")
def test_tritons_driver_and_tuner() -> None:
    import triton  # noqa: PLC0415  where it is there

    driver = triton.runtime.driver.active
    assert driver.get_active_torch_device() == torch.device("cuda:0")
    assert (driver.get_current_target().backend, driver.get_current_target().arch) == ("cuda", 89)
    assert driver.utils.get_device_properties(0)["multiprocessor_count"] == 128

    def copy(source: Any, target: Any, number: Any, block: triton.language.constexpr) -> None:
        """Never compiled."""

    configs = [triton.Config({"block": size}) for size in (64, 128)]
    tuned = triton.autotune(configs=configs, key=["number"])(triton.jit(copy))
    source = torch.ones(64, device="cuda")
    reserved = []
    for number in (64, 64, 32):
        torch.cuda.empty_cache()
        tuned[(1,)](source, source, number)
        reserved.append(torch.cuda.memory_reserved() - 2 * 2**20)
    assert reserved == [2**28, 0, 2**28], "the buffer of a measurement, once for each number"
