"""Rows of T tokens cut from documents, and the batches made of them.

Letters: B rows of a micro-batch, T inputs of a row, N tokens of all documents.

A document of n tokens has n - 1 pairs of an input and the token after it. A row takes T pairs: a document with more is
cut into pieces, and no pair is lost at a cut; the last token of a document is a target only. So each pair comes exactly
once an epoch. Pieces without a target that counts are left out: attention ends where the document does, so they would
change nothing.

Rows are filled by best fit over pieces of decreasing length (Ding et al., Fewer Truncations Improve Language Modeling,
2404.10830), which is a function of the lengths and the seed. A batch is a function of (seed, step, micro-batch): epoch
e takes the rows in an order keyed by (seed, e). A run resumed with another batch size begins at the row that it
had come to.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from hybridtrain.data.batches import IGNORED, TokenBatch
from hybridtrain.data.byte_tokens import TokenArray
from hybridtrain.errors import DataError

_PACK_STREAM: Final = 0
_EPOCH_STREAM: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedDocuments:
    """Documents one after another, in memory or memory-mapped."""

    tokens: TokenArray
    """(N,) token ids."""
    ends: npt.NDArray[np.int64]
    """(documents,): end of each document, exclusive."""
    counted: npt.NDArray[np.uint8] | None = None
    """(N,): 1 where a token counts as a target; None: everywhere."""

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return int(self.ends.size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRows:
    """The pieces of documents that each row contains."""

    documents: EncodedDocuments
    seq_len: int
    starts: npt.NDArray[np.int64]
    """(pieces,): first input of each piece, in the order of the rows."""
    lengths: npt.NDArray[np.int32]
    """(pieces,): inputs of each piece."""
    row_ends: npt.NDArray[np.int64]
    """(rows,): end of each row's pieces, exclusive."""
    is_apart: bool
    """Whether attention stays inside documents; otherwise a row is one piece."""
    num_dropped: int
    """Pieces dropped because no target in them counts."""
    num_cut: int
    """Documents split so that an answer is separated from its prompt."""
    pad_id: int = 0

    @property
    def num_rows(self) -> int:
        """Rows per epoch."""
        return int(self.row_ends.size)

    @property
    def num_tokens(self) -> int:
        """Inputs per epoch, without padding."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def fill(self) -> float:
        """Share of positions that are not padding."""
        return self.num_tokens / (self.num_rows * self.seq_len)

    def part(self, first: int, last: int) -> "PackedRows":
        """Return the rows from ``first`` up to ``last``."""
        begin = int(self.row_ends[first - 1]) if first else 0
        end = int(self.row_ends[last - 1]) if last else 0
        return replace(
            self, starts=self.starts[begin:end], lengths=self.lengths[begin:end],
            row_ends=self.row_ends[first:last] - begin, num_dropped=0, num_cut=0,
        )  # fmt: skip

    def batch(self, rows: npt.NDArray[np.int64]) -> TokenBatch:
        """Return rows by their numbers."""
        shape = (rows.size, self.seq_len)
        token_ids_BT = np.full(shape, self.pad_id, dtype=np.int64)
        target_ids_BT = np.full(shape, IGNORED, dtype=np.int64)
        document_ids_BT = np.zeros(shape, dtype=np.int32)
        lengths_B = np.zeros(rows.size, dtype=np.int64)
        tokens, counted = self.documents.tokens, self.documents.counted
        for place, row in enumerate(rows.tolist()):
            first = int(self.row_ends[row - 1]) if row else 0
            column = 0
            for number, piece in enumerate(range(first, int(self.row_ends[row]))):
                start, length = int(self.starts[piece]), int(self.lengths[piece])
                columns = slice(column, column + length)
                token_ids_BT[place, columns] = tokens[start : start + length]
                targets = tokens[start + 1 : start + length + 1].astype(np.int64)
                if counted is not None:
                    targets[counted[start + 1 : start + length + 1] == 0] = IGNORED
                target_ids_BT[place, columns] = targets
                document_ids_BT[place, columns] = number
                column += length
                document_ids_BT[place, column:] = number + 1  # padding is a document of its own
            lengths_B[place] = column
        return TokenBatch(
            token_ids_BT=token_ids_BT,
            target_ids_BT=target_ids_BT,
            document_ids_BT=document_ids_BT if self.is_apart else None,
            lengths_B=lengths_B if (lengths_B < self.seq_len).any() else None,
        )

    def batches(self, *, micro_batch_size: int, max_rows: int) -> Iterator[TokenBatch]:
        """Yield the first rows in order; the last batch may be smaller."""
        last = min(max_rows, self.num_rows)
        for first in range(0, last, micro_batch_size):
            yield self.batch(np.arange(first, min(first + micro_batch_size, last)))


def pack(
    documents: EncodedDocuments, *, seq_len: int, seed: int, joins_documents: bool, what: str, pad_id: int = 0
) -> PackedRows:
    """Pack all documents into rows.

    Args:
        documents: The documents to pack.
        seq_len: T.
        seed: Decides the order of rows and of equally long pieces; at least 0.
        joins_documents: Put as many pieces into a row as fit, attention inside each; else one document per row.
        what: Name of the data in the ``DataError`` for documents without any target that counts.
        pad_id: Padding token.
    """
    starts, lengths, num_dropped, num_cut = _pieces(documents, seq_len)
    if not starts.size:
        raise DataError(
            f"{what}: none of {documents.num_documents} documents has a token that counts as a target; give documents "
            "of at least two tokens, with answers where loss_on = 'answers'"
        )
    row_ends = np.arange(1, starts.size + 1)
    if joins_documents:
        ties = _random(starts.size, seed, _PACK_STREAM)
        row_of = _best_fit(lengths, seq_len, np.lexsort((ties, -lengths)))
        num_rows = int(row_of.max()) + 1
        # Rows were begun by decreasing length: shuffled, any part of them is a fair sample.
        row_of = seeded_permutation(num_rows, seed, _PACK_STREAM, num_rows).argsort()[row_of]
        order = np.argsort(row_of, kind="stable")
        starts, lengths = starts[order], lengths[order]
        row_ends = np.cumsum(np.bincount(row_of, minlength=num_rows))
    return PackedRows(
        documents=documents, seq_len=seq_len, starts=starts, lengths=lengths.astype(np.int32), row_ends=row_ends,
        is_apart=joins_documents, num_dropped=num_dropped, num_cut=num_cut, pad_id=pad_id,
    )  # fmt: skip


def _pieces(
    documents: EncodedDocuments, seq_len: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int, int]:  # fmt: skip
    """Return first input and length of each piece with a counted target; numbers of dropped pieces, cut documents."""
    begins = np.concatenate([np.zeros(1, dtype=np.int64), documents.ends[:-1]])
    num_pairs = np.maximum(documents.ends - begins - 1, 0)
    num_pieces = -(-num_pairs // seq_len)
    owner = np.repeat(np.arange(begins.size), num_pieces)
    offsets = (np.arange(owner.size) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)) * seq_len
    starts = begins[owner] + offsets
    lengths = np.minimum(seq_len, num_pairs[owner] - offsets)
    num_empty = int((num_pairs == 0).sum())
    if documents.counted is None or not starts.size:
        return starts, lengths, num_empty, 0
    borders = np.stack([starts + 1, starts + 1 + lengths], axis=1).reshape(-1)
    if borders[-1] == documents.counted.size:
        borders = borders[:-1]
    keeps = np.maximum.reduceat(documents.counted, borders)[::2] > 0
    asks = np.minimum.reduceat(documents.counted, borders)[::2] == 0
    is_first = offsets == 0
    num_cut = np.intersect1d(owner[is_first & asks], owner[~is_first & keeps]).size
    return starts[keeps], lengths[keeps], num_empty + int((~keeps).sum()), num_cut


def _best_fit(lengths: npt.NDArray[np.int64], seq_len: int, order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the row of each piece: the one with the least room that is enough, else a new one."""
    row_of = np.empty(lengths.size, dtype=np.int64)
    by_room: list[list[int]] = [[] for _ in range(seq_len + 1)]
    rooms = 0  # bit r: a row has room for r more
    num_rows = 0
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, row = seq_len, num_rows
            num_rows += 1
        row_of[piece] = row
        if room > length:
            by_room[room - length].append(row)
            rooms |= 1 << (room - length)
    return row_of


