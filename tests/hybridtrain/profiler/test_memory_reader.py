"""PyTorch's allocator counters, and the process' own memory."""

import mmap
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrain.profiler.memory_reader import CudaMemory, machine_memory_bytes, read_cuda_memory, read_process_memory

MIB = 2**20


def test_the_counters_are_read_with_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def stats(device: int | None) -> dict[str, Any]:
        asked.append(device)
        pools = {"current": -1, "peak": -1}
        return {
            "allocated_bytes": {"all": {"current": 10, "peak": 30}, "small_pool": pools},
            "reserved_bytes": {"all": {"current": 25, "peak": 40}, "small_pool": pools},
            "active_bytes": {"all": {"current": 11, "peak": 31}},
        }

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert read_cuda_memory(3) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    memory = read_cuda_memory(3)
    assert memory == CudaMemory(allocated_bytes=10, reserved_bytes=25, peak_allocated_bytes=30, peak_reserved_bytes=40)
    assert memory.free_bytes == 15
    assert asked == [3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_the_figures_are_those_of_torchs_own_functions() -> None:
    tensor = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    memory = read_cuda_memory()
    assert memory == CudaMemory(
        allocated_bytes=torch.cuda.memory_allocated(), reserved_bytes=torch.cuda.memory_reserved(),
        peak_allocated_bytes=torch.cuda.max_memory_allocated(), peak_reserved_bytes=torch.cuda.max_memory_reserved(),
    )  # fmt: skip
    assert memory.allocated_bytes >= tensor.nbytes


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_resident_memory_rises_with_pages_that_are_written() -> None:
    size = 64 * MIB
    before = read_process_memory()
    with mmap.mmap(-1, size) as pages:  # fresh pages; an allocator may hand out what this process already touched
        for _ in range(size // MIB):
            pages.write(bytes(MIB))
        after = read_process_memory()
    rise = after.rss_bytes - before.rss_bytes
    assert abs(rise - size) < 8 * MIB  # what else the process takes or gives back meanwhile
    assert after.peak_rss_bytes >= after.rss_bytes


def test_the_status_file_is_in_kib(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t    99 kB\nVmHWM:\t    7 kB\nVmRSS:\t      5 kB\nRssAnon:\t 1 kB\n")
    memory = read_process_memory(status)
    assert (memory.rss_bytes, memory.peak_rss_bytes) == (5 * 1024, 7 * 1024)


@pytest.mark.parametrize("content", [None, "Name:\tkernel thread\n"])
def test_without_a_status_file_the_peak_of_getrusage_stands_for_both(tmp_path: Path, content: str | None) -> None:
    status = tmp_path / "status"
    if content is not None:
        status.write_text(content)
    memory = read_process_memory(status)
    unit = 1 if sys.platform == "darwin" else 1024
    assert memory.rss_bytes == memory.peak_rss_bytes == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def test_a_containers_limit_is_the_machines_memory(tmp_path: Path) -> None:
    physical = machine_memory_bytes(limits=())
    assert physical is not None
    (tmp_path / "limit").write_text(f"{5 * MIB}\n")
    (tmp_path / "none").write_text("max\n")
    (tmp_path / "huge").write_text(f"{2**63 - 4096}\n")
    assert machine_memory_bytes((tmp_path / "gone", tmp_path / "limit")) == 5 * MIB
    assert machine_memory_bytes((tmp_path / "none", tmp_path / "huge")) == physical
