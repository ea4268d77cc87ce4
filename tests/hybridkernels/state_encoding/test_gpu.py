"""The kernels on a real card: sums in float64's company, features as the reference's, one launch after another."""

import pytest
import torch

from hybridkernels.provider import use_provider
from hybridkernels.state_encoding import encode_state, encode_training_state, moment_statistics
from hybridkernels.state_encoding.moments import MomentCodes, Moments, Stored
from hybridkernels.state_encoding.reference import encode_state_reference, moments_of_sums
from numerics import assert_bitwise
from state_encodings import KINDS, assert_sums, exact_sums, random_moments, random_states

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]

LENGTHS = (0, 1, 255, 2048, 2049, 3_000_001)


def on_card(stored: Stored | None) -> Stored | None:
    if isinstance(stored, MomentCodes):
        return MomentCodes(stored.codes.cuda(), stored.scale.cuda())
    return stored if stored is None else stored.cuda()


def cuda(moments: list[Moments]) -> list[Moments]:
    return [Moments(on_card(piece.m), on_card(piece.v), on_card(piece.slow)) for piece in moments]


@pytest.mark.parametrize("slow", [None, *KINDS])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_storage_is_summed(kind: str, slow: str | None) -> None:
    moments = [random_moments(numel, kind, kind, slow) for numel in LENGTHS]
    moved = cuda(moments)
    with use_provider("moment_statistics", "triton"):
        found = moment_statistics(moved)
        assert_sums(found, moments)
        for _ in range(20):
            assert_bitwise(moment_statistics(moved), found)


def test_slices_that_begin_anywhere_are_taken() -> None:
    m, v = torch.randn(5001), torch.rand(5001)
    moments = [Moments(m[3:], v[1:4999], m[2:5000].bfloat16())]
    moved = [Moments(m.cuda()[3:], v.cuda()[1:4999], m.cuda().bfloat16()[2:5000])]
    with use_provider("moment_statistics", "triton"):
        assert_sums(moment_statistics(moved), moments)


def test_one_launch_gives_sums_and_features() -> None:
    moments = [random_moments(numel, slow="fp32") for numel in LENGTHS]
    losses, norms, _, scalars, phases = random_states(3)
    with use_provider("moment_statistics", "triton"):
        states = (tensor.cuda() for tensor in (losses, norms, scalars, phases))
        features, sums = encode_training_state(cuda(moments), *states)
    assert_sums(sums, moments)
    statistics = moments_of_sums(exact_sums(moments)).float().expand(3, -1)
    expected = encode_state_reference(losses, norms, statistics, scalars, phases)
    # Float32 products over 256 terms, and a card's logarithms.
    torch.testing.assert_close(features.cpu(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0])
@pytest.mark.parametrize("place", range(4))
def test_bad_numbers_give_the_references_features(place: int, value: float) -> None:
    states = random_states(2)
    states[place][0, -1] = value
    states[place][1, 0] = value
    with use_provider("encode_state", "triton"):
        found = encode_state(*(state.cuda() for state in states))
    torch.testing.assert_close(found.cpu(), encode_state_reference(*states), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num_states", [1, 1000])
def test_features_are_the_references(num_states: int) -> None:
    states = random_states(num_states)
    with use_provider("encode_state", "triton"):
        found = encode_state(*(state.cuda() for state in states))
    torch.testing.assert_close(found.cpu(), encode_state_reference(*states), rtol=1e-5, atol=1e-4)
