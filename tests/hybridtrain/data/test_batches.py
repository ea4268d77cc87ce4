from collections.abc import Iterator

import numpy as np
import pytest

from hybridtrain.data.batches import BatchSampler, TokenBatch, validation_batches
from hybridtrain.errors import DataError

TOKENS = np.arange(1000, dtype=np.uint16)  # a token is its own position


def sampler(*, size: int = 2, seq_len: int = 8, seed: int = 0) -> BatchSampler:
    return BatchSampler(TOKENS, micro_batch_size=size, seq_len=seq_len, seed=seed)


def test_a_batch_holds_windows_and_the_token_after_each_input() -> None:
    batch = sampler(size=3, seq_len=5).batch(step=0, micro_batch=0)
    assert batch.token_ids_BT.shape == batch.target_ids_BT.shape == (3, 5)
    assert batch.token_ids_BT.dtype == batch.target_ids_BT.dtype == np.int64
    np.testing.assert_array_equal(batch.token_ids_BT, batch.token_ids_BT[:, :1] + np.arange(5))
    np.testing.assert_array_equal(batch.target_ids_BT, batch.token_ids_BT + 1)
    assert batch.token_ids_BT.flags.c_contiguous
    assert batch.target_ids_BT.flags.c_contiguous


def test_a_batch_is_a_function_of_seed_step_and_micro_batch() -> None:
    one, other = sampler(), sampler()
    other.batch(step=9, micro_batch=9)  # an earlier call leaves no trace
    np.testing.assert_array_equal(one.batch(3, 1).token_ids_BT, other.batch(3, 1).token_ids_BT)
    starts = {
        tuple(sampler(seed=seed).batch(step, micro_batch).token_ids_BT[:, 0])
        for seed in range(3)
        for step in range(3)
        for micro_batch in range(3)
    }
    assert len(starts) == 27, "every seed, step and micro-batch draws its own windows"


def test_the_windows_of_a_seed_never_change() -> None:
    assert sampler(size=4).batch(step=5, micro_batch=0).token_ids_BT[:, 0].tolist() == [168, 988, 429, 879]


def test_four_micro_batches_of_two_are_one_batch_of_eight() -> None:
    small, large = sampler(size=2, seed=7), sampler(size=8, seed=7)
    parts = [small.batch(step=4, micro_batch=index) for index in range(4)]
    whole = large.batch(step=4, micro_batch=0)
    np.testing.assert_array_equal(np.concatenate([part.token_ids_BT for part in parts]), whole.token_ids_BT)
    np.testing.assert_array_equal(np.concatenate([part.target_ids_BT for part in parts]), whole.target_ids_BT)


def test_every_start_is_drawn_about_equally() -> None:
    draw = BatchSampler(np.arange(15, dtype=np.uint16), micro_batch_size=2000, seq_len=5, seed=0)
    starts = draw.batch(step=0, micro_batch=0).token_ids_BT[:, 0]
    counts = np.bincount(starts, minlength=10)
    assert counts.size == 10, "the last start leaves room for one target"
    assert counts.min() > 140, "200 expected; 4.5 standard deviations of 13.4 below is 140"


def test_a_corpus_of_one_window_is_enough_and_one_less_is_not() -> None:
    tokens = np.arange(9, dtype=np.uint32)
    batch = BatchSampler(tokens, micro_batch_size=2, seq_len=8, seed=0).batch(0, 0)
    assert batch.target_ids_BT[:, -1].tolist() == [8, 8]
    with pytest.raises(DataError, match="8 tokens are too few: 1 sequences of 8 and one target need 9"):
        BatchSampler(tokens[:8], micro_batch_size=2, seq_len=8, seed=0)


def test_changing_a_batch_does_not_change_the_corpus() -> None:
    tokens = np.arange(9, dtype=np.uint16)
    batch = BatchSampler(tokens, micro_batch_size=1, seq_len=8, seed=0).batch(0, 0)
    batch.token_ids_BT[:] = 77
    assert tokens.tolist() == list(range(9))
    assert batch.target_ids_BT.tolist() == [list(range(1, 9))]


def validation(num_tokens: int, *, size: int = 2, seq_len: int = 4, max_batches: int = 100) -> Iterator[TokenBatch]:
    return validation_batches(TOKENS[:num_tokens], micro_batch_size=size, seq_len=seq_len, max_batches=max_batches)


def test_validation_covers_consecutive_windows_once() -> None:
    batches = list(validation(17))
    inputs = np.concatenate([batch.token_ids_BT for batch in batches])
    np.testing.assert_array_equal(inputs, np.arange(16).reshape(4, 4))
    targets = np.concatenate([batch.target_ids_BT for batch in batches])
    np.testing.assert_array_equal(targets, inputs + 1)


@pytest.mark.parametrize(("num_tokens", "count"), [(9, 1), (16, 1), (17, 2), (24, 2), (25, 3)])
def test_validation_batches_are_full(num_tokens: int, count: int) -> None:
    batches = list(validation(num_tokens))
    assert len(batches) == count
    assert all(batch.token_ids_BT.shape == (2, 4) for batch in batches)


def test_validation_stops_at_max_batches() -> None:
    assert len(list(validation(1000, max_batches=3))) == 3
    assert list(validation(1000, max_batches=0)) == []


def test_validation_refuses_too_few_tokens_at_the_call() -> None:
    with pytest.raises(DataError, match="8 tokens are too few: 2 sequences of 4 and one target need 9"):
        validation(8)
