"""The kernels' random numbers in plain torch: against published words, and as uniform numbers."""

import pytest
import torch

from hybridkernels.int8_quantize import philox
from hybridkernels.int8_quantize.philox import random_seed, random_words, uniform_of
from numerics import assert_bitwise

CPU = torch.device("cpu")
PUBLISHED = {7: "5f6fb709 0d893f64 4f121f81 4f730a48", 10: "6627e8d5 e169c58d bc57ac4c 9b00dbd8"}
"""Counter 0, key 0, by rounds: the first known answers that come with Random123."""


@pytest.mark.parametrize("rounds", PUBLISHED)
def test_the_words_are_the_published_ones(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(philox, "NUM_ROUNDS", rounds)
    words = random_words(torch.tensor([0]), 4)
    assert [f"{word:08x}" for word in words.tolist()] == PUBLISHED[rounds].split()


@pytest.mark.parametrize("first", [0, 4, 1000, 2**34 - 8])
def test_an_element_has_one_word_wherever_a_call_begins(first: int) -> None:
    seed = torch.tensor([-3])
    assert_bitwise(random_words(seed, 21, first)[12:], random_words(seed, 9, first + 12))
    assert not torch.equal(random_words(seed, 21, first), random_words(seed, 21, first + 4))


def test_both_halves_of_a_seed_and_of_a_counter_count() -> None:
    draws = [random_words(torch.tensor([seed]), 8, first) for seed in (1, 1 + 2**32) for first in (0, 2**34)]
    assert len({tuple(words.tolist()) for words in draws}) == 4


def test_uniform_numbers_are_spread_over_zero_to_one() -> None:
    words = random_words(torch.tensor([5]), 2**20)
    assert words.min() >= 0
    assert words.max() < 2**32
    uniform = uniform_of(words).double()
    assert uniform.min() >= 0
    assert uniform.max() < 1
    # Five standard deviations: 1 / sqrt(12 n) of the mean, sqrt(n / 16) of a cell of sixteen.
    assert abs(uniform.mean().item() - 0.5) < 5 / (12 * 2**20) ** 0.5
    counts = torch.bincount((uniform * 16).long(), minlength=16)
    assert (counts - 2**16).abs().max() < 5 * 2**8
    # Neighbours come from one counter or the next.
    for lag in (1, 2, 3, 4):
        product = (uniform[lag:] - 0.5) * (uniform[:-lag] - 0.5)
        assert abs(product.mean().item()) < 5 / 12 / 2**10


def test_the_extreme_words_give_the_extreme_uniforms() -> None:
    assert uniform_of(torch.tensor([0, 511, 512, 2**32 - 1])).tolist() == [0.0, 0.0, 2.0**-23, 1 - 2.0**-23]


def test_the_global_generator_decides_the_seed() -> None:
    seeds = []
    for start in (1, 1, 2):
        torch.manual_seed(start)
        seeds += [random_seed(CPU), random_seed(CPU)]
    assert seeds[0].dtype == torch.int64
    assert seeds[0].shape == (1,)
    assert [seed.item() for seed in seeds[:2]] == [seed.item() for seed in seeds[2:4]]
    assert len({seed.item() for seed in seeds}) == 4
