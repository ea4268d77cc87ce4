"""Features against their definitions, sums against torch's own."""

import math

import pytest
import torch

from hybridkernels.state_encoding import (
    LOSS_STEPS,
    NUM_FEATURES,
    MomentCodes,
    Moments,
    encode_state,
    encode_training_state,
    moment_statistics,
    moments_of_sums,
)
from hybridkernels.state_encoding.op import _flat
from numerics import assert_bitwise
from state_encodings import KINDS, assert_sums, exact_sums, random_moments
from state_encodings import random_states as states

OPS = torch.ops.hybridkernels


@pytest.mark.parametrize("num_states", [1, 2, 7])
def test_a_batch_is_its_rows(num_states: int) -> None:
    parts = states(num_states)
    together = encode_state(*parts)
    assert together.shape == (num_states, NUM_FEATURES)
    assert together.dtype == torch.float32
    rows = torch.cat([encode_state(*(part[i : i + 1] for part in parts)) for i in range(num_states)])
    # Products of another batch size may sum in another order: some ulps of features up to 8.
    torch.testing.assert_close(together, rows, rtol=1e-5, atol=1e-4)


def test_no_states_are_no_features() -> None:
    assert encode_state(*states(0)).shape == (0, NUM_FEATURES)


def test_a_geometric_fall_has_the_ratios_and_slopes_of_its_rate() -> None:
    rate = 1e-3
    parts = states(1)
    parts[0] = (2.0 * torch.exp(-rate * torch.arange(LOSS_STEPS, dtype=torch.float64)))[None]
    features = encode_state(*parts)[0]
    # Level; six lagged ratios 10 * rate * lag; five window means 10 * rate * (w - 8) / 2; five slopes -10 * rate * w.
    assert features[0] == pytest.approx(math.log(2.0) - rate * (LOSS_STEPS - 1 - 3.5), abs=1e-5)
    lags, windows = (8, 16, 32, 64, 128, 248), (16, 32, 64, 128, 256)
    expected = [10 * rate * lag for lag in lags] + [10 * rate * (w - 8) / 2 for w in windows]
    expected += [-10 * rate * w for w in windows]
    # Float32 products over 256 terms.
    torch.testing.assert_close(features[1:17], torch.tensor(expected), rtol=1e-3, atol=1e-4)


def test_deviations_are_those_of_the_windows() -> None:
    parts = states(3)
    features = encode_state(*parts)
    logs = parts[0].double().log()
    for index, window in enumerate((16, 32, 64, 128, 256)):
        expected = logs[:, -window:].std(1, correction=0).log() + math.log(10)
        # Variance as a difference of float32 means of about 0.05.
        torch.testing.assert_close(features[:, 17 + index].double(), expected, rtol=1e-3, atol=1e-3)


def test_scale_of_the_loss_moves_the_level_only() -> None:
    parts = states(1)
    before = encode_state(*parts)
    parts[0] = parts[0] * 3
    after = encode_state(*parts)
    assert after[0, 0] - before[0, 0] == pytest.approx(math.log(3), abs=1e-5)
    torch.testing.assert_close(after[:, 1:], before[:, 1:], rtol=1e-4, atol=1e-4)  # float32 logarithms


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
def test_bad_numbers_give_bounded_features(value: float) -> None:
    parts = states(2)
    for part in parts[:4]:
        part[0, -1] = value
    features = encode_state(*parts)
    assert features.isfinite().all()
    assert features.abs().max() <= 8
    torch.testing.assert_close(features[1], encode_state(*(part[1:] for part in parts))[0], rtol=1e-5, atol=1e-4)


def test_views_that_are_not_contiguous_give_the_same() -> None:
    parts = states(3)
    strided = [part.t().contiguous().t() for part in parts]
    # Products of another memory layout may sum in another order.
    torch.testing.assert_close(encode_state(*strided), encode_state(*parts), rtol=1e-5, atol=1e-4)


def test_a_wrong_width_is_refused() -> None:
    parts = states(2)
    parts[0] = parts[0][:, 1:]
    with pytest.raises(ValueError, match="shapes"):
        encode_state(*parts)


@pytest.mark.parametrize("count", [1, 1000, 2**16, 2**16 + 3])
def test_sums_are_torchs_own(count: int) -> None:
    m, v, slow = torch.randn(count), torch.rand(count), torch.randn(count)
    m64, v64, slow64 = m.double(), v.double(), slow.double()
    expected = torch.stack([
        torch.tensor(count), m64.sum(), m64 @ m64, v64.sum(), v64 @ v64, slow64 @ slow64, m64 @ slow64,
        torch.tensor(1.0),
    ])  # fmt: skip
    found = moment_statistics([Moments(m, v, slow)])
    # Float32 sums over chunks of 32512 values of both signs.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-2)
    without = moment_statistics([Moments(m, v)])
    assert torch.equal(without[:5], found[:5])
    assert without[5:].tolist() == [0, 0, 0]


