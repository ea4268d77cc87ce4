"""Keys of random streams: the same place gives the same key, any other place another one."""

from itertools import product

import pytest

from hybridtrain.engine.random_key import random_key


def test_a_key_is_a_number_of_63_bits_for_any_seed() -> None:
    keys = [random_key(seed, 0) for seed in (0, 1, -1, 2**63, 2**64 - 1)]
    assert all(0 <= key < 2**63 for key in keys)
    assert max(keys).bit_length() > 60  # and not of a few small ones


def test_the_mixing_is_that_of_splitmix64() -> None:
    # The published first output for seed 0; saved runs resume bit-equal only while keys stay what they are.
    assert random_key(0) == 0xE220A8397B1DCDAF >> 1


def test_places_of_one_run_have_different_keys() -> None:
    places = list(product(range(20), range(8), range(30)))  # steps, micro-batches, units
    assert len({random_key(0, *place) for place in places}) == len(places)


def test_paths_of_different_lengths_have_different_keys() -> None:
    paths = [path for length in range(4) for path in product(range(6), repeat=length)]
    assert len({random_key(7, *path) for path in paths}) == len(paths)


def test_the_order_of_a_path_matters() -> None:
    assert random_key(0, 1, 2) != random_key(0, 2, 1)


@pytest.mark.parametrize("length", [1, 2])
def test_runs_with_neighbouring_seeds_share_no_key(length: int) -> None:
    # Seeds 0, 1, 2 are what a comparison over several seeds uses: shared keys would make its samples dependent.
    paths = list(product(range(10), repeat=length))
    keys = {(seed, path): random_key(seed, *path) for seed in range(10) for path in paths}
    assert len(set(keys.values())) == len(keys)
