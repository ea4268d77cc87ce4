"""A CPU that behaves like a card with three queues: copies happen as late as they may, and every race is found.

Compute runs at once, in order. Copies in and copies out wait in a queue each and are done when something that waits for
them is waited for, or at moments drawn by chance. Whoever reads a target too early finds garbage in it. Beside the
values, vector clocks (Fidge 1988) say of any two uses of the same memory whether the events order them; if not, that is
a hazard, whatever the values happen to be. ``ComputeWatch`` shows it the memory that compute uses.
"""

import ctypes
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hybridtrain.memory.disk_tier import DiskFile
from hybridtrain.memory.tier import BufferContent
from hybridtrain.memory.transfer import DirectTransfer


class Span(NamedTuple):
    """Bytes from ``start`` to ``start + size``, inside the storage that begins at ``storage``."""

    storage: int
    start: int
    size: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Span":
        """Return the smallest range that holds a tensor."""
        if not tensor.numel() or tensor.is_contiguous():
            return cls(tensor.untyped_storage().data_ptr(), tensor.data_ptr(), tensor.nbytes)
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        size = (sum((count - 1) * stride for count, stride in pairs) + 1) * tensor.element_size()
        return cls(tensor.untyped_storage().data_ptr(), tensor.data_ptr(), size)

    @classmethod
    def of_storage(cls, tensor: Tensor) -> "Span":
        """Return all memory behind a tensor."""
        storage = tensor.untyped_storage()
        return cls(storage.data_ptr(), storage.data_ptr(), storage.nbytes())

    def overlaps(self, other: "Span") -> bool:
        """Return whether both have a byte in common."""
        return self.start < other.start + other.size and other.start < self.start + self.size


class Accesses:
    """When compute last used each range."""

    def __init__(self) -> None:
        self._ticks: defaultdict[int, dict[Span, int]] = defaultdict(dict)

    def note(self, span: Span, tick: int) -> None:
        """Remember a use."""
        self._ticks[span.storage][span] = tick

    def renew(self, storage: Span, tick: int) -> None:
        """Forget the uses of a storage that had the address before; the memory was in use until now."""
        self._ticks[storage.storage] = {storage: tick}

    def last(self, span: Span) -> int:
        """Return the latest use of any byte of a range."""
        used = self._ticks.get(span.storage, {})
        return max((tick for other, tick in used.items() if other.overlaps(span)), default=0)


class Watcher(Protocol):
    """Told what memory compute uses."""

    def compute(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Take notice of one op, before it runs."""
        ...

    def allocated(self, tensor: Tensor) -> None:
        """Take notice of new memory."""
        ...


class ComputeWatch(TorchDispatchMode):
    """Shows every op of the dispatcher to a watcher; views use no memory."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op between two looks at its memory."""
        if func.is_view:
            return func(*args, **(kwargs or {}))
        inputs, writes = _split(func, args, kwargs or {})
        self._watcher.compute(inputs, writes)
        out = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in (*inputs, *writes)}
        for tensor in _tensors(out):
            if tensor.untyped_storage().data_ptr() not in known:
                self._watcher.allocated(tensor)
        return out


def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an op reads and those that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    written = _written(func)
    for name, value in [*zip(written, args, strict=False), *kwargs.items()]:
        (writes if written[name] else reads).extend(_tensors(value))
    return reads, writes


@cache
def _written(func: Any) -> dict[str, bool]:
    """Return which arguments an op writes to, by name, in order."""
    aliases = ((argument.name, argument.alias_info) for argument in func._schema.arguments)
    return {name: alias is not None and alias.is_write for name, alias in aliases}


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def bytes_at(span: Span) -> np.ndarray:
    """Return memory by address, which keeps nothing alive."""
    if not span.size:
        return np.empty(0, dtype=np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * span.size).from_address(span.start))


_GARBAGE = 0xFF  # NaN in float32 and bfloat16


class RaceError(AssertionError):
    """Two uses of the same memory that nothing puts in order."""


class Clock(NamedTuple):
    """How far each queue has come."""

    compute: int = 0
    copies_in: int = 0
    copies_out: int = 0

    def joined(self, *others: "Clock") -> "Clock":
        """Return the later of each component."""
        return Clock(*map(max, zip(self, *others, strict=True)))


