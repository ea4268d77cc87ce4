"""Sharding of parameters over ranks, and the exchange of ranges between them.

Gradients are summed per rank, then in the order of ranks, independent of the collective. A parameter is sharded into
one range per rank, of whole groups of 256 elements; rank i owns range i. One process with ``DirectGroup(shares)`` does
the same, and is bit-equal.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import chain
from math import ceil

import torch
from torch import Tensor

from hybridkernels.int8_quantize import GROUP_SIZE
from hybridtrain.memory.copy_engine import CopyEngine, Gather
from hybridtrain.memory.formats import StoredWeight, weight_part
from hybridtrain.memory.tier import Ticket
from hybridtrain.memory.tier_tensor import ByteLayout, lay_out
from hybridtrain.virtual_gpu.account.repeated_work import Work


def range_of(count: int, shares: int, number: int) -> slice:
    """Return the range of one shard of ``count`` elements; the last ones may be shorter or empty."""
    chunk = ceil(ceil(count / GROUP_SIZE) / shares) * GROUP_SIZE
    return slice(min(number * chunk, count), min((number + 1) * chunk, count))


def ranges_of(count: int, shares: int) -> list[slice]:
    """Return the range of each shard."""
    return [range_of(count, shares, number) for number in range(shares)]


def overlap(part: slice, own: slice) -> tuple[slice, slice]:
    """Return the overlap of two ranges, relative to the first and to the second; empty if there is none."""
    start, stop = max(part.start, own.start), min(part.stop, own.stop)
    stop = max(start, stop)
    return slice(start - part.start, stop - part.start), slice(start - own.start, stop - own.start)


class Shards:
    """Shards of one rank, and its exchanges with the others.

    Args:
        copies: Engine with the group and the ledger.
        stage: ZeRO stage. 0: nothing is sharded. 1: optimizer state and master. 2: gradients too. 3: weights too.
    """

    def __init__(self, copies: CopyEngine, stage: int = 0) -> None:
        self.group = copies.group
        self.device = copies.device
        self.shares = copies.group.shares
        self.copies = copies
        has_others = copies.group.world > 1
        self.sums = has_others
        """Whether gradients are summed over ranks."""
        self.cuts_state = has_others and stage >= 1
        self.cuts_grads = has_others and stage >= 2
        self.cuts_weights = has_others and stage >= 3

    def range(self, count: int) -> slice:
        """Return the range of a parameter's elements that this rank sums."""
        return range_of(count, self.shares, self.group.rank)

    def own(self, count: int) -> slice:
        """Return the range of a parameter's elements that this rank updates; all without sharding."""
        return self.range(count) if self.cuts_state else slice(0, count)

    def held(self, count: int) -> Iterator[tuple[int, slice]]:
        """Yield number and range of each shard that is updated here, relative to the held state."""
        if self.cuts_state:
            own = self.own(count)
            yield self.group.rank, slice(0, own.stop - own.start)
        else:
            yield from enumerate(ranges_of(count, self.shares))

    def own_weight(self, weight: StoredWeight) -> StoredWeight:
        """Return the own range of a stored weight."""
        return weight_part(weight, self.own(weight[0].numel())) if self.cuts_state else weight

    def agree(self, holds: bool) -> bool:
        """Return whether a condition holds on all ranks."""
        return min(self.group.gather_numbers([float(holds)])) > 0

    def agree_on(self, names: Sequence[str], everything: Sequence[str]) -> tuple[str, ...]:
        """Return the members of ``everything`` that any rank reports."""
        if not self.sums:
            return tuple(names)
        named = self.group.gather_numbers([float(name in names) for name in everything])
        count = len(everything)
        return tuple(name for index, name in enumerate(everything) if any(named[index::count]))

    def gather_all(self, numbers: Tensor) -> Tensor:
        """Gather each rank's numbers of its own ranges, in rank order."""
        if not self.cuts_state:
            return numbers
        rows = numbers.new_empty((self.shares, numbers.numel()))
        self.copies.exchange(self.group.all_gather, rows, numbers)
        return rows.view(-1)

    # ---- gradients

    def sum(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the own flat range of each gradient's sum over all ranks, in one exchange."""
        cuts = [ranges_of(grad.numel(), self.shares) for grad in grads]
        layout = lay_out(((cut[0].stop,), grad.dtype) for grad, cut in zip(grads, cuts, strict=True))
        given, got = (self._empty(self.shares * layout.num_bytes).view(self.shares, -1) for _ in range(2))
        self._repeat("lay out", (given, *grads), partial(_fill_rows, given, layout, grads, cuts))
        self.copies.exchange(self.group.all_to_all, got, given)
        del given
        owned = [cut[self.group.rank] for cut in cuts]
        counts = tuple(own.stop - own.start for own in owned)
        return list(self._repeat(("add", layout, counts), (got,), partial(_added, got, layout, counts)))

    def gather(self, weights: Sequence[StoredWeight]) -> None:
        """Fill the other ranks' ranges of stored weights."""
        layout = self.row_layout(weights)
        row = self._empty(layout.num_bytes)
        self.pack(row, weights)
        self.gather_row(row, weights)

    # ---- rows: the own ranges of some weights, one after the other

    def pack(self, row: Tensor, weights: Sequence[StoredWeight]) -> None:
        """Pack the own ranges into ``row``, uint8."""
        for view, part in self._pairs(row, weights, self.group.rank):
            _copy(view, part)

    def unpack(self, row: Tensor, weights: Sequence[StoredWeight], rank: int | None = None) -> None:
        """Unpack a rank's row (default: the own) into its ranges."""
        for view, part in self._pairs(row, weights, self.group.rank if rank is None else rank):
            _copy(part, view[: part.numel()])

    def gather_row(self, row: Tensor, weights: Sequence[StoredWeight]) -> None:
        """Fill all ranges from the rows of all ranks."""
        rows = self._rows(row)
        self.copies.exchange(self.group.all_gather, rows, row)
        self._unpack_all(rows, weights)

    def gather_ahead(self, row: Tensor, after: Sequence[Ticket]) -> Gather:
        """Start gathering the rows of all ranks, after the copies in ``after`` have fetched the own one."""
        return self.copies.gather_ahead(self._rows(row), row, after)

    def end_gather(self, gather: Gather, weights: Sequence[StoredWeight]) -> None:
        """Fill all ranges from the finished ``gather_ahead``."""
        self.copies.end(gather)
        self._unpack_all(gather.rows, weights)

    def row_layout(self, weights: Sequence[StoredWeight]) -> ByteLayout:
        """Return the layout of stored tensors' ranges in a row, the same on every rank."""
        return lay_out((tuple(part.shape), part.dtype) for part in self._parts(weights, 0))  # no rank has more

    def _parts(self, weights: Sequence[StoredWeight], rank: int) -> Iterator[Tensor]:
        for weight in weights:
            yield from weight_part(weight, range_of(weight[0].numel(), self.shares, rank))

    def _pairs(self, row: Tensor, weights: Sequence[StoredWeight], rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.row_layout(weights).views(row), self._parts(weights, rank), strict=True)

    def _rows(self, row: Tensor) -> Tensor:
        return self._empty(self.shares * row.numel()).view(self.shares, -1)

    def _unpack_all(self, rows: Tensor, weights: Sequence[StoredWeight]) -> None:
        def unpack() -> tuple[Tensor, ...]:
            for rank in range(self.shares):
                self.unpack(rows[rank], weights, rank)
            return ()

        self._repeat(("unpack", tuple(map(len, weights))), (rows, *chain.from_iterable(weights)), unpack)

    def _repeat(
        self, key: Hashable, operands: Sequence[Tensor], do: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Repeat work for every rank, or record it in a dry run."""
        return self.copies.observer.repeat(Work(do, operands, lambda: key))

    def _empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)


def _fill_rows(
    given: Tensor, layout: ByteLayout, grads: Sequence[Tensor], cuts: Sequence[Sequence[slice]]
) -> tuple[Tensor, ...]:
    for row, views in enumerate(map(layout.views, given)):
        for view, grad, cut in zip(views, grads, cuts, strict=True):
            _copy(view, grad.contiguous().view(-1)[cut[row]])
    return ()


def _added(got: Tensor, layout: ByteLayout, counts: Sequence[int]) -> tuple[Tensor, ...]:
    totals: list[Tensor] = []
    for row, views in enumerate(map(layout.views, got)):
        for index, (view, count) in enumerate(zip(views, counts, strict=True)):
            if row:
                totals[index].add_(view[:count])
            else:
                totals.append(view[:count].clone())
    return tuple(totals)


def _copy(target: Tensor, source: Tensor) -> None:
    if source.numel():
        target[: source.numel()].copy_(source)
