"""Optimizer moments of one tensor as they are stored: in floating point, or in 8-bit codes with scales.

A Triton kernel reads where they lie from a table, a small tensor on their device that is made once and found again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hybridkernels.adamw_int8.dynamic_map import QUANT_GROUP_SIZE
from hybridkernels.define_op import describe

NUM_COLUMNS = 12
"""Columns of a table; the last is padding, so that rows start at multiples of 16 bytes."""
_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.uint8: 4}
_ALIGNMENT = 16
"""Bytes that one thread loads at once."""


class MomentCodes(NamedTuple):
    """Codes of the dynamic 8-bit map (adamw_int8/dynamic_map.py), which is unsigned for second moments."""

    codes: Tensor
    """uint8, contiguous; may go on to the end of the last group, where nothing is read."""
    scale: Tensor
    """float32, contiguous, one per group of 256."""


Stored = Tensor | MomentCodes


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of one tensor of weights, on one device; floating-point ones are float32 or bfloat16 and contiguous."""

    m: Stored
    """First moment, any shape."""
    v: Stored
    """Second moment, as many elements."""
    slow: Stored | None = None
    """Slow gradient average, as many elements, in codes of the signed map if in codes."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the values of m, v and slow, then the scales of each where it is in codes."""
        parts = (self.m, self.v, self.slow)
        values = (part.codes if isinstance(part, MomentCodes) else part for part in parts)
        return *values, *(part.scale if isinstance(part, MomentCodes) else None for part in parts)

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None]) -> "Moments":
        """Return the moments that have these ``tensors``."""
        m, v, slow = map(_stored, tensors[:3], tensors[3:])
        assert m is not None
        assert v is not None
        return cls(m, v, slow)

    @property
    def num_elements(self) -> int:
        """The number of weights; whole groups where all moments are codes."""
        return min(values.numel() for values in self.tensors[:3] if values is not None)

    @property
    def device(self) -> torch.device:
        """Device of the moments."""
        return self._values.device

    def sums_like(self) -> Tensor:
        """Return a tensor for what ``moment_statistics`` returns of them, not filled."""
        return self._values.new_empty(8, dtype=torch.float64)

    @property
    def _values(self) -> Tensor:
        return self.m.codes if isinstance(self.m, MomentCodes) else self.m


def _stored(values: Tensor | None, scale: Tensor | None) -> Stored | None:
    return values if values is None or scale is None else MomentCodes(values, scale)


def require_moments(moments: Sequence[Moments]) -> None:
    """Raise an error for moments that do not fit together.

    Raises:
        ValueError: there are none, or sizes, dtypes, devices or memory layouts do not fit.
    """
    if not moments:
        raise ValueError("moment_statistics: no moments are given; give those of at least one tensor")
    device = moments[0].device
    for index, piece in enumerate(moments):
        count, groups = piece.num_elements, -(-piece.num_elements // QUANT_GROUP_SIZE)
        for name, values, scale in zip(("m", "v", "slow"), piece.tensors[:3], piece.tensors[3:], strict=True):
            allowed, most = "float32 or bfloat16", count
            dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
            if scale is not None:
                allowed, most, dtypes = (
                    f"uint8 codes with {groups} float32 scales",
                    groups * QUANT_GROUP_SIZE,
                    (torch.uint8,),
                )
            wanted = ((values, dtypes, count, most), (scale, (torch.float32,), groups, groups))
            for tensor, its_dtypes, fewest, highest in wanted:
                if tensor is None or (
                    fewest <= tensor.numel() <= highest
                    and tensor.dtype in its_dtypes
                    and tensor.device == device
                    and tensor.is_contiguous()
                ):
                    continue
                layout = "contiguous" if tensor.is_contiguous() else "not contiguous"
                raise ValueError(
                    f"moment_statistics: {name} of tensor {index} is {describe(tensor)}, {layout}; beside its others "
                    f"it must be {allowed}, of {count} elements on {device}, contiguous"
                )


class MomentTable(NamedTuple):
    """The rows of some moments, and what a launch needs to know of all of them."""

    rows: Tensor
    """(pieces, 12), int64, on the device of the moments. A row per tensor of weights: number of elements, chunks of the
    tensors before it, addresses of m, v and slow, addresses of their scales, and their kinds (``_KINDS``). Addresses
    are 0 where there is nothing."""
    num_chunks: int
    kinds: int
    """Bits of all kinds that occur."""
    num_elements: int
    num_slow: int


def moment_table(moments: Sequence[Moments], chunk: int) -> MomentTable:
    """Return the table of moments in chunks of ``chunk`` elements, cached per set of moments.

    The cache holds numbers, no moments: a row is right for whatever lies at its addresses now.
    """
    rows, before = [], 0
    for piece in moments:
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in piece.tensors]
        kinds = [0 if values is None else _KINDS[values.dtype] for values in piece.tensors[:3]]
        rows.append((piece.num_elements, before, *addresses, *kinds, 0))
        before += -(-piece.num_elements // chunk)
    return _table(tuple(rows), before, moments[0].device)


@lru_cache(maxsize=8)
def _table(rows: tuple[tuple[int, ...], ...], num_chunks: int, device: torch.device) -> MomentTable:
    kinds = sum({kind for row in rows for kind in row[8:11]})  # each is a bit of its own
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    return MomentTable(table, num_chunks, kinds, sum(row[0] for row in rows), sum(row[10] != 0 for row in rows))


def aligned(moments: Sequence[Moments]) -> list[Moments]:
    """Return the moments, copied where they do not begin at a multiple of 16 bytes, as slices of others may not."""

    def copied(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()

    return [Moments.of([*map(copied, piece.tensors[:3]), *piece.tensors[3:]]) for piece in moments]
