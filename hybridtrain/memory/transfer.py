"""The border between host and device: batches in, scalars out, seeds and events. B batch, T sequence."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Transfer(Protocol):
    """Moves data between host and the compute device."""

    device: torch.device
    host_bytes: int
    """Peak bytes of host memory held for transfers."""

    def upload(self, values: np.ndarray) -> Tensor:
        """Return ``values`` on the device; int64 stays int64."""
        ...

    def read(self, scalar: Tensor) -> float:
        """Return a scalar of the device as a number; waits for the device."""
        ...

    def generator(self, seed: int) -> torch.Generator | None:
        """Return a seeded generator of the device, None where nothing is ever drawn."""
        ...

    @contextmanager
    def keyed_random(self) -> Iterator[None]:
        """Protect the caller's random state from the ``seed`` calls inside."""
        ...

    def seed(self, key: int) -> None:
        """Make the device's random stream start from ``key``."""
        ...


class DirectTransfer:
    """The device is the CPU, or a CUDA card fed through pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host_bytes = 0

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
        """Seed the device's global generator, which dropout and stochastic rounding read."""
        if self.device.type == "cuda":
            torch.cuda.manual_seed(key)
        else:
            torch.default_generator.manual_seed(key)


class VirtualTransfer:
    """The device is the meta device: shapes move, values do not exist."""

    def __init__(self) -> None:
        self.device = torch.device("meta")
        self.host_bytes = 0

    def upload(self, values: np.ndarray) -> Tensor:
        """Return a meta tensor of the same shape and dtype."""
        self.host_bytes = max(self.host_bytes, values.nbytes)
        source = torch.from_numpy(values)
        return torch.empty(source.shape, dtype=source.dtype, device=self.device)

    def read(self, scalar: Tensor) -> float:  # noqa: ARG002
        """Return NaN: a dry run has no values."""
        return math.nan

    def generator(self, seed: int) -> torch.Generator | None:  # noqa: ARG002
        """Return None: nothing is drawn."""
        return None

    @contextmanager
    def keyed_random(self) -> Iterator[None]:
        """Do nothing."""
        yield

    def seed(self, key: int) -> None:
        """Do nothing."""
