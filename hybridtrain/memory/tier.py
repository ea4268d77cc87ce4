"""Memory below the device: buffers in host memory or files, and an exact account of their bytes."""

import mmap
import resource
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hybridtrain.errors import HostMemoryError
from hybridtrain.plan.placement import Placement
from hybridtrain.units import KIB, MIB, format_bytes
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass

_PAGE = mmap.PAGESIZE
_THREAD_BYTES = 80 * MIB
"""Addresses: glibc sets 64 MiB aside for a thread's heap where it finds them, and Python maps its first frames."""


class TierAccount:
    """Live and largest bytes by tier, counted alike in a dry run and in a real one, up to a limit of host memory."""

    def __init__(self, host_limit_bytes: int | None = None) -> None:
        self.host_limit_bytes = host_limit_bytes
        self._live: defaultdict[Placement, int] = defaultdict(int)
        self._peak: defaultdict[Placement, int] = defaultdict(int)
        self._by_class: defaultdict[tuple[Placement, TensorClass], int] = defaultdict(int)

    def enter(self, placement: Placement, num_bytes: int, tensor_class: TensorClass) -> None:
        """Count a new buffer.

        Raises:
            HostMemoryError: host memory would exceed the limit; nothing was counted.
        """
        wanted = self._live[placement] + num_bytes
        if placement is Placement.HOST and self.host_limit_bytes is not None and wanted > self.host_limit_bytes:
            held = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.by_class(placement).items())
            raise HostMemoryError(
                f"host memory: {format_bytes(num_bytes)} more for {tensor_class} exceed the limit of "
                f"{format_bytes(self.host_limit_bytes)} (held: {held or 'nothing'}); raise the limit, move a class to "
                f"disk (tier = 'disk'), or store it in fewer bytes (int8_weights, int8_optimizer, adafactor)."
            )
        self._live[placement] = wanted
        self._peak[placement] = max(self._peak[placement], wanted)
        self._by_class[placement, tensor_class] += num_bytes

    def leave(self, placement: Placement, num_bytes: int, tensor_class: TensorClass) -> None:
        """Remove a buffer from the account."""
        self._live[placement] -= num_bytes
        self._by_class[placement, tensor_class] -= num_bytes

    def peak_bytes(self, placement: Placement) -> int:
        """Return the largest bytes ever held at once."""
        return self._peak[placement]

    def by_class(self, placement: Placement) -> dict[TensorClass, int]:
        """Return the live bytes of each class that holds any."""
        return {kind: size for (place, kind), size in self._by_class.items() if place is placement and size}


class BufferContent(Protocol):
    """The content of a buffer: ``HostBytes`` or a ``DiskFile``."""

    def read(self, offset: int, target: Tensor) -> None:
        """Fill ``target``, contiguous on the CPU, from ``offset`` bytes on."""

    def write(self, offset: int, source: Tensor) -> None:
        """Write ``source``, contiguous on the CPU, at ``offset`` bytes."""

    def close(self) -> None:
        """Release the memory."""


class HostBytes:
    """Anonymous pages: taken from the system as they are touched, zero until then, given back at once by ``close``.

    One mapping per buffer, rounded to whole pages; torch's own pinned allocator rounds to a power of two.
    """

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        try:
            self._map = mmap.mmap(-1, page_rounded(num_bytes))
        except OSError as error:
            raise HostMemoryError(
                f"host memory: the system refused {format_bytes(num_bytes)} ({error.strerror}); close other programs, "
                f"move a tensor class to disk (tier = 'disk'), or choose a smaller model."
            ) from error
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._unpin: Callable[[], object] | None = None
        if pinned:
            address = self.tensor.data_ptr()
            _pin(address, self.tensor.nbytes)
            # The driver must unpin the pages before they are unmapped, also without a call of ``close``.
            self._unpin = finalizer = weakref.finalize(self, _unpin, address)
            finalizer.atexit = False  # the system takes everything then, and CUDA may be gone

    def read(self, offset: int, target: Tensor) -> None:
        """Copy out of the pages."""
        target.view(-1).view(torch.uint8).copy_(self.tensor[offset : offset + target.nbytes])

    def write(self, offset: int, source: Tensor) -> None:
        """Copy into the pages."""
        self.tensor[offset : offset + source.nbytes].copy_(source.view(-1).view(torch.uint8))

    def close(self) -> None:
        """Unpin; the pages go with the last view of them."""
        if self._unpin is not None:
            self._unpin()


def _pin(address: int, num_bytes: int) -> None:
    """Lock pages, so that copies to a card really are asynchronous; CUDA finds out by the address."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = runtime.cudaHostRegister(address, num_bytes, 0)
    if int(code) != 0:
        raise HostMemoryError(
            f"host memory: {format_bytes(num_bytes)} could not be pinned (CUDA error {int(code)}, "
            f"{runtime.cudaGetErrorString(code)}); raise the limit of locked memory (ulimit -l) or, under WSL, the "
            f"memory of the virtual machine."
        )


def _unpin(address: int) -> None:
    """Unlock pages once no copy uses them: cudaHostUnregister is not documented to wait."""
    with suppress(RuntimeError):  # a device that failed copies nothing any more
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def available_host_bytes() -> int | None:
    """Return the system's available memory for new programs, None where it is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith("MemAvailable:")), None)


def has_room_for_threads(count: int = 1) -> bool:
    """Return whether memory remains for more threads: their stacks, heaps and first frames.

    One that gets none dies before its first line, and ``Thread.start`` waits for it forever.
    """
    stack_bytes = resource.getrlimit(resource.RLIMIT_STACK)[0]
    stack_bytes = 8 * MIB if stack_bytes == resource.RLIM_INFINITY else stack_bytes
    try:
        mmap.mmap(-1, count * (stack_bytes + _THREAD_BYTES)).close()
    except OSError:
        return False
    return True


@dataclass(slots=True)
class TierBuffer:
    """Bytes of one purpose on a tier, without content in a dry run."""

    placement: Placement
    num_bytes: int
    tensor_class: TensorClass
    content: BufferContent | None
    last_store: "Ticket | None" = None
    """The newest copy into the buffer; what reads it must wait for that."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The future end of an op on a lane: its number in the ledger and, on CUDA, its event."""

    op: int
    event: object = None


def page_rounded(num_bytes: int) -> int:
    """Return bytes in whole pages, at least one."""
    return -(-max(num_bytes, 1) // _PAGE) * _PAGE
