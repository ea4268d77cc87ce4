"""What a card does at best: matmuls, copies, and what it takes before anything is trained. Ten seconds."""

import subprocess
import time
from collections.abc import Callable
from typing import Any

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
    """Return the ceilings of the current card.

    Args:
        used_before_bytes: Of the whole card, before this process used it; None: nobody could say.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    use = DeviceUse(device, used_before_bytes)
    torch.zeros(1, device=device)
    context_bytes = use.outside_bytes()
    forward_bytes, backward_bytes = _workspaces(device)
    rate = _matmul_flops(device)
    bytes_with_libraries = use.outside_bytes()
    rates = _bus_rates(device)
    properties = torch.cuda.get_device_properties(device)
    use.close()
    return Ceilings(
        name=properties.name, driver=read_driver(), memory_bytes=properties.total_memory,
        compute_capability=f"{properties.major}.{properties.minor}", num_sms=properties.multi_processor_count,
        matmul_tflops=rate / 1e12, device_copy_gbps=_device_copy_rate(device) / GB, **rates,
        context_bytes=context_bytes, context_with_libraries_bytes=bytes_with_libraries,
        forward_workspace_bytes=forward_bytes, backward_workspace_bytes=backward_bytes,
    )  # fmt: skip


def _workspaces(device: torch.device) -> tuple[int, int]:
    """Return what the first matmul of this thread keeps, and what the first of the backward thread does."""
    left = torch.ones(_SMALL_SIZE, _SMALL_SIZE, dtype=torch.bfloat16, device=device, requires_grad=True)
    held = [torch.cuda.memory_allocated(device)]
    result = left @ left.detach()
    torch.cuda.synchronize(device)
    held.append(torch.cuda.memory_allocated(device))
    ones = torch.ones_like(result)
    held.append(torch.cuda.memory_allocated(device))
    (grad,) = torch.autograd.grad(result, left, ones)
    torch.cuda.synchronize(device)
    return held[1] - held[0] - result.nbytes, torch.cuda.memory_allocated(device) - held[2] - grad.nbytes


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


def _bus_rates(device: torch.device) -> dict[str, Any]:
    """Return the ceilings of copies over the bus, alone and both ways at once, and of pinning."""
    begin = time.perf_counter()
    host_in = HostBytes(_COPY_BYTES, pinned=True)
    pin_rate = _COPY_BYTES / (time.perf_counter() - begin)
    host_out = HostBytes(_COPY_BYTES, pinned=True)
    card_in, card_out = (torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    stream_in, stream_out = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
    inward, outward = (stream_in, card_in, host_in.tensor), (stream_out, host_out.tensor, card_out)
    (alone_in,), (alone_out,) = _copy_rates([inward], device), _copy_rates([outward], device)
    both_in, both_out = _copy_rates([inward, outward], device)
    is_pinned = bool(host_in.tensor.is_pinned())
    for host in (host_in, host_out):
        host.close()
    rates = {"in": alone_in, "out": alone_out, "both_in": both_in, "both_out": both_out, "pin": pin_rate}
    return {f"{name}_gbps": rate / GB for name, rate in rates.items()} | {"is_pinned": is_pinned}


def _copy_rates(ways: list[tuple[torch.cuda.Stream, Tensor, Tensor]], device: torch.device) -> list[float]:
    """Return bytes per second of each way, all at the same time; the first copies only warm up."""

    def copy_each() -> None:
        for stream, target, source in ways:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

    def mark() -> list[torch.cuda.Event]:
        events = [torch.cuda.Event(enable_timing=True) for _ in ways]  # type: ignore[no-untyped-call]
        for event, (stream, _, _) in zip(events, ways, strict=True):
            event.record(stream)
        return events

    torch.cuda.synchronize(device)
    copy_each()
    torch.cuda.synchronize(device)
    first = mark()
    for _ in range(_REPEATS):
        copy_each()
    last = mark()
    torch.cuda.synchronize(device)
    return [
        _REPEATS * source.nbytes / (begin.elapsed_time(end) * 1e-3)
        for begin, end, (_, _, source) in zip(first, last, ways, strict=True)
    ]


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
