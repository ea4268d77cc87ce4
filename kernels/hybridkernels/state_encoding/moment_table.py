"""Where moments lie, as a small tensor on their device that a kernel reads; made once and found again.

A row per tensor of weights: number of elements, chunks of the tensors before it, addresses of m, v and slow, addresses
of their scales, and their kinds (kernel_parts.py). Addresses are 0 where there is nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hybridkernels.state_encoding.moments import Coded, Moments, Stored

NUM_COLUMNS = 12
"""The last one is not used: rows begin at multiples of 16 bytes."""
_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.uint8: 4}
_ALIGNMENT = 16
"""Bytes that one thread loads at once."""


@dataclass(frozen=True, slots=True)
class MomentTable:
    """The rows of some moments, and what a launch needs to know of all of them."""

    rows: Tensor
    """(pieces, 12), int64, on the device of the moments."""
    num_chunks: int
    kinds: int
    """Bits of all kinds that occur."""
    num_elements: int
    num_slow: int


def moment_table(moments: Sequence[Moments], chunk: int) -> MomentTable:
    """Return the table of moments in chunks of so many elements; the same moments find the table they had before.

    The cache holds numbers, no moments: a row is right for whatever lies at its addresses now.
    """
    rows, before = [], 0
    for piece in moments:
        numel, parts = piece.num_elements, (piece.m, piece.v, piece.slow)
        values = [part.codes if isinstance(part, Coded) else part for part in parts]
        addresses = [0 if value is None else value.data_ptr() for value in values]
        scales = [part.scale.data_ptr() if isinstance(part, Coded) else 0 for part in parts]
        kinds = [0 if value is None else _KINDS[value.dtype] for value in values]
        rows.append((numel, before, *addresses, *scales, *kinds, 0))
        before += -(-numel // chunk)
    return _table(tuple(rows), before, moments[0].device)


def aligned(moments: Sequence[Moments]) -> list[Moments]:
    """Return the moments, copied where they do not begin at a multiple of 16 bytes, as slices of others may not."""
    return [
        Moments(_aligned(piece.m), _aligned(piece.v), None if piece.slow is None else _aligned(piece.slow))
        for piece in moments
    ]


def _aligned(stored: Stored) -> Stored:
    values = stored.codes if isinstance(stored, Coded) else stored
    if values.data_ptr() % _ALIGNMENT == 0:
        return stored
    return Coded(values.clone(), stored.scale) if isinstance(stored, Coded) else values.clone()


@lru_cache(maxsize=8)
def _table(rows: tuple[tuple[int, ...], ...], num_chunks: int, device: torch.device) -> MomentTable:
    kinds = 0
    for row in rows:
        for kind in row[8:11]:
            kinds |= kind
    return MomentTable(
        rows=torch.tensor(rows, dtype=torch.int64, device=device), num_chunks=num_chunks, kinds=kinds,
        num_elements=sum(row[0] for row in rows), num_slow=sum(row[10] != 0 for row in rows),
    )  # fmt: skip