@dataclass(slots=True, eq=False)
class Copy:
    """A copy between device memory and a buffer; it stays known until all that comes later is ordered behind it."""

    number: int
    """In its queue, from 1."""
    clock: Clock
    """What is over when it is over, itself included."""
    device: Span
    buffer: BufferContent
    offset: int
    snapshot: np.ndarray | None = None
    """Of a copy out: the bytes when it was given to the queue."""
    is_sealed: bool = False
    """Its source may change from now on."""
    is_dead: bool = False
    """Its device memory is gone."""
    follows: bool = False
    """Of a copy in: an earlier one, still under way, has the same target."""

    def touches(self, buffer: BufferContent, offset: int, num_bytes: int) -> bool:
        """Return whether it uses a range of a buffer."""
        return self.buffer is buffer and self.offset < offset + num_bytes and offset < self.offset + self.device.size


class LazyTransfer(DirectTransfer):
    """The CPU with copies that are put off.

    Args:
        disk_folder: Where the disk tier may make its files.
        seed: Draws copies that are done earlier than they must; None: none.
    """

    def __init__(self, *, disk_folder: Path | None = None, seed: int | None = None) -> None:
        super().__init__(torch.device("cpu"), disk_folder=disk_folder)
        self.hazards: list[str] = []
        self.num_copies = [0, 0]
        self.most_pending = 0
        self._chance = None if seed is None else np.random.default_rng(seed)
        self._compute = Clock()
        """What the compute queue has come past; what the host knows to be over is part of it."""
        self._host = Clock()
        self._pending_in: deque[Copy] = deque()
        self._pending_out: deque[Copy] = deque()
        self._in: list[Copy] = []
        self._out: list[Copy] = []
        self._accesses = Accesses()
        self._unwritten: list[Copy] = []
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def fetch(self, target: Tensor, source: BufferContent | None, offset: int, after: Sequence[object]) -> object:
        """Put a copy into the queue; from now on the target holds garbage."""
        assert source is not None
        known = self._host.joined(*(event for event in after if isinstance(event, Clock)))
        span = self._watched_span(target)
        for copy in self._out:
            if copy.number > known.copies_out:
                if copy.device.overlaps(span):
                    self._report("a copy in would overwrite what a copy out still reads: wait for that first")
                if copy.touches(source, offset, span.size):
                    self._report("a copy in would read a buffer before the copy out into it is over")
        if self._accesses.last(span) > known.compute:
            self._report("a copy in would overwrite memory that compute may still be using: mark, and wait for that")
        self._seal(span)
        number = self.num_copies[0] = self.num_copies[0] + 1
        clock = known._replace(copies_in=number)
        if self._in:
            clock = clock.joined(self._in[-1].clock)
        follows = any(copy.device.overlaps(span) for copy in self._pending_in)
        copy = Copy(number, clock, span, source, offset, follows=follows)
        bytes_at(span)[:] = _GARBAGE
        self._in.append(copy)
        self._enqueue(self._pending_in, copy)
        return clock

    def store(self, source: Tensor, target: BufferContent | None, offset: int) -> object:
        """Put a copy into the queue; the source must stay what it is."""
        assert target is not None
        assert source.is_contiguous()
        span = self._watched_span(source)
        for copy in self._in:
            if copy.number > self._compute.copies_in:
                if copy.device.overlaps(span):
                    self._report("a copy out would read what a copy in has not brought yet")
                if copy.touches(target, offset, span.size):
                    self._report("a copy out would overwrite a buffer that a copy in still reads")
        number = self.num_copies[1] = self.num_copies[1] + 1
        clock = self._compute._replace(copies_out=number)
        if self._out:
            clock = clock.joined(self._out[-1].clock)
        copy = Copy(number, clock, span, target, offset, snapshot=bytes_at(span).copy())
        self._out.append(copy)
        self._enqueue(self._pending_out, copy)
        return clock

    def mark(self) -> object:
        """Return the present of the compute queue."""
        self._compute = self._compute._replace(compute=self._compute.compute + 1)
        return self._compute

    def wait(self, event: object) -> None:
        """Do the copies that the event stands for."""
        if isinstance(event, Clock):
            self._perform(event)
            self._compute = self._compute.joined(event)

    def synchronize(self, event: object) -> None:
        """Do the copies that the event stands for; all that is started later comes after them."""
        if isinstance(event, Clock):
            self._perform(event)
            self._know(event)

    @contextmanager
    def beside(self, after: Sequence[object]) -> Iterator[None]:
        """Do the copies that the events stand for; compute has not waited for them."""
        for event in after:
            if isinstance(event, Clock):
                self._perform(event)
        yield

    def read(self, scalar: Tensor) -> float:
        """Return the value; the host then knows that compute has come this far."""
        value = super().read(scalar)
        self._know(self._compute)
        return value

    def finish(self) -> None:
        """Do all copies, and write all files."""
        self.synchronize(Clock(self._compute.compute, *self.num_copies))
        self._write_files()

    def close(self) -> None:
        """Do all copies, then remove files."""
        self.finish()
        super().close()

    def compute(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Say that compute uses memory now."""
        tick = self._compute.compute + 1
        self._compute = self._compute._replace(compute=tick)
        coming = [copy for copy in self._in if copy.number > self._compute.copies_in]
        leaving = [copy for copy in self._out if copy.number > self._compute.copies_out]
        for is_write, tensors in ((False, reads), (True, writes)):
            for tensor in tensors:
                span = Span.of(tensor)
                if any(copy.device.overlaps(span) for copy in coming):
                    self._report("compute uses memory that a copy in is still filling: wait for it")
                if is_write and any(copy.device.overlaps(span) for copy in leaving):
                    self._report("compute changes memory that a copy out still reads: wait for it")
                self._accesses.note(span, tick)

    def allocated(self, tensor: Tensor) -> None:
        """Say that memory was taken, which compute may have used for something else until now."""
        self._accesses.renew(Span.of_storage(tensor), self._compute.compute)

    def _watched_span(self, tensor: Tensor) -> Span:
        """Return the memory of a tensor, and notice when it is given back."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._storages:
            whole = Span.of_storage(tensor)
            self._storages[address] = weakref.ref(storage, lambda _: self._released(address, whole))
        return Span.of(tensor)

    def _released(self, address: int, whole: Span) -> None:
        del self._storages[address]
        for copies, known, what in (
            (self._in, self._compute.copies_in, "filled"),
            (self._out, self._compute.copies_out, "copied out"),
        ):
            for copy in copies:
                if copy.number > known and copy.device.overlaps(whole):
                    copy.is_dead = True
                    self.hazards.append(f"memory was given back while it was being {what}: keep it until then")

    def _seal(self, span: Span) -> None:
        """Look a last time at what copies out have read of memory that may be overwritten."""
        for copy in self._pending_out:
            if copy.device.overlaps(span):
                self._check_unchanged(copy)
                copy.is_sealed = True

    def _enqueue(self, queue: deque[Copy], copy: Copy) -> None:
        queue.append(copy)
        self.most_pending = max(self.most_pending, len(self._pending_in) + len(self._pending_out))
        if self._chance is not None:
            for waiting in (self._pending_in, self._pending_out):
                if waiting and self._chance.random() < 0.5:
                    self._perform(waiting[int(self._chance.integers(len(waiting)))].clock)

    def _perform(self, until: Clock) -> None:
        """Do copies in the order of their queues; a copy in comes after the copies out that it waits for."""
        while self._pending_out and self._pending_out[0].number <= until.copies_out:
            copy = self._pending_out.popleft()
            self._check_unchanged(copy)
            self._unwritten.append(copy)
            if not isinstance(copy.buffer, DiskFile):
                self._write(copy)
        while self._pending_in and self._pending_in[0].number <= until.copies_in:
            copy = self._pending_in.popleft()
            self._perform(copy.clock._replace(copies_in=0))
            if copy.is_dead:
                continue
            memory = bytes_at(copy.device)
            if not copy.follows and (memory != _GARBAGE).any():
                self._report("someone wrote to memory that a copy in was filling")
            if isinstance(copy.buffer, DiskFile):
                self._write_files()
            with _disable_current_modes():
                copy.buffer.read(copy.offset, torch.from_numpy(memory))

    def _write(self, copy: Copy) -> None:
        self._unwritten.remove(copy)
        with _disable_current_modes():
            copy.buffer.write(copy.offset, torch.from_numpy(copy.snapshot))

    def _write_files(self) -> None:
        """Write what copies out have brought as far as host memory, in order, as a thread for files does."""
        for copy in tuple(self._unwritten):
            self._write(copy)

    def _check_unchanged(self, copy: Copy) -> None:
        if not (copy.is_sealed or copy.is_dead) and not np.array_equal(bytes_at(copy.device), copy.snapshot):
            self._report("memory was changed while it was being copied out")

    def _know(self, clock: Clock) -> None:
        """Forget copies that all later work is ordered behind, whichever queue it goes to."""
        self._host = self._host.joined(clock)
        self._compute = self._compute.joined(self._host)
        self._in = [copy for copy in self._in if copy.number > self._host.copies_in]
        self._out = [copy for copy in self._out if copy.number > self._host.copies_out]

    def _report(self, hazard: str) -> None:
        self.hazards.append(hazard)
        raise RaceError(hazard)
