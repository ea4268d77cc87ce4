"""The border between host and device: batches in, scalars out, seeds and events. B batch, T sequence."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridtrain.errors import ConfigError
from hybridtrain.memory.disk_tier import DiskArena
from hybridtrain.memory.tier import BufferContent, HostBytes, TierAccount, available_host_bytes
from hybridtrain.plan.placement import Placement


class Transfer:
    """Moves data between host and the compute device.

    This base class computes and copies nothing; methods that a transfer does not override complete at once.
    """

    def __init__(self, device: torch.device, tiers: TierAccount) -> None:
        self.device = device
        self.tiers = tiers
        self.host_bytes = 0
        """Peak bytes of host memory held for batches on their way."""

    def upload(self, values: np.ndarray) -> Tensor:
        """Return ``values`` on the device; int64 stays int64."""
        self.host_bytes = max(self.host_bytes, values.nbytes)
        source = torch.from_numpy(values)
        return torch.empty(source.shape, dtype=source.dtype, device=self.device)

    def read(self, scalar: Tensor) -> float:  # noqa: ARG002
        """Return a scalar of the device as a number, NaN where there are no values; waits for the device."""
        return math.nan

    def generator(self, seed: int) -> torch.Generator | None:  # noqa: ARG002
        """Return a seeded generator of the device, None where nothing is ever drawn."""
        return None

    def keyed_random(self) -> AbstractContextManager[None]:
        """Protect the caller's random state from the ``seed`` calls inside."""
        return nullcontext()

    def seed(self, key: int) -> None:
        """Seed the device's random stream, which dropout and stochastic rounding read, with ``key``."""

    def open_bytes(self, placement: Placement, num_bytes: int, name: str) -> BufferContent | None:  # noqa: ARG002
        """Return zeroed memory on the host or on disk; None where nothing is ever computed.

        Raises:
            HostMemoryError, DiskSpaceError: there is not enough.
            ConfigError: disk without a folder for it.
        """
        return None

    def fetch(self, target: Tensor, source: BufferContent | None, offset: int, after: Sequence[object]) -> object:  # noqa: ARG002
        """Start filling the contiguous ``target`` on the device once the events are over; return an event."""
        return None

    def store(self, source: Tensor, target: BufferContent | None, offset: int) -> object:  # noqa: ARG002
        """Start writing ``source`` once the compute queue has come this far; return an event."""
        return None

    def mark(self) -> object:
        """Return an event at the end of the compute queue."""
        return None

    def wait(self, event: object) -> None:
        """Make the compute queue wait for an event."""

    def synchronize(self, event: object) -> None:
        """Block the CPU until an event is over."""

    def beside(self, after: Sequence[object]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Run the work queued inside in parallel to the compute queue, once its present work and copies in are over.

        Args:
            after: Events of copies from host memory.
        """
        return nullcontext()

    def finish(self) -> None:
        """Block until every copy is over and every file is written."""

    def close(self) -> None:
        """Finish pending work and remove files."""


class VirtualTransfer(Transfer):
    """The device is the meta device: shapes move, values do not exist."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"), TierAccount())


class DirectTransfer(Transfer):
    """The device is the CPU, where copies are done at once, or a CUDA card (see ``CudaTransfer``).

    The disk tier makes its files in ``disk_folder``. Offloaded tensors may take ``host_limit_bytes`` of host memory;
    None: what the machine has available.
    """

    def __init__(
        self, device: torch.device, *, disk_folder: Path | None = None, host_limit_bytes: int | None = None
    ) -> None:
        super().__init__(device, TierAccount(available_host_bytes() if host_limit_bytes is None else host_limit_bytes))
        self._disk_folder = disk_folder
        self._arena: DiskArena | None = None

    def upload(self, values: np.ndarray) -> Tensor:
        """Return a copy of ``values`` on the device, asynchronous on CUDA."""
        source = torch.from_numpy(values)
        if self.device.type == "cuda":
            source = source.pin_memory()
        self.host_bytes = max(self.host_bytes, source.nbytes)
        target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        return target.copy_(source, non_blocking=True)

    def read(self, scalar: Tensor) -> float:
        """Return the value; on CUDA this waits for all work queued so far."""
        return float(scalar.item())

    def generator(self, seed: int) -> torch.Generator | None:
        """Return a new generator of the device."""
        return torch.Generator(self.device).manual_seed(seed)

    @contextmanager
    def keyed_random(self) -> Iterator[None]:
        """Restore the global random state at the end."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            yield

    def seed(self, key: int) -> None:
        """Seed the device's global generator."""
        if self.device.type == "cuda":
            torch.cuda.manual_seed(key)
        else:
            torch.default_generator.manual_seed(key)

    def open_bytes(self, placement: Placement, num_bytes: int, name: str) -> BufferContent | None:
        """Return zeroed host memory, pinned for a CUDA card, or a file in the disk folder."""
        if placement is Placement.HOST:
            return HostBytes(num_bytes, pinned=self.device.type == "cuda")
        if self._arena is None:
            if self._disk_folder is None:
                raise ConfigError(
                    "disk tier",
                    [f"{name}: a tensor class is placed on disk, but no folder was named; give one (--disk FOLDER)"],
                )
            self._arena = DiskArena(self._disk_folder)
        return self._arena.allocate(num_bytes, name)

    def fetch(self, target: Tensor, source: BufferContent | None, offset: int, after: Sequence[object]) -> object:  # noqa: ARG002
        """Copy at once."""
        assert source is not None, "a real run has real memory"
        with _disable_current_modes():
            source.read(offset, target)
        return None

    def store(self, source: Tensor, target: BufferContent | None, offset: int) -> object:
        """Copy at once."""
        assert target is not None, "a real run has real memory"
        with _disable_current_modes():
            target.write(offset, source)
        return None

    def close(self) -> None:
        """Remove the files of the disk tier."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None
