"""The kernel on a real card against the reference in float64."""

from dataclasses import replace

import pytest
import torch

from hybridkernels.provider import use_provider
from hybridkernels.rssm_gru import rssm_rollout
from hybridkernels.rssm_gru.reference import rssm_rollout_reference
from numerics import assert_bitwise, assert_error_bound
from rssm_models import random_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]

PREDICTOR = {"hidden": 256, "categoricals": 32, "classes": 32, "actions": 4, "features": 51, "width": 64}


@pytest.mark.parametrize("rows", [1, 8, 97])
@pytest.mark.parametrize("is_seen", [False, True])
def test_a_card_is_as_exact_as_torch(rows: int, is_seen: bool) -> None:
    inputs = random_inputs(members=3, rows=rows, ticks=5, is_seen=is_seen, **PREDICTOR)
    same_dtype = rssm_rollout_reference(*inputs.arguments)
    exact = rssm_rollout_reference(*inputs.to(torch.float64).arguments)
    with use_provider("rssm_rollout", "triton"):
        found = rssm_rollout(*inputs.to("cuda").arguments)
        again = rssm_rollout(*inputs.to("cuda").arguments)
    assert_bitwise(found.classes_EBK.cpu(), exact.classes_EBK)
    for name in ("means_SEB", "log_variances_SEB", "hidden_EBH", "logits_EBZ"):
        actual, torchs, target = (getattr(rollout, name) for rollout in (found, same_dtype, exact))
        # A few roundings of values of unit size, for cases where torch happens to be exact.
        assert_error_bound(actual.cpu(), torchs, target, floor=1e-6 * max(1.0, target.abs().max().item()), name=name)
        assert_bitwise(actual, getattr(again, name), name)


def test_an_expanded_action_is_taken_on_a_card() -> None:
    inputs = random_inputs(members=3, rows=8, ticks=4, **PREDICTOR).to("cuda")
    expanded = torch.randn(4, 4, device="cuda")[:, None, None].expand(4, 3, 8, 4)
    one = rssm_rollout(*replace(inputs, actions_SEBA=expanded).arguments)
    other = rssm_rollout(*replace(inputs, actions_SEBA=expanded.contiguous()).arguments)
    assert_bitwise(one.means_SEB, other.means_SEB)
