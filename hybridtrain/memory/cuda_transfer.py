"""Copies on a CUDA card: one stream in, one stream out, ordered by events; files are read and written by a thread.

Only events order these streams: torch's streams do not wait for the default one. The caching allocator reuses a freed
block on the compute stream at once, even if a copy still uses it. So a copy's tensor is held until the compute stream
waits for that copy, or for a later one of its stream.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridtrain.memory.disk_tier import DiskFile
from hybridtrain.memory.tier import BufferContent, HostBytes
from hybridtrain.memory.transfer import DirectTransfer, Transfer

_MOST_HELD = 32
"""Most copies to the host in flight; then compute waits for the oldest, as the CPU may run far ahead."""
_MOST_STAGED = 4
"""Most pinned buffers in use for files; then the CPU waits for the oldest."""


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A copy on one of the two in-order streams."""

    event: torch.cuda.Event
    number: int
    """Number on its stream, from 1."""
    is_in: bool
    num_out: int
    """Number of the last copy to the host that must precede it."""


@dataclass(slots=True, eq=False)
class _PendingRead:
    """A file read into pinned memory; its device copy starts when it is waited for."""

    content: "Future[None]"
    staging: HostBytes
    target: Tensor
    after: Sequence[object]
    copy: _Copy | None = None


class _Lane:
    """A copy stream, and the device tensors that its copies may still use."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.num_copies = 0
        self._held: deque[tuple[_Copy, Tensor]] = deque()

    def hold(self, copy: _Copy, tensor: Tensor) -> _Copy | None:
        """Hold a copy's tensor; return the oldest copy if too many are held."""
        self._held.append((copy, tensor))
        return self._held[0][0] if len(self._held) > _MOST_HELD else None

    def release(self, number: int) -> None:
        """Release the tensors of all copies up to that number."""
        while self._held and self._held[0][0].number <= number:
            self._held.popleft()


class _Staging:
    """Pinned staging memory between files and the device; not thread-safe."""

    def __init__(self) -> None:
        self._free: list[HostBytes] = []
        self._busy: deque[tuple[Future[None] | torch.cuda.Event, HostBytes]] = deque()

    def take(self, num_bytes: int) -> HostBytes:
        """Return a buffer of at least ``num_bytes``; waits if too many are in use."""
        while self._busy and (len(self._busy) >= _MOST_STAGED or _is_over(self._busy[0][0])):
            use, buffer = self._busy.popleft()
            _wait_over(use)
            self._free.append(buffer)
        fitting = [buffer for buffer in self._free if buffer.tensor.nbytes >= num_bytes]
        if fitting:
            chosen = min(fitting, key=lambda buffer: buffer.tensor.nbytes)
            self._free.remove(chosen)
            return chosen
        if self._free:  # all too small: one makes room
            self._free.pop().close()
        return HostBytes(num_bytes, pinned=True)

    def give_back(self, buffer: HostBytes, use: "Future[None] | torch.cuda.Event") -> None:
        """Return a buffer to the pool after its last use."""
        self._busy.append((use, buffer))

    def close(self) -> None:
        """Unpin and free all buffers; none may be in use."""
        for buffer in [*self._free, *(buffer for _, buffer in self._busy)]:
            buffer.close()
        self._free.clear()
        self._busy.clear()


