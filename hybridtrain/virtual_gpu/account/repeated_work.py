"""Repeated work, whose recorded effect is replayed in dry runs.

Blocks are equal, so a dry run computes one of them and repeats its record for the others. A piece is relative: its
storages count from its first; those that it frees of an earlier piece have lower numbers.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hybridtrain.virtual_gpu.account.op_record import OpRecord
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass


class SharedMemory(Protocol):
    """State outside of tensors that affects work and is changed by it."""

    def mark(self) -> Hashable:
        """Return the hashable state key; equal keys mean equal work."""
        ...

    def restore(self, mark: Hashable) -> None:
        """Restore the state."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """Repeatable work: equal keys and operand shapes imply equal effects, except for values."""

    do: Callable[[], tuple[Tensor, ...]]
    """Function that returns new tensors."""
    operands: Sequence[Tensor]
    key: Callable[[], Hashable]
    """Key of the work; None: it cannot be recorded."""
    memory: SharedMemory | None = None

    def mark(self) -> Hashable:
        """Return the key of the shared memory."""
        return None if self.memory is None else self.memory.mark()

    def restore(self, mark: Hashable) -> None:
        """Restore the shared memory."""
        if self.memory is not None and mark != self.memory.mark():
            self.memory.restore(mark)

    def full_key(self, *more: Hashable) -> Hashable:
        """Return the full key of the work's effect; None: it cannot be recorded."""
        key = self.key()
        if key is None or not all(tensor.is_meta for tensor in self.operands):
            return None
        shapes = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in self.operands)
        return key, self.mark(), shapes, more


@dataclass(frozen=True, slots=True)
class Result:
    """A result tensor of work."""

    storage: int
    """Number of its storage; -1 for one without bytes, which is not counted."""
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def tensor(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor as a view of a meta storage."""
        empty = torch.empty(0, dtype=self.dtype, device="meta")
        return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Piece:
    """The recorded effect of work, relative to its start."""

    inherited: int
    """Number of storages of an earlier piece, some of which are freed."""
    sizes: tuple[int, ...]
    classes: tuple[TensorClass, ...]
    events: tuple[int, ...]
    ops: tuple[OpRecord, ...]
    """Ops on the compute lane, without a unit; their events count from the piece's first."""
    results: tuple[Result, ...]
    kept: tuple[int, ...]
    """Storages alive at the end that belong to no result."""
    most_bytes: int
    """Peak live bytes relative to the start."""
    net_bytes: int
    """Live bytes at the end relative to the start."""
    mark: Hashable
    """State key of the shared memory at the end."""

    @property
    def lets_go(self) -> bool:
        """Whether all storages of the earlier piece are freed at the end."""
        return set(range(self.inherited)) <= {~entry for entry in self.events if entry < 0}


@dataclass(slots=True)
class GraphPieces:
    """A recorded forward pass with its backward passes."""

    forward: Piece
    backward: dict[Hashable, Piece] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PendingBackward:
    """A forward pass whose backward pass is pending."""

    key: Hashable
    work: Work
    pieces: GraphPieces
    kept: tuple[int, ...]
    """Its storages in the ledger."""
    is_written: bool
    """Whether it was only repeated from a record; otherwise there is a graph."""
