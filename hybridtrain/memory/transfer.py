"""Transfers between host and device: batches, scalars, seeds and events. B batch, T sequence."""

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
    """Moves data between host and compute device. This base class does nothing."""

    def __init__(self, device: torch.device, tiers: TierAccount) -> None:
        self.device = device
        self.tiers = tiers
        self.host_bytes = 0
        """Peak host memory of batches in transfer."""

    def upload(self, values: np.ndarray) -> Tensor:
        """Copy ``values`` to the device, dtype unchanged."""
        self.host_bytes = max(self.host_bytes, values.nbytes)
        source = torch.from_numpy(values)
        return torch.empty(source.shape, dtype=source.dtype, device=self.device)

    def read(self, scalar: Tensor) -> float:  # noqa: ARG002
        """Return a device scalar as a number, NaN in a dry run; waits for the device."""
        return math.nan

    def generator(self, seed: int) -> torch.Generator | None:  # noqa: ARG002
        """Return a seeded device generator; None in a dry run."""
        return None

    def keyed_random(self) -> AbstractContextManager[None]:
        """Restore the caller's random state after the ``seed`` calls inside."""
        return nullcontext()

    def seed(self, key: int) -> None:
        """Seed the device's random stream, used by dropout and stochastic rounding."""

    def open_bytes(self, placement: Placement, num_bytes: int, name: str) -> BufferContent | None:  # noqa: ARG002
        """Return zeroed host or disk memory; None in a dry run.

        Raises:
            HostMemoryError, DiskSpaceError: not enough space. ConfigError: no folder for the disk tier.
        """
        return None

    def fetch(self, target: Tensor, source: BufferContent | None, offset: int, after: Sequence[object]) -> object:  # noqa: ARG002
        """Start copying to the contiguous device tensor ``target`` after the events; return an event."""
        return None

    def store(self, source: Tensor, target: BufferContent | None, offset: int) -> object:  # noqa: ARG002
        """Start copying ``source`` to a buffer after queued compute work; return an event."""
        return None

    def mark(self) -> object:
        """Return an event at the end of the compute queue."""
        return None

    def wait(self, event: object) -> None:
        """Make the compute queue wait for an event."""

    def synchronize(self, event: object) -> None:
        """Block the CPU until an event is complete."""

    def beside(self, after: Sequence[object]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Run the work inside in parallel to the compute queue, after its present work.

        Args:
            after: Events of copies from host memory.
        """
        return nullcontext()

    def finish(self) -> None:
        """Block until all copies and file writes are complete."""

    def close(self) -> None:
        """Finish pending work and remove files."""


class VirtualTransfer(Transfer):
    """Transfer of a dry run on the meta device: shapes without values."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"), TierAccount())


class DirectTransfer(Transfer):
    """Transfer for the CPU, where copies are synchronous; base of ``CudaTransfer``.

    ``disk_folder`` is for the disk tier. ``host_limit_bytes`` limits offloaded tensors; None: the machine's available
    memory.
    """

    def __init__(
        self, device: torch.device, *, disk_folder: Path | None = None, host_limit_bytes: int | None = None
    ) -> None:
        super().__init__(device, TierAccount(available_host_bytes() if host_limit_bytes is None else host_limit_bytes))
        self._disk_folder = disk_folder
        self._arena: DiskArena | None = None

    def upload(self, values: np.ndarray) -> Tensor:
        """Copy ``values`` to the device, asynchronously on CUDA."""
        source = torch.from_numpy(values)
        if self.device.type == "cuda":
            source = source.pin_memory()
        self.host_bytes = max(self.host_bytes, source.nbytes)
        target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        return target.copy_(source, non_blocking=True)

    def read(self, scalar: Tensor) -> float:
        """Return the value; on CUDA waits for all queued work."""
        return float(scalar.item())

    def generator(self, seed: int) -> torch.Generator | None:
        """Return a new generator of the device."""
        return torch.Generator(self.device).manual_seed(seed)

    @contextmanager
    def keyed_random(self) -> Iterator[None]:
        """Restore the global random state on exit."""
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
                    [f"{name}: a tensor class is placed on disk, but there is no folder; give --disk FOLDER"],
                )
            self._arena = DiskArena(self._disk_folder)
        return self._arena.allocate(num_bytes, name)

    def fetch(self, target: Tensor, source: BufferContent | None, offset: int, after: Sequence[object]) -> object:  # noqa: ARG002
        """Copy at once."""
        assert source is not None, "a copy without memory in a real run"
        with _disable_current_modes():
            source.read(offset, target)
        return None

    def store(self, source: Tensor, target: BufferContent | None, offset: int) -> object:
        """Copy at once."""
        assert target is not None, "a copy without memory in a real run"
        with _disable_current_modes():
            target.write(offset, source)
        return None

    def close(self) -> None:
        """Remove the files of the disk tier."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None
