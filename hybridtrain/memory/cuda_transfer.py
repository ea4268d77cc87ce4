"""Copies on a CUDA card: one stream in, one stream out, ordered by events; files are read and written by a thread."""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridtrain.memory.tier import Bytes, DiskBytes, HostBytes
from hybridtrain.memory.transfer import DirectTransfer, Transfer


@dataclass(slots=True)
class _PendingRead:
    """A file's content on its way to pinned memory; it goes to the device when someone waits for it."""

    content: "Future[None]"
    staging: HostBytes
    target: Tensor
    after: Sequence[object]
    arrived: torch.cuda.Event | None = None


class CudaTransfer(DirectTransfer):
    """The device is a CUDA card; the current stream is the compute queue.

    Args:
        device: The card.
        disk_folder: Where the disk tier may make its files.
        host_limit_bytes: Host memory that offloaded tensors may take; None: what the machine has available.
    """

    def __init__(
        self, device: torch.device, *, disk_folder: Path | None = None, host_limit_bytes: int | None = None
    ) -> None:
        super().__init__(device, disk_folder=disk_folder, host_limit_bytes=host_limit_bytes)
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._files = ThreadPoolExecutor(max_workers=1, thread_name_prefix="disk-tier")
        self._writes: list[Future[None]] = []
        self._staging: defaultdict[int, list[HostBytes]] = defaultdict(list)

    def copy_in(self, target: Tensor, source: Bytes | None, offset: int, after: Sequence[object]) -> object:
        """Start a copy on the stream in; from a file, start reading it."""
        if isinstance(source, HostBytes):
            return self._send(target, source, offset, after)
        assert isinstance(source, DiskBytes), "a real run has real memory"
        self._raise_failed_writes()
        staging = self._take_staging(target.nbytes)
        part = staging.tensor[: target.nbytes]
        content = self._files.submit(source.read, offset, part)
        return _PendingRead(content, staging, target, after)

    def copy_out(self, source: Tensor, target: Bytes | None, offset: int) -> object:
        """Start a copy on the stream out; to a file, through pinned memory."""
        if isinstance(target, HostBytes):
            return self._receive(source, target, offset)
        assert isinstance(target, DiskBytes), "a real run has real memory"
        self._raise_failed_writes()
        staging = self._take_staging(source.nbytes)
        event = self._receive(source, staging, 0)
        self._writes.append(self._files.submit(self._write, event, staging, source.nbytes, target, offset))
        return event

    def mark(self) -> object:
        """Record an event on the compute stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: object) -> None:
        """Let the compute stream wait; a file's content is sent to the device first."""
        if isinstance(event, _PendingRead):
            if event.arrived is None:
                event.content.result()
                event.arrived = self._send(event.target, event.staging, 0, event.after)
                self._files.submit(self._return_staging, event.arrived, event.staging)
            event = event.arrived
        if isinstance(event, torch.cuda.Event):
            torch.cuda.current_stream(self.device).wait_event(event)

    def synchronize(self, event: object) -> None:
        """Block until the event is over."""
        if isinstance(event, torch.cuda.Event):
            event.synchronize()

    def close(self) -> None:
        """Finish every copy and write, then remove the files."""
        torch.cuda.synchronize(self.device)
        self._files.shutdown(wait=True)
        try:
            self._raise_failed_writes()
        finally:
            super().close()

    def _send(self, target: Tensor, source: HostBytes, offset: int, after: Sequence[object]) -> torch.cuda.Event:
        for event in after:
            if isinstance(event, torch.cuda.Event):
                self._in.wait_event(event)
        with _disable_current_modes(), torch.cuda.stream(self._in):
            part = source.tensor[offset : offset + target.nbytes]
            target.view(-1).view(torch.uint8).copy_(part, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._in)
        return event

    def _receive(self, source: Tensor, target: HostBytes, offset: int) -> torch.cuda.Event:
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with _disable_current_modes(), torch.cuda.stream(self._out):
            part = target.tensor[offset : offset + source.nbytes]
            part.copy_(source.view(-1).view(torch.uint8), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._out)
        return event

    def _write(
        self, event: torch.cuda.Event, staging: HostBytes, num_bytes: int, target: DiskBytes, offset: int
    ) -> None:
        event.synchronize()
        target.write(offset, staging.tensor[:num_bytes])
        self._staging[staging.tensor.nbytes].append(staging)

    def _return_staging(self, event: torch.cuda.Event, staging: HostBytes) -> None:
        event.synchronize()
        self._staging[staging.tensor.nbytes].append(staging)

    def _take_staging(self, num_bytes: int) -> HostBytes:
        fitting = [size for size, free in self._staging.items() if free and size >= num_bytes]
        if fitting:
            return self._staging[min(fitting)].pop()
        return HostBytes(num_bytes, pinned=True)

    def _raise_failed_writes(self) -> None:
        done = [write for write in self._writes if write.done()]
        self._writes = [write for write in self._writes if not write.done()]
        for write in done:
            write.result()


def open_transfer(
    device: torch.device, *, disk_folder: Path | None = None, host_limit_bytes: int | None = None
) -> Transfer:
    """Return the way to a device: streams for a CUDA card, copies done at once for the CPU."""
    kind = CudaTransfer if device.type == "cuda" else DirectTransfer
    return kind(device, disk_folder=disk_folder, host_limit_bytes=host_limit_bytes)
