"""Mixed precision: its claims for each kind of master."""

from typing import Literal

import pytest

from hybridtrain.optimizations import MixedPrecision
from hybridtrain.plan.claim import Claim
from hybridtrain.plan.placement import Codec


@pytest.mark.parametrize("master", ["float32", "split16", "absent"])
def test_it_claims_arithmetic_and_master(master: Literal["float32", "split16", "absent"]) -> None:
    assert list(MixedPrecision(master=master).claims()) == [
        Claim("compute_dtype", Codec.BFLOAT16),
        Claim("master.codec", Codec(master)),
    ]
