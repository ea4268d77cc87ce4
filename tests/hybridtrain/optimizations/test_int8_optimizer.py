"""8-bit moments: one claim."""

from hybridtrain.optimizations import Int8Optimizer
from hybridtrain.plan.claim import Claim
from hybridtrain.plan.placement import Codec


def test_it_claims_the_storage_of_the_moments() -> None:
    assert list(Int8Optimizer().claims()) == [Claim("optim_state.codec", Codec.INT8_BLOCKS)]
