"""Features against their definitions, sums against torch's own."""

import math

import pytest
import torch

from hybridkernels.state_encoding import (
    GRAD_NORM_STEPS,
    LOSS_STEPS,
    NUM_FEATURES,
    NUM_MOMENT_STATISTICS,
    NUM_PHASES,
    NUM_SCALARS,
    encode_state,
    moment_statistics,
)


def states(num_states: int) -> list[torch.Tensor]:
    return [
        1.5 + torch.rand(num_states, LOSS_STEPS),
        0.5 + torch.rand(num_states, GRAD_NORM_STEPS),
        torch.rand(num_states, NUM_MOMENT_STATISTICS),
        torch.rand(num_states, NUM_SCALARS),
        torch.eye(NUM_PHASES)[torch.arange(num_states) % NUM_PHASES],
    ]


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
    # Float32 sums over chunks of 65536 values of both signs.
    torch.testing.assert_close(moment_statistics(m, v, slow), expected, rtol=1e-5, atol=1e-2)
    without = moment_statistics(m, v)
    assert torch.equal(without[:5], moment_statistics(m, v, slow)[:5])
    assert without[5:].tolist() == [0, 0, 0]


def test_sums_of_parts_add_and_take_low_precision() -> None:
    m, v = torch.randn(8, 5).bfloat16(), torch.rand(8, 5).bfloat16()
    parts = moment_statistics(m[:3], v[:3]) + moment_statistics(m[3:], v[3:])
    # Float32 sums of 40 values.
    torch.testing.assert_close(parts, moment_statistics(m, v), rtol=1e-5, atol=1e-5)