def test_sums_of_parts_add_and_take_low_precision() -> None:
    m, v = torch.randn(8, 5).bfloat16(), torch.rand(8, 5).bfloat16()
    parts = moment_statistics([Moments(m[:3], v[:3]), Moments(m[3:], v[3:])])
    # Float32 sums of 40 values.
    torch.testing.assert_close(parts, moment_statistics([Moments(m, v)]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slow", [None, *KINDS])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_storage_is_summed(kind: str, slow: str | None) -> None:
    moments = [random_moments(numel, kind, kind, slow) for numel in (700, 0, 2**16 + 300)]
    assert_sums(moment_statistics(moments), moments)


def test_codes_may_end_with_the_tensor_or_with_their_group() -> None:
    padded = random_moments(700, "fp32", "codes")
    assert isinstance(padded.v, MomentCodes)
    assert padded.v.codes.numel() == 768
    cut = Moments(padded.m, MomentCodes(padded.v.codes[:700].clone(), padded.v.scale))
    assert_bitwise(moment_statistics([padded]), moment_statistics([cut]))


def test_statistics_are_means_and_the_cosine() -> None:
    moments = [random_moments(500, slow="fp32")]
    m, v, slow = moments[0].m.double(), moments[0].v.double(), moments[0].slow.double()
    expected = [m.mean(), m.square().mean().sqrt(), v.mean(), v.square().mean().sqrt(), slow.square().mean().sqrt()]
    expected += [torch.nn.functional.cosine_similarity(m, slow, dim=0)]
    torch.testing.assert_close(moments_of_sums(exact_sums(moments)), torch.stack(expected))
    assert moments_of_sums(torch.zeros(8, dtype=torch.float64)).tolist() == [0.0] * 6


def test_sums_and_features_in_one_are_those_of_two_calls() -> None:
    moments = [random_moments(300, slow="bf16"), random_moments(20)]
    losses, norms, _, scalars, phases = states(3)
    features, sums = encode_training_state(moments, losses, norms, scalars, phases)
    assert_bitwise(sums, moment_statistics(moments))
    statistics = moments_of_sums(sums).float().expand(3, -1)
    assert_bitwise(features, encode_state(losses, norms, statistics, scalars, phases))


@pytest.mark.parametrize("num_states", [0, 2])
def test_the_ops_pass_torchs_own_checks(num_states: int) -> None:
    flat = _flat([random_moments(300, slow="codes"), random_moments(20, "codes", "codes")])
    losses, norms, statistics, scalars, phases = states(num_states)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(OPS.encode_state.default, (losses, norms, statistics, scalars, phases), test_utils=checks)
    torch.library.opcheck(OPS.moment_statistics.default, (flat,), test_utils=checks)
    both = (flat, losses, norms, scalars, phases)
    torch.library.opcheck(OPS.encode_training_state.default, both, test_utils=checks)


def test_meta_tensors_give_the_shapes_of_real_ones() -> None:
    moments = [Moments(torch.ones(4, device="meta"), torch.ones(4, device="meta"))]
    metas = [state.to("meta") for state in states(3)]
    features, sums = encode_training_state(moments, *metas[:2], *metas[3:])
    for found, shape, dtype in ((features, (3, 51), torch.float32), (sums, (8,), torch.float64)):
        assert found.is_meta
        assert (found.shape, found.dtype) == (shape, dtype)
    assert encode_state(*metas).shape == (3, 51)
    assert moment_statistics(moments).shape == (8,)


def coded(numel: int, scales: int) -> MomentCodes:
    return MomentCodes(torch.zeros(numel, dtype=torch.uint8), torch.zeros(scales))


REFUSALS = {
    "no moments are given": [],
    r"v of tensor 1 is torch.float32 \(5,\)": [
        Moments(torch.ones(4), torch.ones(4)), Moments(torch.ones(4), torch.ones(5))
    ],
    r"slow of tensor 0 is torch.float16": [Moments(torch.ones(4), torch.ones(4), torch.ones(4).half())],
    r"m of tensor 0 is .*, not contiguous": [Moments(torch.ones(4, 2).t(), torch.ones(8))],
    r"v of tensor 0 is .* on meta": [Moments(torch.ones(4), torch.ones(4, device="meta"))],
    r"m of tensor 0 is .*uint8 codes with 2 float32 scales": [Moments(coded(512, 3), coded(512, 2))],
    r"m of tensor 0 is torch.uint8 \(1024,\)": [Moments(coded(1024, 2), torch.ones(300))],
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSALS)
def test_moments_that_do_not_fit_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match="moment_statistics: " + message):
        moment_statistics(REFUSALS[message])
    with pytest.raises(ValueError, match="moment_statistics: " + message):
        encode_training_state(REFUSALS[message], *states(1)[:2], *states(1)[3:])


def test_states_of_two_devices_are_refused() -> None:
    parts = states(2)
    parts[3] = parts[3].to("meta")
    with pytest.raises(ValueError, match=r"devices: \['cpu', 'cpu', 'cpu', 'meta', 'cpu'\] must all be cpu"):
        encode_state(*parts)