class CudaTransfer(DirectTransfer):
    """Transfer for a CUDA card, made the current device; its current stream is the compute queue."""

    def __init__(
        self, device: torch.device, *, disk_folder: Path | None = None, host_limit_bytes: int | None = None
    ) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(torch.device("cuda", index), disk_folder=disk_folder, host_limit_bytes=host_limit_bytes)
        torch.cuda.set_device(self.device)  # seeds and pinned memory go by the current device, which each thread has
        self._in = _Lane(self.device)
        self._out = _Lane(self.device)
        self._link = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._num_out_before_in = 0
        self._files = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="disk-tier", initializer=torch.cuda.set_device, initargs=(self.device,)
        )
        """A single thread, so that reads and writes keep their order."""
        self._writes: list[Future[None]] = []
        self._staging = _Staging()

    def fetch(self, target: Tensor, source: BufferContent | None, offset: int, after: Sequence[object]) -> object:
        """Start a copy to the device; from a file, start reading it."""
        if isinstance(source, HostBytes):
            return self._send(target, source, offset, after)
        assert isinstance(source, DiskFile), "a copy without memory in a real run"
        self._raise_failed_writes()
        with _disable_current_modes():
            staging = self._staging.take(target.nbytes)
            content = self._files.submit(source.read, offset, staging.tensor[: target.nbytes])
        return _PendingRead(content, staging, target, after)

    def store(self, source: Tensor, target: BufferContent | None, offset: int) -> object:
        """Start a copy from the device; to a file, through pinned memory."""
        if isinstance(target, HostBytes):
            return self._receive(source, target, offset)
        assert isinstance(target, DiskFile), "a copy without memory in a real run"
        self._raise_failed_writes()
        with _disable_current_modes():
            staging = self._staging.take(source.nbytes)
            part = staging.tensor[: source.nbytes]
        copy = self._receive(source, staging, 0, blocking=True)
        write = self._files.submit(_write, copy.event, part, target, offset)
        self._staging.give_back(staging, write)
        self._writes.append(write)
        return copy

    def mark(self) -> object:
        """Record an event on the compute stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._compute)
        return event

    def wait(self, event: object) -> None:
        """Make the compute stream wait for an event; a file's content is copied to the device first."""
        if isinstance(event, _PendingRead):
            if event.copy is None:
                event.content.result()
                event.copy = self._send(event.target, event.staging, 0, event.after)
                self._staging.give_back(event.staging, event.copy.event)
            event = event.copy
        if isinstance(event, _Copy):
            self._compute.wait_event(event.event)
            self._release(event)
        elif isinstance(event, torch.cuda.Event):
            self._compute.wait_event(event)

    def synchronize(self, event: object) -> None:
        """Block the CPU until the event is complete."""
        if isinstance(event, _Copy):
            event.event.synchronize()
            self._release(event)
        elif isinstance(event, torch.cuda.Event):
            event.synchronize()

    @contextmanager
    def beside(self, after: Sequence[object]) -> Iterator[None]:
        """Make a side stream current, which waits for the compute stream and the copies.

        The copies' tensors stay held, as the compute stream has not waited for them.
        """
        self._link.wait_stream(self._compute)
        for event in after:
            assert isinstance(event, _Copy), "a file copy is not on a stream yet"
            self._link.wait_event(event.event)
        with torch.cuda.stream(self._link):
            yield

    def finish(self) -> None:
        """Block until all copies and file writes are complete."""
        torch.cuda.synchronize(self.device)
        for write in self._writes:
            write.exception()
        self._raise_failed_writes()

    def close(self) -> None:
        """Finish all copies and writes, then remove the files, even after a device error."""
        try:
            torch.cuda.synchronize(self.device)
            self._files.shutdown(wait=True)
            for lane in (self._in, self._out):
                lane.release(lane.num_copies)
            self._staging.close()
            self._raise_failed_writes()
        finally:
            self._files.shutdown(wait=True)
            super().close()

    @property
    def _compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def _send(self, target: Tensor, source: HostBytes, offset: int, after: Sequence[object]) -> _Copy:
        for event in after:
            if isinstance(event, _Copy):
                self._in.stream.wait_event(event.event)
                self._num_out_before_in = max(self._num_out_before_in, event.num_out)
            elif isinstance(event, torch.cuda.Event):
                self._in.stream.wait_event(event)
        with _disable_current_modes(), torch.cuda.stream(self._in.stream):
            part = source.tensor[offset : offset + target.nbytes]
            target.view(-1).view(torch.uint8).copy_(part, non_blocking=True)
        return self._recorded(self._in, target, num_out=self._num_out_before_in)

    def _receive(self, source: Tensor, target: HostBytes, offset: int, *, blocking: bool = False) -> _Copy:
        self._out.stream.wait_stream(self._compute)
        with _disable_current_modes(), torch.cuda.stream(self._out.stream):
            part = target.tensor[offset : offset + source.nbytes]
            part.copy_(source.view(-1).view(torch.uint8), non_blocking=True)
        return self._recorded(self._out, source, num_out=self._out.num_copies + 1, blocking=blocking)

    def _recorded(self, lane: _Lane, tensor: Tensor, *, num_out: int, blocking: bool = False) -> _Copy:
        """Return the copy just added to a lane; ``blocking``: a thread that waits for it sleeps."""
        event = torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call]
        event.record(lane.stream)
        lane.num_copies += 1
        copy = _Copy(event, lane.num_copies, lane is self._in, num_out)
        oldest = lane.hold(copy, tensor)
        if oldest is not None and not oldest.is_in:
            self.wait(oldest)
        return copy

    def _release(self, copy: _Copy) -> None:
        """Release the tensors that the compute stream may reuse, now that it waits for ``copy``."""
        if copy.is_in:
            self._in.release(copy.number)
        self._out.release(copy.num_out)

    def _raise_failed_writes(self) -> None:
        writes, self._writes = self._writes, []
        for write in writes:
            if write.done():
                write.result()
            else:
                self._writes.append(write)


def _write(event: torch.cuda.Event, content: Tensor, target: DiskFile, offset: int) -> None:
    event.synchronize()
    target.write(offset, content)


def _is_over(use: "Future[None] | torch.cuda.Event") -> bool:
    return use.done() if isinstance(use, Future) else bool(use.query())  # type: ignore[no-untyped-call]


def _wait_over(use: "Future[None] | torch.cuda.Event") -> None:
    # However it ends: a failed write is raised where its result is read.
    if isinstance(use, Future):
        use.exception()
    else:
        use.synchronize()


def open_transfer(
    device: torch.device, *, disk_folder: Path | None = None, host_limit_bytes: int | None = None
) -> Transfer:
    """Return the transfer of a device: streams for a CUDA card, immediate copies for the CPU."""
    kind = CudaTransfer if device.type == "cuda" else DirectTransfer
    return kind(device, disk_folder=disk_folder, host_limit_bytes=host_limit_bytes)
