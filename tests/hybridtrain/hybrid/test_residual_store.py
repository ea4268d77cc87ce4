"""The store of forecast errors: bounded, similar states count most, saved and loaded to the bit."""

import io
import json
import math

import numpy as np
import pytest
import torch

from hybridtrain.hybrid.forecast.residual_store import TEMPERATURE, ResidualStore


def filled(count: int = 40, max_entries: int = 64) -> ResidualStore:
    """Residuals are the first feature; the second one tells nothing, the third never changes."""
    store, rng = ResidualStore(max_entries, 3), np.random.default_rng(0)
    for features in rng.normal(size=(count, 2)):
        store.add([*features, 7.0], float(features[0]))
    return store


def by_hand(rows: list[tuple[list[float], float]], features: list[float]) -> float:
    """The formula of the module's docstring, entry by entry."""
    columns = list(zip(*(row for row, _ in rows), strict=True))
    spreads = [float(np.std(column)) for column in columns]
    weights = []
    for row, _ in rows:
        squares = [((a - b) / s) ** 2 for a, b, s in zip(row, features, spreads, strict=True) if s > 0]
        weights.append(math.exp(-sum(squares) / len(squares) / TEMPERATURE))
    return sum(weight * residual for weight, (_, residual) in zip(weights, rows, strict=True)) / sum(weights)


def test_an_empty_store_corrects_nothing() -> None:
    assert ResidualStore(4, 2).correction([1.0, 2.0]) == 0.0


def test_one_entry_is_the_correction_everywhere() -> None:
    store = ResidualStore(4, 2)
    store.add([1.0, 2.0], 0.25)
    assert store.correction([1.0, 2.0]) == store.correction([-50.0, 1e9]) == 0.25


def test_the_correction_is_the_formula() -> None:
    rng = np.random.default_rng(1)
    rows = [([*map(float, rng.normal(size=3)), 7.0], float(rng.normal())) for _ in range(20)]
    store = ResidualStore(64, 4)
    for row, residual in rows:
        store.add(row, residual)
    asked = [0.3, -0.2, 1.0, 7.0]
    # The same sums in another order: float64 rounding only.
    assert store.correction(asked) == pytest.approx(by_hand(rows, asked), rel=1e-12)


def test_similar_states_decide() -> None:
    store = filled(400, 400)
    assert store.correction([1.5, 0.0, 7.0]) > 0.5
    assert store.correction([-1.5, 0.0, 7.0]) < -0.5


def test_units_of_features_do_not_matter() -> None:
    metres, feet = ResidualStore(64, 2), ResidualStore(64, 2)
    for features in np.random.default_rng(2).normal(size=(30, 2)):
        metres.add(list(features), float(features.sum()))
        feet.add([features[0] * 1024, features[1]], float(features.sum()))  # a power of two: no rounding
    assert metres.correction([0.5, 0.5]) == feet.correction([512.0, 0.5])


def test_far_states_overflow_nothing() -> None:
    assert math.isfinite(filled().correction([1e300, 0.0, 0.0]))


def test_rounding_of_a_constant_feature_is_no_difference() -> None:
    store, plain = ResidualStore(64, 2), ResidualStore(64, 1)
    for number in range(30):
        store.add([float(number), 0.1], float(number))
        plain.add([float(number)], float(number))
    assert store.correction([3.0, 0.2]) == plain.correction([3.0])


def test_the_oldest_entries_make_room() -> None:
    store = ResidualStore(4, 1)
    for number in range(11):
        store.add([0.0], float(number))
        assert len(store) == min(number + 1, 4)
    assert store.correction([0.0]) == (7 + 8 + 9 + 10) / 4
    assert store.num_bytes == 4 * 2 * 8


@pytest.mark.parametrize(
    ("features", "residual"), [([math.nan, 0.0], 0.1), ([0.0, math.inf], 0.1), ([0.0, 0.0], math.nan)]
)
def test_what_is_no_number_is_left_out(features: list[float], residual: float) -> None:
    store = ResidualStore(4, 2)
    store.add([1.0, 1.0], 0.5)
    store.add(features, residual)
    assert len(store) == 1
    store.add([2.0, 2.0], 0.5)
    assert store.correction(features) == 0.5  # what is not finite is not compared


@pytest.mark.parametrize("count", [0, 3, 64, 100])
def test_a_saved_store_goes_on_to_the_bit(count: int) -> None:
    store, other = filled(count), ResidualStore(64, 3)
    file = io.BytesIO()
    torch.save(json.loads(json.dumps(store.state_dict())), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for each in (store, other):
        each.add([0.1, 0.2, 0.3], 0.4)
    assert other.correction([0.5, 0.5, 0.5]) == store.correction([0.5, 0.5, 0.5])
    assert other.state_dict() == store.state_dict()


@pytest.mark.parametrize("size", [(8, 3), (64, 7)])
def test_the_entries_of_another_store_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"40 entries, 120 features; at most {size[0]} of {size[1]} features"):
        ResidualStore(*size).load_state_dict(filled().state_dict())