def _random(count: int, seed: int, *key: int) -> npt.NDArray[np.uint64]:
    """Return 64 random bits each; numpy promises a bit generator's raw stream, not what ``Generator`` makes of it."""
    return np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)).random_raw(count)


def seeded_permutation(count: int, seed: int, *key: int) -> npt.NDArray[np.int64]:
    """Return a permutation of 0 to ``count`` - 1 that depends on seed and key only."""
    return np.argsort(_random(count, seed, *key), kind="stable")


@dataclass(frozen=True, slots=True)
class RowPosition:
    """The first row of a batch; later batches follow without a gap."""

    batch: int = 0
    """Number of the batch, from 0."""
    row: int = 0
    """Its first row, counted over all epochs."""


class RowSampler:
    """Draws batches of packed rows, each row once per epoch; ``micro_batch_size`` B must divide the rows of a batch.

    A run resumed with another batch size needs the ``first_row`` of its next batch.
    """

    def __init__(self, rows: PackedRows, *, batch_size: int, micro_batch_size: int, seed: int) -> None:
        assert batch_size % micro_batch_size == 0, "batch_size is not a multiple of micro_batch_size"
        self.position = RowPosition()
        self.num_rows = rows.num_rows
        """Rows per epoch."""
        self._rows = rows
        self._batch_size = batch_size
        self._micro_batch_size = micro_batch_size
        self._seed = seed
        self._order: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))

    def first_row(self, number: int) -> int:
        """Return the first row of a batch, counted over all epochs."""
        return self.position.row + (number - self.position.batch) * self._batch_size

    def batch(self, number: int, micro_batch: int) -> TokenBatch:
        """Return one micro-batch; its row r is row ``first_row(number) + micro_batch * B + r`` of all epochs."""
        first = self.first_row(number) + micro_batch * self._micro_batch_size
        wanted = range(first, first + self._micro_batch_size)
        return self._rows.batch(np.array([self._row(*divmod(number, self._rows.num_rows)) for number in wanted]))

    def _row(self, epoch: int, place: int) -> int:
        if self._order[0] != epoch:  # kept, for the next batch wants the same
            self._order = (epoch, seeded_permutation(self._rows.num_rows, self._seed, _EPOCH_STREAM, epoch))
        return int(self._order[1][place])
