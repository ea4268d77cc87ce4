"""Peak rates of a card: matmuls, copies, and its memory before anything is trained. Takes ten seconds."""

import subprocess
import time
from collections.abc import Callable

import torch
from torch import Tensor

from hybridtrain.memory.tier import HostBytes
from hybridtrain.units import GB, MIB
from hybridvalidation.experiments.card_session.record import Ceilings
from hybridvalidation.experiments.measure import DeviceUse

_MATMUL_SIZE = 8192
_SMALL_SIZE = 512
_COPY_BYTES = 1024 * MIB
_REPEATS = 10
_SMI_QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def measure_ceilings(used_before_bytes: int | None) -> Ceilings:
    """Return the ceilings of the current card, of which ``used_before_bytes`` were in use (None: unknown)."""
    device = torch.device("cuda", torch.cuda.current_device())
    use = DeviceUse(device, used_before_bytes)
    torch.zeros(1, device=device)
    context_bytes = use.outside_bytes()
    forward_bytes, backward_bytes = _workspaces(device)
    rate = _matmul_flops(device)
    bytes_with_libraries = use.outside_bytes()
    in_rate, out_rate, both_in, both_out, is_pinned, pin_rate = _bus_rates(device)
    properties = torch.cuda.get_device_properties(device)
    use.close()
    return Ceilings(
        name=properties.name, driver=read_driver(), memory_bytes=properties.total_memory,
        compute_capability=f"{properties.major}.{properties.minor}", num_sms=properties.multi_processor_count,
        matmul_tflops=rate / 1e12, device_copy_gbps=_device_copy_rate(device) / GB,
        in_gbps=in_rate / GB, out_gbps=out_rate / GB, both_in_gbps=both_in / GB, both_out_gbps=both_out / GB,
        is_pinned=is_pinned, pin_gbps=pin_rate / GB, context_bytes=context_bytes,
        context_with_libraries_bytes=bytes_with_libraries, forward_workspace_bytes=forward_bytes,
        backward_workspace_bytes=backward_bytes,
    )  # fmt: skip


def _workspaces(device: torch.device) -> tuple[int, int]:
    """Return the workspace bytes of the first matmul of this thread, and of the backward thread."""

    def held() -> int:
        torch.cuda.synchronize(device)
        return int(torch.cuda.memory_allocated(device))

    left = torch.ones(_SMALL_SIZE, _SMALL_SIZE, dtype=torch.bfloat16, device=device, requires_grad=True)
    before = held()
    result = left @ left.detach()
    forward_bytes = held() - before - result.nbytes
    before = held()
    (grad,) = torch.autograd.grad(result, left, torch.ones_like(result))
    return forward_bytes, held() - before - grad.nbytes


def _matmul_flops(device: torch.device) -> float:
    left, right = (
        torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device=device).to(torch.bfloat16) for _ in range(2)
    )  # fmt: skip
    result = torch.empty_like(left)
    seconds = _seconds_each(lambda: torch.mm(left, right, out=result), device)
    return 2 * _MATMUL_SIZE**3 / seconds


def _device_copy_rate(device: torch.device) -> float:
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _seconds_each(lambda: target.copy_(source), device)


def _bus_rates(device: torch.device) -> tuple[float, float, float, float, bool, float]:
    """Return bytes per second in and out, each alone, then both at once; whether torch sees pinned memory; pin rate."""
    begin = time.perf_counter()
    host_in = HostBytes(_COPY_BYTES, pinned=True)
    pin_rate = _COPY_BYTES / (time.perf_counter() - begin)
    host_out = HostBytes(_COPY_BYTES, pinned=True)
    card_in, card_out = (torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    stream_in, stream_out = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
    inward, outward = (stream_in, card_in, host_in.tensor), (stream_out, host_out.tensor, card_out)
    (alone_in,) = _copy_rates([inward], device)
    (alone_out,) = _copy_rates([outward], device)
    both_in, both_out = _copy_rates([inward, outward], device)
    is_pinned = bool(host_in.tensor.is_pinned())
    for host in (host_in, host_out):
        host.close()
    return alone_in, alone_out, both_in, both_out, is_pinned, pin_rate


def _copy_rates(ways: list[tuple[torch.cuda.Stream, Tensor, Tensor]], device: torch.device) -> list[float]:
    """Return bytes per second of each way, all at the same time; the first copies only warm up."""
    torch.cuda.synchronize(device)
    marks = []
    for stream, target, source in ways:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    for stream, _, _ in ways:
        first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        first.record(stream)
        marks.append(first)
    for _ in range(_REPEATS):
        for stream, target, source in ways:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
    rates = []
    for first, (stream, _, source) in zip(marks, ways, strict=True):
        last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        last.record(stream)
        last.synchronize()
        rates.append(_REPEATS * source.nbytes / (first.elapsed_time(last) * 1e-3))
    return rates


def _seconds_each(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, the mean of several after a few that warm up."""
    for _ in range(3):
        work()
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(_REPEATS):
        work()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / _REPEATS


def read_driver() -> str:
    """Return the version of NVIDIA's driver, empty where ``nvidia-smi`` does not say."""
    try:
        done = subprocess.run(  # noqa: S603  a fixed command
            _SMI_QUERY, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0]
