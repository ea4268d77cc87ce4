"""Several tensors in one flat buffer of bytes, so that they cross the bus in one copy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

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
