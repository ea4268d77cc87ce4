"""Batches cut from a long array of tokens.

Letters: B sequences of a micro-batch, T tokens of a sequence.

A training batch depends only on (seed, step, micro-batch). So resuming needs no state, runs with equal seeds see equal
tokens, and four micro-batches of two equal one of eight.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hybridtrain.data.byte_tokens import TokenArray
from hybridtrain.errors import DataError

IGNORED: Final = -100
"""Target that the loss ignores: torch's ``ignore_index``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBatch:
    """Input tokens and their targets."""

    token_ids_BT: npt.NDArray[np.int64]
    """(B, T) token ids."""
    target_ids_BT: npt.NDArray[np.int64]
    """(B, T): the token after each input; ``IGNORED`` where the loss does not count it."""
    document_ids_BT: npt.NDArray[np.int32] | None = None
    """(B, T): document number of each input, from 0 in each row; None: attention spans the whole row."""
    lengths_B: npt.NDArray[np.int64] | None = None
    """(B,): inputs per row; the rest is padding, ignored by attention and loss. None: rows are full."""

    @property
    def num_tokens(self) -> int:
        """Inputs without padding."""
        return self.token_ids_BT.size if self.lengths_B is None else int(self.lengths_B.sum())


def document_positions(document_ids_BT: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return (B, T): the number of tokens before each token in its document and row."""
    columns_T = np.arange(document_ids_BT.shape[1])
    is_first_BT = np.diff(document_ids_BT, axis=1, prepend=-1) != 0
    starts_BT = np.maximum.accumulate(np.where(is_first_BT, columns_T, 0), axis=1)
    return np.asarray(columns_T - starts_BT, dtype=np.int64)


class BatchSampler:
    """Draws random windows of (N,) token ids with replacement; stateless.

    Raises ``DataError`` for fewer than T + 1 tokens. The seed must not be negative.
    """

    def __init__(self, tokens: TokenArray, *, micro_batch_size: int, seq_len: int, seed: int) -> None:
        assert micro_batch_size > 0, "micro_batch_size must be at least 1"
        _check_length(tokens, seq_len, num_windows=1)
        self._tokens = tokens
        self._micro_batch_size = micro_batch_size
        self._seq_len = seq_len
        self._seed = seed

    def batch(self, step: int, micro_batch: int) -> TokenBatch:
        """Return one micro-batch of a step; its row r is sequence ``micro_batch * B + r`` of the step."""
        first = micro_batch * self._micro_batch_size
        starts = [self._start(step, first + row) for row in range(self._micro_batch_size)]
        return _windows(self._tokens, starts, self._seq_len)

    def _start(self, step: int, sequence: int) -> int:
        # SeedSequence promises the same numbers in every numpy version, which Generator does not. The remainder favours
        # low starts by less than N / 2**64.
        state = np.random.SeedSequence(self._seed, spawn_key=(step, sequence)).generate_state(1, np.uint64)
        return int(state[0]) % (self._tokens.size - self._seq_len)


def validation_batches(
    tokens: TokenArray, *, micro_batch_size: int, seq_len: int, max_batches: int
) -> Iterator[TokenBatch]:
    """Return at most ``max_batches`` batches of consecutive windows from the start; windows do not overlap.

    Only full batches are used, so that all weigh the same in a mean. Raises ``DataError`` at the call if there is not
    one full batch.
    """
    assert micro_batch_size > 0, "micro_batch_size must be at least 1"
    _check_length(tokens, seq_len, num_windows=micro_batch_size)
    num_batches = min(max_batches, (tokens.size - 1) // seq_len // micro_batch_size)
    starts = range(0, num_batches * micro_batch_size * seq_len, seq_len)
    return (
        _windows(tokens, starts[first : first + micro_batch_size], seq_len)
        for first in range(0, len(starts), micro_batch_size)
    )


def _windows(tokens: TokenArray, starts: list[int] | range, seq_len: int) -> TokenBatch:
    windows = np.stack([tokens[start : start + seq_len + 1] for start in starts]).astype(np.int64)
    return TokenBatch(token_ids_BT=windows[:, :-1].copy(), target_ids_BT=windows[:, 1:].copy())


def _check_length(tokens: TokenArray, seq_len: int, *, num_windows: int) -> None:
    assert seq_len > 0, "seq_len must be at least 1"
    needed = num_windows * seq_len + 1
    if tokens.size < needed:
        raise DataError(
            f"{tokens.size} tokens are too few: {num_windows} sequences of {seq_len} and one target need {needed}; use "
            "a longer corpus, a smaller seq_len or a smaller micro_batch_size"
        )
