from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrain.data.batches import IGNORED, TokenBatch
from hybridtrain.data.packing import EncodedDocuments, PackedRows, RowSampler, pack
from hybridtrain.errors import DataError


def documents(*lengths: int, counted: list[int] | None = None) -> EncodedDocuments:
    """Return documents in which no token comes twice."""
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.uint16)
    marks = None if counted is None else np.array(counted, dtype=np.uint8)
    return EncodedDocuments(tokens=tokens, ends=np.cumsum(lengths, dtype=np.int64), counted=marks)


def packed(*lengths: int, seq_len: int = 8, seed: int = 0, joins: bool = True) -> PackedRows:
    return pack(documents(*lengths), seq_len=seq_len, seed=seed, joins_documents=joins, what="it")


def pairs(batch: TokenBatch) -> Counter[tuple[int, int]]:
    counts = batch.target_ids_BT != IGNORED
    found = zip(batch.token_ids_BT[counts].tolist(), batch.target_ids_BT[counts].tolist(), strict=True)
    return Counter(found)


def expected_pairs(*lengths: int) -> Counter[tuple[int, int]]:
    ends = np.cumsum([0, *lengths]).tolist()
    return Counter(pair for first, last in pairwise(ends) for pair in pairwise(range(first + 1, last + 1)))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 9), st.booleans())
def test_each_pair_of_each_document_comes_exactly_once(lengths: list[int], seq_len: int, joins: bool) -> None:
    if max(lengths) < 2:
        return
    rows = packed(*lengths, seq_len=seq_len, joins=joins)
    (whole,) = rows.batches(micro_batch_size=rows.num_rows, max_rows=rows.num_rows)
    assert pairs(whole) == expected_pairs(*lengths)
    assert (whole.target_ids_BT != IGNORED).any(axis=1).all()
    assert rows.fill == (whole.target_ids_BT != IGNORED).mean()
    assert rows.num_dropped == sum(length < 2 for length in lengths)


def test_rows_hold_whole_documents_apart_from_each_other() -> None:
    rows = packed(4, 5, 12)  # 3 + 4 pairs, and 11 in pieces of 8 and 3
    assert rows.num_rows == 3
    (whole,) = rows.batches(micro_batch_size=3, max_rows=3)
    assert whole.document_ids_BT is not None
    for tokens, targets, owners in zip(whole.token_ids_BT, whole.target_ids_BT, whole.document_ids_BT, strict=True):
        for owner in range(int(owners.max()) + 1):
            inside = owners == owner
            known = targets[inside]
            if (known == IGNORED).any():
                assert (known == IGNORED).all()  # padding, a document of its own
                assert owner == owners.max()
                assert (tokens[inside] == 0).all()
            else:
                assert tokens[inside][1:].tolist() == known[:-1].tolist()  # one piece, in its order


def test_a_document_a_row() -> None:
    rows = packed(4, 1, 12, joins=False)
    (whole,) = rows.batches(micro_batch_size=3, max_rows=9)
    assert whole.document_ids_BT is None
    assert whole.token_ids_BT.tolist() == [
        [1, 2, 3, 0, 0, 0, 0, 0], [6, 7, 8, 9, 10, 11, 12, 13], [14, 15, 16, 0, 0, 0, 0, 0]
    ]  # fmt: skip
    assert whole.target_ids_BT[2].tolist() == [15, 16, 17, *[IGNORED] * 5]
    assert rows.fill == 14 / 24


def test_tokens_that_do_not_count_are_no_targets_and_pieces_of_them_are_left_out() -> None:
    # Of 4 the last two count; of 3 none; of 3 only the first, which none precedes.
    marked = documents(4, 3, 3, counted=[0, 0, 1, 1, 0, 0, 0, 1, 0, 0])
    rows = pack(marked, seq_len=8, seed=0, joins_documents=True, what="it")
    (whole,) = rows.batches(micro_batch_size=1, max_rows=9)
    assert whole.target_ids_BT[0].tolist() == [IGNORED, 3, 4, *[IGNORED] * 5]
    assert rows.num_dropped == 2
    with pytest.raises(DataError, match="it: none of 1 documents has a token that counts"):
        pack(documents(3, counted=[1, 0, 0]), seq_len=8, seed=0, joins_documents=True, what="it")


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=8), st.integers(1, 5))
def test_documents_whose_answers_are_cut_off_their_question_are_counted(masks: list[list[int]], seq_len: int) -> None:
    if not any(any(mask[1:]) for mask in masks):
        return
    expected = 0
    for mask in masks:
        pieces = [mask[first + 1 : first + seq_len + 1] for first in range(0, max(len(mask) - 1, 0), seq_len)]
        expected += bool(pieces) and 0 in pieces[0] and any(1 in piece for piece in pieces[1:])
    counted = [count for mask in masks for count in mask]
    rows = pack(documents(*map(len, masks), counted=counted), seq_len=seq_len, seed=0, joins_documents=True, what="a")
    assert rows.num_cut == expected


def test_best_fit_leaves_little_room() -> None:
    lengths = np.random.default_rng(0).integers(2, 100, 2000)
    rows = packed(*lengths.tolist(), seq_len=256)
    least = -(-int((lengths - 1).sum()) // 256)
    assert rows.num_rows <= least + 1
    assert rows.fill > 0.99


def test_batches_are_a_function_of_seed_step_and_micro_batch() -> None:
    rows = packed(*range(2, 40))

    def rows_of(seed: int, micro_batch_size: int, steps: range) -> list[list[int]]:
        sampler = RowSampler(rows, batch_size=6, micro_batch_size=micro_batch_size, seed=seed)
        parts = range(6 // micro_batch_size)
        found = [sampler.batch(step, part).token_ids_BT for step in steps for part in parts]
        return [row for batch in found for row in batch.tolist()]

    whole = rows_of(1, 6, range(40))
    assert rows_of(1, 2, range(40)) == whole
    assert rows_of(1, 3, range(17, 40)) == whole[17 * 6 :]
    assert rows_of(2, 6, range(40)) != whole
    epochs = [sorted(whole[first : first + rows.num_rows]) for first in (0, rows.num_rows)]
    assert epochs[0] == epochs[1] == sorted(rows.batch(np.arange(rows.num_rows)).token_ids_BT.tolist())
    assert whole[: rows.num_rows] != whole[rows.num_rows : 2 * rows.num_rows]


def test_a_seed_decides_the_rows() -> None:
    def content(seed: int) -> list[list[int]]:
        rows = packed(*[3, 4, 5] * 9, seed=seed)
        return rows.batch(np.arange(rows.num_rows)).token_ids_BT.tolist()

    assert content(1) == content(1) != content(2)


def test_parts_share_no_row_and_lose_none() -> None:
    rows = packed(*range(2, 30))
    whole = rows.batch(np.arange(rows.num_rows))
    first, rest = rows.part(0, 5), rows.part(5, rows.num_rows)
    both = [*first.batch(np.arange(5)).token_ids_BT, *rest.batch(np.arange(rest.num_rows)).token_ids_BT]
    np.testing.assert_array_equal(both, whole.token_ids_BT)
    assert first.num_tokens + rest.num_tokens == rows.num_tokens
