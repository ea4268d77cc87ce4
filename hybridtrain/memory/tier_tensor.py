"""Offloaded tensors: their layout in a buffer, and streaming in slices."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.tier import HostBytes, Ticket, TierBuffer
from hybridtrain.plan.placement import Placement
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass

ALIGNMENT = 512
"""Alignment in bytes, as torch's CUDA allocator and vectorised kernels need."""
_NUM_SLOTS = 2


@dataclass(frozen=True, slots=True)
class Field:
    """Location of one tensor in the buffer."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return prod(self.shape) * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        """Return the tensor inside ``flat``, a one-dimensional uint8 tensor."""
        return flat[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class ByteLayout:
    """Fields of a buffer."""

    fields: tuple[Field, ...]
    num_bytes: int

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return all tensors inside ``flat``."""
        return [field.view(flat) for field in self.fields]


def lay_out(tensors: Iterable[tuple[Sequence[int], torch.dtype]]) -> ByteLayout:
    """Return the layout of tensors with the given shapes and dtypes, each at a multiple of 512 bytes."""
    fields: list[Field] = []
    offset = 0
    for shape, dtype in tensors:
        fields.append(Field(offset, tuple(shape), dtype))
        offset += padded(fields[-1].num_bytes)
    return ByteLayout(tuple(fields), offset)


def padded(num_bytes: int) -> int:
    """Return the padded size of a field of ``num_bytes``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class TierTensor:
    """A tensor inside a buffer of a tier."""

    buffer: TierBuffer
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, buffer: TierBuffer, field: Field) -> "TierTensor":
        """Return the tensor of a field of the buffer's layout."""
        return cls(buffer, field.offset, field.shape, field.dtype)

    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    def offset_of(self, element: int) -> int:
        """Return an element's byte offset in the buffer."""
        return self.offset + element * self.dtype.itemsize

    def on_host(self) -> Tensor:
        """Return the flat tensor in host memory, for CPU work; only for the host tier of a real run."""
        content = self.buffer.content
        assert isinstance(content, HostBytes), "CPU work needs a buffer in host memory"
        return content.tensor[self.offset : self.offset_of(self.numel())].view(self.dtype)


Stored = Tensor | TierTensor


def new_stored(
    shape: Sequence[int], dtype: torch.dtype, placement: Placement, tensor_class: TensorClass, unit: str,
    copies: CopyEngine,
) -> Stored:  # fmt: skip
    """Return an uninitialized tensor on the device, or in its own buffer below it."""
    if placement is Placement.DEVICE:
        return copies.empty(shape, dtype, tensor_class, unit)
    buffer = copies.allocate(prod(shape) * dtype.itemsize, placement, tensor_class, unit)
    return TierTensor(buffer, 0, tuple(shape), dtype)


def read_slice(stored: Stored, part: slice, copies: CopyEngine) -> Tensor:
    """Return a range of a stored tensor on the device: a view, or a copy that compute waits for."""
    if isinstance(stored, Tensor):
        return stored.view(-1)[part]
    tensor_P = torch.empty(part.stop - part.start, dtype=stored.dtype, device=copies.device)
    copies.wait(copies.fetch(tensor_P, stored.buffer, stored.offset_of(part.start), [copies.mark()]))
    return tensor_P


def write_slice(stored: Stored, part: slice, value_P: Tensor, copies: CopyEngine) -> None:
    """Write a range of a stored tensor, and wait for completion."""
    if isinstance(stored, Tensor):
        stored.view(-1)[part].copy_(value_P)
        return
    copies.wait(copies.store(value_P, stored.buffer, stored.offset_of(part.start)))


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a stored tensor that one item of work reads, and may write."""

    stored: Stored
    part: slice
    writes: bool = True
    fill: int | None = None
    """Initial value if never stored: it is set instead of fetched."""


class SliceStream:
    """Streams pieces through two device slots: fetched ahead of use, written back after changes."""

    def __init__(self, copies: CopyEngine) -> None:
        self._copies = copies
        self._slots: list[Tensor] = []
        self._views: dict[tuple[int, Field], Tensor] = {}
        """Views of the slots by layout, reused."""
        self._leaving: list[Ticket | None] = [None] * _NUM_SLOTS

    def run(self, items: Iterable[Sequence[Piece]], slot_bytes: int) -> Iterator[list[Tensor]]:
        """Yield each item's flat device tensors; they may be changed until the next item.

        Args:
            items: Items; when streaming, the next one is requested before the last one is yielded.
            slot_bytes: Bytes of the largest item; 0 if all is on the device.
        """
        if slot_bytes:
            self._slots = [
                self._copies.empty((slot_bytes,), torch.uint8, TensorClass.WORKSPACE, f"stream.{index}")
                for index in range(_NUM_SLOTS)
            ]
        source = iter(items)
        item = next(source, None)
        tensors, tickets = ([], []) if item is None else self._fetch(item, 0)
        number = 0
        while item is not None:
            if slot_bytes:
                following = next(source, None)
                arriving = None if following is None else self._fetch(following, 1 - number)
            for ticket in tickets:
                self._copies.wait(ticket)
            yield tensors
            self._store(item, tensors, number)
            if not slot_bytes:
                del item, tensors
                following = next(source, None)
                arriving = None if following is None else self._fetch(following, 1 - number)
            item, number = following, 1 - number
            tensors, tickets = arriving or ([], [])
        self._views.clear()
        for leaving in filter(None, self._leaving):  # the slots' memory may be used for something else after this
            self._copies.wait(leaving)

    def _fetch(self, item: Sequence[Piece], number: int) -> tuple[list[Tensor], list[Ticket]]:
        fields = iter(_layout(item).fields)
        leaving, is_streamed = self._leaving[number], any(isinstance(piece.stored, TierTensor) for piece in item)
        if is_streamed:  # others leave the slot as it is
            self._leaving[number] = None
        after = [self._copies.mark(), *filter(None, [leaving])] if is_streamed else []
        tensors: list[Tensor] = []
        tickets: list[Ticket] = []
        for piece in item:
            stored = piece.stored
            if isinstance(stored, Tensor):
                tensors.append(stored.view(-1)[piece.part])
                continue
            field = next(fields)
            known = self._views.get((number, field))
            tensor = field.view(self._slots[number]) if known is None else known
            self._views[number, field] = tensor
            tensors.append(tensor)
            if piece.fill is None:
                tickets.append(self._copies.fetch(tensor, stored.buffer, stored.offset_of(piece.part.start), after))
            else:
                if leaving is not None:
                    self._copies.wait(leaving)
                tensor.fill_(piece.fill)
        return tensors, tickets

    def _store(self, item: Sequence[Piece], tensors: Sequence[Tensor], number: int) -> None:
        for piece, tensor in zip(item, tensors, strict=True):
            stored = piece.stored
            if piece.writes and not isinstance(stored, Tensor):
                self._leaving[number] = self._copies.store(tensor, stored.buffer, stored.offset_of(piece.part.start))


def _layout(pieces: Iterable[Piece]) -> ByteLayout:
    streamed = (piece for piece in pieces if isinstance(piece.stored, TierTensor))
    return lay_out(((piece.part.stop - piece.part.start,), piece.stored.dtype) for piece in streamed)


def piece_bytes(pieces: Iterable[Piece]) -> int:
    """Return the slot bytes of the streamed pieces, padding included."""
    return _layout(pieces).num_bytes
