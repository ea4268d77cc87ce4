"""Tensors that live below the device: how they lie side by side in bytes, and their passage in slices."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.tier import HostBytes, Ticket, TierBuffer
from hybridtrain.plan.placement import Placement
from hybridtrain.virtual_gpu.account.observer import MemoryObserver
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass

ALIGNMENT = 512
"""Bytes; torch's CUDA allocator and vectorised kernels ask for as much."""


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor's place in the buffer."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Elements of the shape."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return self.num_elements * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        """Return the tensor inside ``flat``, a one-dimensional uint8 tensor."""
        return flat[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class ByteLayout:
    """Fields one after the other."""

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
        field = Field(offset, tuple(shape), dtype)
        fields.append(field)
        offset += padded(field.num_bytes)
    return ByteLayout(tuple(fields), offset)


def padded(num_bytes: int) -> int:
    """Return what a field of ``num_bytes`` takes in a layout."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


_NUM_SLOTS = 2


@dataclass(frozen=True, slots=True)
class TierTensor:
    """A tensor inside a buffer of a tier."""

    buffer: TierBuffer
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    def on_host(self) -> Tensor:
        """Return the tensor in host memory, for work of the processor; only for the host tier of a real run."""
        content = self.buffer.content
        assert isinstance(content, HostBytes), "the processor works on host memory"
        return content.tensor[self.offset : self.offset + self.numel() * self.dtype.itemsize].view(self.dtype)


Stored = Tensor | TierTensor


def new_stored(
    shape: Sequence[int],
    dtype: torch.dtype,
    placement: Placement,
    tensor_class: TensorClass,
    unit: str,
    copies: CopyEngine,
    observer: MemoryObserver,
) -> Stored:
    """Return an unset tensor on the device, or in a buffer of its own below it."""
    if placement is Placement.DEVICE:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=copies.transfer.device)
        observer.label(tensor, tensor_class, unit)
        return tensor
    buffer = copies.allocate(prod(shape) * dtype.itemsize, placement, tensor_class, unit)
    return TierTensor(buffer, 0, tuple(shape), dtype)


def write_slice(stored: Stored, part: slice, value_P: Tensor, copies: CopyEngine) -> None:
    """Write a range of a stored tensor's elements, and wait until it is there."""
    if isinstance(stored, Tensor):
        stored.view(-1)[part].copy_(value_P)
        return
    copies.wait(copies.store(value_P, stored.buffer, stored.offset + part.start * stored.dtype.itemsize))


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a stored tensor's elements that one step of work reads, and maybe writes."""

    stored: Stored
    part: slice
    writes: bool = True
    fill: int | None = None
    """Value of every element, where nothing was ever stored: it is set instead of fetched."""

    @property
    def is_resident(self) -> bool:
        """Whether it is on the device already."""
        return isinstance(self.stored, Tensor)


class SliceStream:
    """Brings pieces to the device ahead of their use and writes changed ones back behind it, in two slots."""

    def __init__(self, copies: CopyEngine, observer: MemoryObserver) -> None:
        self._copies = copies
        self._observer = observer
        self._slots: list[Tensor] = []
        self._views: dict[tuple[int, Field], Tensor] = {}
        """Of the slots: the same few again and again."""
        self._leaving: list[Ticket | None] = [None] * _NUM_SLOTS

    def run(self, items: Iterable[Sequence[Piece]], slot_bytes: int) -> Iterator[list[Tensor]]:
        """Yield the flat device tensors of each item in turn; they may be changed until the next is asked for.

        Args:
            items: Of any length; the next one is asked for before the last one is yielded, if anything is streamed.
            slot_bytes: What the largest item takes, 0 when all is on the device.
        """
        self._grow(slot_bytes)
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
        for index, leaving in enumerate(self._leaving):
            if leaving is not None:  # the slots' memory may be used for something else after this
                self._copies.wait(leaving)
                self._leaving[index] = None

    def _grow(self, num_bytes: int) -> None:
        if num_bytes and (not self._slots or self._slots[0].nbytes < num_bytes):
            self._views.clear()
            self._slots = []
            for index in range(_NUM_SLOTS):
                slot = torch.empty(num_bytes, dtype=torch.uint8, device=self._copies.transfer.device)
                self._observer.label(slot, TensorClass.WORKSPACE, f"stream.{index}")
                self._slots.append(slot)

    def _fetch(self, item: Sequence[Piece], number: int) -> tuple[list[Tensor], list[Ticket]]:
        streamed = [piece for piece in item if not piece.is_resident]
        fields = iter(_layout(streamed).fields)
        leaving = self._leaving[number]
        if streamed:  # others leave the slot as it is
            self._leaving[number] = None
        after = [self._copies.mark(), *([] if leaving is None else [leaving])] if streamed else []
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
                offset = stored.offset + piece.part.start * stored.dtype.itemsize
                tickets.append(self._copies.fetch(tensor, stored.buffer, offset, after))
            else:
                if leaving is not None:
                    self._copies.wait(leaving)
                tensor.fill_(piece.fill)
        return tensors, tickets

    def _store(self, item: Sequence[Piece], tensors: Sequence[Tensor], number: int) -> None:
        for piece, tensor in zip(item, tensors, strict=True):
            stored = piece.stored
            if piece.writes and not isinstance(stored, Tensor):
                offset = stored.offset + piece.part.start * stored.dtype.itemsize
                self._leaving[number] = self._copies.store(tensor, stored.buffer, offset)


def _layout(pieces: Sequence[Piece]) -> ByteLayout:
    return lay_out(((piece.part.stop - piece.part.start,), piece.stored.dtype) for piece in pieces)


def piece_bytes(pieces: Sequence[Piece]) -> int:
    """Return what the streamed ones of some pieces take in a slot, padding included."""
    return _layout([piece for piece in pieces if not piece.is_resident]).num_bytes
