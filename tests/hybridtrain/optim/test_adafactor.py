"""Adafactor against a slow float64 reference written from the paper (Shazeer and Stern, 1804.04235)."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from hybridtrain.memory.formats import (
    ExactWeight,
    Float32Master,
    Int8Codes,
    Int8Weight,
    PlainState,
    StochasticWeight,
    StoredWeight,
    WeightFormat,
)
from hybridtrain.memory.slices import StateSlice, WeightSlice
from hybridtrain.optim import Adafactor, adafactor
from hybridtrain.optim.optimizer import Role, UpdateStep

Array = npt.NDArray[np.float64]
LR = 0.01
NUM_STEPS = 5
CLOSE = 2e-5
"""Relative to the update. fp32 rounds a dozen operations of each element by 2**-24, and the sums over rows, columns and
elements, of 100 to 3000 terms, by some 2**-20 at worst: 1e-6 a step, NUM_STEPS of them, and room of 4."""
MATRICES = [(48, 64), (37, 50), (1, 20), (30, 1)]
SHAPES: list[tuple[int, ...]] = [*MATRICES, (50,)]


@dataclass
class Reference:
    """Algorithm 4 and 5 of the paper with no relative step size, no momentum, and decoupled decay; plain loops."""

    value: Array
    weight_decay: float = 0.0
    row: dict[int, float] = field(default_factory=dict)
    column: dict[int, float] = field(default_factory=dict)
    vector: dict[int, float] = field(default_factory=dict)
    largest_rms: float = 0.0

    def update(self, grad: Array, number: int) -> None:
        beta = 1.0 - number**-0.8
        second = self._vector(grad, beta) if grad.ndim == 1 else self._matrix(grad, beta)
        update = grad / np.sqrt(second)
        rms = float(np.sqrt(np.mean(update**2)))
        self.largest_rms = max(self.largest_rms, rms)
        self.value = self.value * (1.0 - LR * self.weight_decay) - LR * update / max(1.0, rms)

    def _vector(self, grad: Array, beta: float) -> Array:
        for index, element in enumerate(grad):
            self.vector[index] = beta * self.vector.get(index, 0.0) + (1 - beta) * (element**2 + 1e-30)
        return np.array([self.vector[index] for index in range(grad.size)])

    def _matrix(self, grad: Array, beta: float) -> Array:
        """Return the outer product of the row and column SUMS over the sum of all, as the paper writes it."""
        height, width = grad.shape
        for i in range(height):
            total = sum(float(grad[i, j]) ** 2 + 1e-30 for j in range(width))
            self.row[i] = beta * self.row.get(i, 0.0) + (1 - beta) * total
        for j in range(width):
            total = sum(float(grad[i, j]) ** 2 + 1e-30 for i in range(height))
            self.column[j] = beta * self.column.get(j, 0.0) + (1 - beta) * total
        everything = sum(self.row.values())
        return np.array([[self.row[i] * self.column[j] / everything for j in range(width)] for i in range(height)])


def settings(number: int, weight_decay: float = 0.0) -> UpdateStep:
    return UpdateStep(number, LR, weight_decay)


def update_factored(
    stored: StoredWeight,
    master_weight: Tensor | None,
    grad: Tensor,
    moments: list[Tensor],
    storage: WeightFormat,
    step: UpdateStep,
) -> None:
    """Update a whole parameter of the gradient's shape."""
    state = [StateSlice(PlainState(), (moment,), moment.numel()) for moment in moments]
    Adafactor().update(WeightSlice(storage, stored, master_weight, tuple(grad.shape)), grad, state, step)


def test_state_is_a_matrix_rows_and_columns_or_a_vector() -> None:
    names = [[(s.name, s.shape) for s in Adafactor().state(Role(shape, in_block=True))] for shape in ((3, 5), (7,))]
    assert names == [[("row", (3,)), ("column", (5,))], [("exp_avg_sq", (7,))]]


def fresh_moments(shape: tuple[int, ...]) -> list[Tensor]:
    sizes = shape if len(shape) == 2 else (shape[0],)
    return [torch.zeros(size) for size in sizes]


