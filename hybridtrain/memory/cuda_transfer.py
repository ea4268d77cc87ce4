"""Copies on a CUDA card: one stream in, one stream out, ordered by events; files are read and written by a thread.

Nothing orders these streams but events: torch's streams do not wait for the default one. The caching allocator hands a
freed block to the compute stream at once, whatever a copy still does with it. So every tensor of a copy is held here
until the compute stream waits for that copy, or for a later one of its stream.
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
"""Copies out whose tensors are held before the compute stream waits for the oldest: the processor may run far ahead."""
_MOST_STAGED = 4
"""Pinned buffers on their way to files or from them; beyond that the processor waits for the oldest."""


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A copy on one of the two streams, which do theirs in order."""

    event: torch.cuda.Event
    number: int
    """On its stream, from 1."""
    is_in: bool
    num_out: int
    """Copies out that are over when it is over."""


@dataclass(slots=True, eq=False)
class _PendingRead:
    """A file's content on its way to pinned memory; it goes to the device when someone waits for it."""

    content: "Future[None]"
    staging: HostBytes
    target: Tensor
    after: Sequence[object]
    copy: _Copy | None = None


class _Lane:
    """A stream, and the device tensors that its copies may still use."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.num_copies = 0
        self._held: deque[tuple[_Copy, Tensor]] = deque()

    def hold(self, copy: _Copy, tensor: Tensor) -> _Copy | None:
        """Hold the tensor of a copy; return the oldest copy when there are many."""
        self._held.append((copy, tensor))
        return self._held[0][0] if len(self._held) > _MOST_HELD else None

    def release(self, number: int) -> None:
        """Release the tensors of all copies up to a number."""
        while self._held and self._held[0][0].number <= number:
            self._held.popleft()


class _Staging:
    """Pinned memory between files and the device; used by one thread, like the transfer itself."""

    def __init__(self) -> None:
        self._free: list[HostBytes] = []
        self._busy: deque[tuple[Future[None] | torch.cuda.Event, HostBytes]] = deque()

    def take(self, num_bytes: int) -> HostBytes:
        """Return a buffer of at least ``num_bytes``; waits for one when many are in use."""
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
        """Reclaim a buffer once its last use is over."""
        self._busy.append((use, buffer))

    def close(self) -> None:
        """Unpin all buffers; none may be in use."""
        for buffer in [*self._free, *(buffer for _, buffer in self._busy)]:
            buffer.close()
        self._free.clear()
        self._busy.clear()


class CudaTransfer(DirectTransfer):
    """The device is a CUDA card, made the current one; the current stream is the compute queue."""

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
        """One thread: a file's ranges are read and written in the order in which that was asked for."""
        self._writes: list[Future[None]] = []
        self._staging = _Staging()

    def fetch(self, target: Tensor, source: BufferContent | None, offset: int, after: Sequence[object]) -> object:
        """Start a copy on the stream in; from a file, start reading it."""
        if isinstance(source, HostBytes):
            return self._send(target, source, offset, after)
        assert isinstance(source, DiskFile), "a real run has real memory"
        self._raise_failed_writes()
        with _disable_current_modes():
            staging = self._staging.take(target.nbytes)
            content = self._files.submit(source.read, offset, staging.tensor[: target.nbytes])
        return _PendingRead(content, staging, target, after)

    def store(self, source: Tensor, target: BufferContent | None, offset: int) -> object:
        """Start a copy on the stream out; to a file, through pinned memory."""
        if isinstance(target, HostBytes):
            return self._receive(source, target, offset)
        assert isinstance(target, DiskFile), "a real run has real memory"
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
        """Make the compute stream wait; a file's content is sent to the device first."""
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
        """Block until the event is over."""
        if isinstance(event, _Copy):
            event.event.synchronize()
            self._release(event)
        elif isinstance(event, torch.cuda.Event):
            event.synchronize()

    @contextmanager
    def beside(self, after: Sequence[object]) -> Iterator[None]:
        """Make a stream of its own the current one, which waits for the compute stream and the copies.

        Their tensors stay held: the compute stream has not waited for them.
        """
        self._link.wait_stream(self._compute)
        for event in after:
            assert isinstance(event, _Copy), "only copies from host memory are on a stream when they are started"
            self._link.wait_event(event.event)
        with torch.cuda.stream(self._link):
            yield

    def finish(self) -> None:
        """Block until every copy is over and every file is written."""
        torch.cuda.synchronize(self.device)
        for write in self._writes:
            write.exception()
        self._raise_failed_writes()

    def close(self) -> None:
        """Finish every copy and write, then remove the files; they go even if the device failed."""
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
