"""The border between host and device, on the CPU and on no device at all."""

import math

import numpy as np
import pytest
import torch

from hybridtrain.memory.transfer import DirectTransfer, Transfer, VirtualTransfer
from numerics import assert_bitwise

TOKENS = np.arange(12, dtype=np.int64).reshape(3, 4)


def direct() -> DirectTransfer:
    return DirectTransfer(torch.device("cpu"))


def test_an_upload_is_a_copy() -> None:
    values = TOKENS.copy()
    uploaded = direct().upload(values)
    assert_bitwise(uploaded, torch.from_numpy(TOKENS), "tokens")
    values[:] = -1
    assert_bitwise(uploaded, torch.from_numpy(TOKENS), "tokens")


def test_a_virtual_upload_has_shape_and_dtype_only() -> None:
    uploaded = VirtualTransfer().upload(TOKENS)
    assert uploaded.is_meta
    assert (uploaded.shape, uploaded.dtype) == ((3, 4), torch.int64)


@pytest.mark.parametrize("transfer", [direct(), VirtualTransfer()], ids=["direct", "virtual"])
def test_host_bytes_are_those_of_the_largest_upload(transfer: Transfer) -> None:
    transfer.upload(TOKENS)
    transfer.upload(TOKENS[:1])
    assert transfer.host_bytes == TOKENS.nbytes


def test_a_scalar_is_read() -> None:
    assert direct().read(torch.tensor(0.5)) == 0.5


def test_a_dry_run_has_no_values_to_read() -> None:
    assert math.isnan(VirtualTransfer().read(torch.empty((), device="meta")))


def test_one_seed_gives_one_stream() -> None:
    draws = [torch.randn(8, generator=direct().generator(seed)) for seed in (5, 5, 6)]
    assert_bitwise(draws[0], draws[1], "draws")
    assert not torch.equal(draws[0], draws[2])


def test_a_generator_leaves_the_global_stream_alone() -> None:
    before = torch.get_rng_state()
    torch.randn(8, generator=direct().generator(5))
    assert_bitwise(torch.get_rng_state(), before, "random state")


def test_seeding_starts_the_devices_stream_from_the_key() -> None:
    transfer = direct()
    draws = []
    for key in (2**62 + 1, 2**62 + 1, 2**62 + 2):
        transfer.seed(key)
        draws.append(torch.randn(8))
    assert_bitwise(draws[0], draws[1], "draws")
    assert not torch.equal(draws[0], draws[2])


def test_the_random_state_outside_survives_seeding_inside() -> None:
    transfer = direct()
    before = torch.get_rng_state()
    with transfer.keyed_random():
        transfer.seed(3)
        torch.randn(8)
    assert_bitwise(torch.get_rng_state(), before, "random state")


def fail_inside(transfer: Transfer) -> None:
    with transfer.keyed_random():
        transfer.seed(3)
        raise RuntimeError("inside")


def test_the_random_state_outside_survives_an_error_inside() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="inside"):
        fail_inside(direct())
    assert_bitwise(torch.get_rng_state(), before, "random state")


def test_a_dry_run_draws_nothing() -> None:
    transfer = VirtualTransfer()
    before = torch.get_rng_state()
    assert transfer.generator(0) is None
    with transfer.keyed_random():
        transfer.seed(3)
        assert_bitwise(torch.get_rng_state(), before, "random state")
