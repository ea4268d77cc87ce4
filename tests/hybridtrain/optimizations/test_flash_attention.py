import pytest

from hybridtrain.optimizations.flash_attention import FlashAttention
from hybridtrain.plan.claim import Attention, Claim


@pytest.mark.parametrize(("enabled", "attention"), [(True, Attention.FLASH), (False, Attention.UNFUSED)])
def test_it_claims_how_attention_is_computed(attention: Attention, *, enabled: bool) -> None:
    assert list(FlashAttention(enabled=enabled).claims()) == [Claim("attention", attention)]