def random_grads(shape: tuple[int, ...]) -> list[Tensor]:
    """Return gradients whose rows, columns and steps differ in size, so that every mean matters and clipping acts."""
    generator = torch.Generator().manual_seed(1)
    grads = []
    for number in range(NUM_STEPS):
        grad = torch.randn(shape, generator=generator) * (1.0 + 9.0 * (number == NUM_STEPS - 2))
        for axis, size in enumerate(shape):
            scale = torch.linspace(0.1, 3.0, size)
            grad *= scale.view(-1, *[1] * (len(shape) - 1 - axis))
        grads.append(grad)
    return grads


def initial(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def train(shape: tuple[int, ...], weight_decay: float = 0.0) -> Tensor:
    value = initial(shape)
    moments = fresh_moments(shape)
    for number, grad in enumerate(random_grads(shape), start=1):
        update_factored((value,), None, grad, moments, ExactWeight(), settings(number, weight_decay))
    return value


def expected(shape: tuple[int, ...], weight_decay: float = 0.0) -> Reference:
    reference = Reference(initial(shape).double().numpy(), weight_decay)
    for number, grad in enumerate(random_grads(shape), start=1):
        reference.update(grad.double().numpy(), number)
    return reference


def assert_close(actual: Tensor, wanted: Array) -> None:
    """Fail unless both moved alike; a stored fp32 weight of up to 4 is itself rounded by 2**-23 each step."""
    moved = float(np.abs(wanted - initial(tuple(actual.shape)).double().numpy()).max())
    allowed = CLOSE * moved + NUM_STEPS * 2**-23
    assert float(np.abs(actual.double().numpy() - wanted).max()) <= allowed


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("shape", SHAPES)
def test_updates_follow_the_paper(shape: tuple[int, ...], weight_decay: float) -> None:
    reference = expected(shape, weight_decay)
    assert_close(train(shape, weight_decay), reference.value)
    if min(shape) > 1:
        assert reference.largest_rms > 1.2  # else clipping would go untested


def test_the_comparison_sees_a_missing_clip_and_another_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = expected((48, 64))
    with monkeypatch.context() as patch:
        patch.setattr(adafactor, "_LARGEST_RMS", 1e9)
        with pytest.raises(AssertionError):
            assert_close(train((48, 64)), reference.value)
    monkeypatch.setattr(adafactor, "_DECAY_POWER", -0.79)
    with pytest.raises(AssertionError):
        assert_close(train((48, 64)), reference.value)


@pytest.mark.parametrize("shape", [(48, 64), (50,)])
def test_the_gradient_is_only_read(shape: tuple[int, ...]) -> None:
    # .float() of a float32 tensor is that tensor, so anything done to it in place would be done to the gradient.
    grad = random_grads(shape)[0]
    update_factored((initial(shape),), None, grad, fresh_moments(shape), ExactWeight(), settings(1))
    assert torch.equal(grad, random_grads(shape)[0])


def test_decay_is_decoupled_from_the_gradient() -> None:
    # A zero gradient moves nothing: 0 over the root of 1e-30 is 0, so decay alone is left.
    value = initial((4, 8))
    update_factored((value,), None, torch.zeros(4, 8), fresh_moments((4, 8)), ExactWeight(), settings(1, 0.5))
    torch.testing.assert_close(value, initial((4, 8)) * (1 - LR * 0.5), rtol=2**-23, atol=0.0)  # one fp32 rounding


def test_the_first_step_of_a_vector_is_the_gradients_sign() -> None:
    # decay is 0 at step 1, so the second moment is the squared gradient; 3 fp32 roundings of numbers about 1.
    value = torch.zeros(6)
    grad = torch.tensor([1e-4, -3.0, 20.0, -1.0, 7.0, -1e3])
    update_factored((value,), None, grad.clone(), fresh_moments((6,)), ExactWeight(), settings(1))
    torch.testing.assert_close(value, -LR * grad.sign(), rtol=2**-21, atol=0.0)


@pytest.mark.parametrize("shape", MATRICES)
def test_slices_of_rows_change_rounding_only(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(shape)
    monkeypatch.setattr(adafactor, "SLICE_ELEMENTS", 1)  # the fewest rows that begin at a group of 256
    if shape == (48, 64):
        assert [(part.start, part.stop) for part in adafactor._parts(torch.empty(shape))] == [
            (start, start + 4) for start in range(0, 48, 4)
        ]
    sliced = train(shape)
    moved = float((whole - initial(shape)).abs().max())
    # Sums over slices are added in another order: the same error as CLOSE allows, on either side.
    assert float((whole - sliced).abs().max()) <= 2 * (CLOSE * moved + NUM_STEPS * 2**-23)


@pytest.mark.parametrize("width", [1, 3, 48, 64, 256, 300, 1000])
def test_every_slice_begins_at_a_quantization_group(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adafactor, "SLICE_ELEMENTS", 700)
    parts = list(adafactor._parts(torch.empty(600, width)))
    assert all(part.start * width % 256 == 0 for part in parts)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == 600


def test_sliced_int8_weights_move_by_the_update_up_to_one_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adafactor, "SLICE_ELEMENTS", 1)
    shape = (48, 64)
    codes, scales = torch.empty(48 * 64, dtype=torch.int8), torch.empty(12)
    codec = Int8Weight(Int8Codes(), static_scales=False)
    codec.create(initial(shape), (codes, scales))
    before = codec.load((codes, scales), None).view(shape)
    reference = Reference(before.double().numpy())
    grad = random_grads(shape)[0]
    reference.update(grad.double().numpy(), 1)
    torch.manual_seed(0)
    update_factored((codes, scales), None, grad, fresh_moments(shape), codec, settings(1))
    after = codec.load((codes, scales), None)
    # Stochastic rounding goes to one of the two neighbours, at most one scale away; 1e-4 of it for fp32.
    error = np.abs(after.double().numpy() - reference.value.reshape(-1))
    assert (error <= 1.0001 * scales.double().repeat_interleave(256).numpy()).all()
    assert error.mean() > 0  # it was rounded at all


def bf16_weight(codec: WeightFormat, shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor | None]:
    """Return a bfloat16 weight and its master weight after one update with a bfloat16 gradient."""
    weight = torch.empty(shape, dtype=torch.bfloat16)
    master_weight = codec.create(initial(shape), (weight,))
    torch.manual_seed(seed)
    grad = random_grads(shape)[0].bfloat16()
    update_factored((weight,), master_weight, grad, fresh_moments(shape), codec, settings(1))
    return weight, master_weight


def bf16_reference(start: Tensor) -> Array:
    reference = Reference(start.double().numpy())
    reference.update(random_grads(tuple(start.shape))[0].bfloat16().double().numpy(), 1)
    return reference.value


def test_a_master_copy_takes_the_update_and_the_weight_is_its_rounding() -> None:
    weight, master_weight = bf16_weight(Float32Master(), (48, 64), seed=0)
    assert master_weight is not None
    assert_close(master_weight, bf16_reference(initial((48, 64))))
    assert torch.equal(weight, master_weight.bfloat16())


def test_bf16_weights_round_up_and_down_around_the_update() -> None:
    shape = (48, 64)
    wanted = bf16_reference(initial(shape).bfloat16())
    draws = np.stack([bf16_weight(StochasticWeight(), shape, seed)[0].double().numpy() for seed in range(64)])
    # 8 significant bits: the two neighbours of a value lie within 2**-7 of it (at 0 the update itself is the size).
    assert (np.abs(draws - wanted) <= 2**-7 * np.abs(wanted) + 1e-7).all()
    # A draw's deviation is at most half of that, so the mean of 64 draws of 3072 elements has a deviation of
    # 2**-8 |wanted| / sqrt(64 * 3072) at most; 5 of them, where rounding down alone would be off by 2**-9 |wanted|.
    typical = float(np.sqrt(np.mean(wanted**2)))
    away_from_zero = np.sign(wanted) * (draws.mean(0) - wanted)
    assert abs(away_from_zero.mean()) <= 5 * 2**-8 * typical / np.sqrt(64 * wanted.size)
