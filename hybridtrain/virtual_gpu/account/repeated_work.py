"""Repeated work: its recorded effect replaces it where no tensor has values.

A model's blocks are alike, so a dry run computes one of them and writes down the others. A piece knows nothing of where
it came from: storages count from its first, those of an earlier piece that it lets go come before.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hybridtrain.virtual_gpu.account.tensor_class import TensorClass

if TYPE_CHECKING:  # the ledger makes pieces
    from hybridtrain.virtual_gpu.account.ledger import OpRecord


class SharedMemory(Protocol):
    """Memory outside of any tensor that decides what work has to do, and is changed by it."""

    def mark(self) -> Hashable:
        """Return the hashable state key: equal keys, equal work."""
        ...

    def restore(self, mark: Hashable) -> None:
        """Restore the state."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """Repeatable work: equal keys and operand shapes imply equal effects, except for values."""

    do: Callable[[], tuple[Tensor, ...]]
    """Returns new tensors."""
    operands: Sequence[Tensor]
    key: Callable[[], Hashable]
    """None: it is done each time."""
    memory: SharedMemory | None = None

    def mark(self) -> Hashable:
        """Return the key of the shared memory."""
        return None if self.memory is None else self.memory.mark()

    def restore(self, mark: Hashable) -> None:
        """Restore the shared memory."""
        if self.memory is not None and mark != self.memory.mark():
            self.memory.restore(mark)

    def full_key(self, *more: Hashable) -> Hashable:
        """Return the full key of the work's effect; None: it is done each time."""
        key = self.key()
        if key is None or not all(tensor.is_meta for tensor in self.operands):
            return None
        shapes = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in self.operands)
        return key, self.mark(), shapes, more


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that work gave back."""

    storage: int
    """-1: one without bytes, which is not counted."""
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def tensor(self, storage: torch.UntypedStorage) -> Tensor:
        """Return such a tensor of a storage on the meta device."""
        empty = torch.empty(0, dtype=self.dtype, device="meta")
        return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Piece:
    """The recorded effect of work, counted from its beginning."""

    inherited: int
    """Storages of an earlier piece that are freed: numbers below this."""
    sizes: tuple[int, ...]
    classes: tuple[TensorClass, ...]
    events: tuple[int, ...]
    ops: tuple["OpRecord", ...]
    """Of the compute lane, of no unit; their events count from the piece's first."""
    results: tuple[Result, ...]
    kept: tuple[int, ...]
    """Storages that are alive at the end and belong to no result."""
    most_bytes: int
    """Live at once more than at the beginning."""
    net_bytes: int
    """Live at the end more than at the beginning."""
    mark: Hashable
    """State key of the shared memory at the end."""

    @property
    def lets_go(self) -> bool:
        """Whether all storages of the earlier piece are gone at the end."""
        return set(range(self.inherited)) <= {~entry for entry in self.events if entry < 0}


@dataclass(slots=True)
class GraphPieces:
    """A forward pass, and the backward passes that it was differentiated by."""

    forward: Piece
    backward: dict[Hashable, Piece] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PendingBackward:
    """A forward pass that waits for its backward pass."""

    key: Hashable
    work: Work
    pieces: GraphPieces
    kept: tuple[int, ...]
    """Storages of the ledger."""
    is_written: bool
    """Whether it was only recorded; else it was done, and there is a graph."""
