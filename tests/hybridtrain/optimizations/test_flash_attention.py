import pytest

from hybridtrain.optimizations.flash_attention import FlashAttention
from hybridtrain.plan.claim import Claim
from hybridtrain.plan.memory_plan import Attention


@pytest.mark.parametrize("attention", Attention)
def test_it_claims_how_attention_is_computed(attention: Attention) -> None:
    assert list(FlashAttention(attention=attention.value).claims()) == [Claim("attention", attention)]
