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
"""Address space per thread: glibc reserves 64 MiB for its heap, and Python maps its first frames."""


class TierAccount:
    """Current and peak bytes by tier, in dry and real runs, with a limit of host memory."""

    def __init__(self, host_limit_bytes: int | None = None) -> None:
        self.host_limit_bytes = host_limit_bytes
        self._live: defaultdict[Placement, int] = defaultdict(int)
        self._peak: defaultdict[Placement, int] = defaultdict(int)
        self._by_class: defaultdict[tuple[Placement, TensorClass], int] = defaultdict(int)

    def enter(self, placement: Placement, num_bytes: int, tensor_class: TensorClass) -> None:
        """Count a new buffer.

        Raises:
            HostMemoryError: host memory would exceed the limit; nothing was added.
        """
        wanted = self._live[placement] + num_bytes
        if placement is Placement.HOST and self.host_limit_bytes is not None and wanted > self.host_limit_bytes:
            held = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.by_class(placement).items())
            raise HostMemoryError(
                f"host memory: {format_bytes(num_bytes)} more for {tensor_class} exceed the limit of "
                f"{format_bytes(self.host_limit_bytes)} (in use: {held or 'nothing'}); raise the limit, offload a "
                f"tensor class to disk (tier = 'disk'), or store it in fewer bytes (int8_weights, int8_optimizer, "
                f"adafactor)."
            )
        self._live[placement] = wanted
        self._peak[placement] = max(self._peak[placement], wanted)
        self._by_class[placement, tensor_class] += num_bytes

    def leave(self, placement: Placement, num_bytes: int, tensor_class: TensorClass) -> None:
        """Remove a buffer from the account."""
        self._live[placement] -= num_bytes
        self._by_class[placement, tensor_class] -= num_bytes

    def peak_bytes(self, placement: Placement) -> int:
        """Return the peak bytes."""
        return self._peak[placement]

    def by_class(self, placement: Placement) -> dict[TensorClass, int]:
        """Return the current bytes of each tensor class, without zeros."""
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
    """Anonymous pages, zero at first: taken from the system when touched, freed by ``close``.

    Each buffer is rounded to whole pages; torch's pinned allocator rounds to a power of two.
    """

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        try:
            self._map = mmap.mmap(-1, page_rounded(num_bytes))
        except OSError as error:
            raise HostMemoryError(
                f"host memory: the system refused {format_bytes(num_bytes)} ({error.strerror}); close other programs, "
                f"offload a tensor class to disk (tier = 'disk'), or choose a smaller model."
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
        """Copy from the pages."""
        target.view(-1).view(torch.uint8).copy_(self.tensor[offset : offset + target.nbytes])

    def write(self, offset: int, source: Tensor) -> None:
        """Copy into the pages."""
        self.tensor[offset : offset + source.nbytes].copy_(source.view(-1).view(torch.uint8))

    def close(self) -> None:
        """Unpin; the pages are freed with their last view."""
        if self._unpin is not None:
            self._unpin()


def _pin(address: int, num_bytes: int) -> None:
    """Lock pages, so that copies to a card really are asynchronous; CUDA finds out by the address."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = runtime.cudaHostRegister(address, num_bytes, 0)
    if int(code) != 0:
        raise HostMemoryError(
            f"host memory: {format_bytes(num_bytes)} could not be pinned (CUDA error {int(code)}, "
            f"{runtime.cudaGetErrorString(code)}); raise the limit of locked memory (ulimit -l); under WSL the memory "
            f"of the virtual machine."
        )


def _unpin(address: int) -> None:
    """Unlock pages once no copy uses them: cudaHostUnregister is not documented to wait."""
    with suppress(RuntimeError):  # a device that failed copies nothing any more
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def available_host_bytes() -> int | None:
    """Return the system's available memory in bytes; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith("MemAvailable:")), None)


def has_room_for_threads(count: int = 1) -> bool:
    """Return whether memory suffices for more threads: stacks, heaps and first frames.

    A thread without memory dies before its first line, and ``Thread.start`` hangs.
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
    """A buffer on a tier, without content in a dry run."""

    placement: Placement
    num_bytes: int
    tensor_class: TensorClass
    content: BufferContent | None
    last_store: "Ticket | None" = None
    """Latest copy into the buffer; readers must wait for it."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Completion of an op on a lane: its number in the ledger and, on CUDA, its event."""

    op: int
    event: object = None


def page_rounded(num_bytes: int) -> int:
    """Round bytes up to whole pages, at least one."""
    return -(-max(num_bytes, 1) // _PAGE) * _PAGE
