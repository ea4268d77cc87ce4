"""The Triton update in Triton's interpreter, against the reference and, for rounded weights, its random numbers."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hybridkernels.adamw_int8 import QUANT_GROUP_SIZE, adamw_int8_, adamw_int8_rounded_, dequantize
from hybridkernels.adamw_int8.triton_kernel import adamw_int8_triton
from hybridkernels.int8_quantize.reference import int8_dequantize_reference, int8_quantize_reference
from numerics import assert_bitwise

HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SIZES = [1, 255, 256, 257, 1024, 5 * 1024 + 77]
SEED = torch.tensor([0x123456789ABCDEF])
ROUNDED = pytest.mark.parametrize("kind", ["bfloat16", "int8"])


@dataclass
class State:
    """A weight with its moments."""

    weight: tuple[Tensor, ...]
    moments: tuple[Tensor, Tensor, Tensor, Tensor]

    def copy(self) -> "State":
        m_codes, m_scale, v_codes, v_scale = (tensor.clone() for tensor in self.moments)
        return State(tuple(tensor.clone() for tensor in self.weight), (m_codes, m_scale, v_codes, v_scale))

    def value(self) -> Tensor:
        return self.weight[0].float() if len(self.weight) == 1 else int8_dequantize_reference(*self.weight)


def fresh_state(value: Tensor, kind: str) -> State:
    groups = math.ceil(len(value) / QUANT_GROUP_SIZE)
    m_codes, v_codes = (torch.full((groups * QUANT_GROUP_SIZE,), code, dtype=torch.uint8) for code in (127, 0))
    if kind == "int8":
        weight: tuple[Tensor, ...] = int8_quantize_reference(value)
    else:
        weight = (value.clone() if kind == "float32" else value.bfloat16(),)
    return State(weight, (m_codes, torch.zeros(groups), v_codes, torch.zeros(groups)))


def trained_state(num_elements: int, kind: str) -> State:
    """Return a state whose codes and scales are no longer those of the beginning."""
    state = fresh_state(torch.randn(num_elements), kind)
    for step in (1, 2, 3):
        adamw_int8_(state.value(), random_grad(num_elements), state.moments, step=step, **HYPER)
    return state


def random_grad(num_elements: int) -> Tensor:
    """Return gradients over four decades, as a weight matrix has them."""
    return torch.randn(num_elements) * 10.0 ** (-4 * torch.rand(num_elements))


def launch(state: State, grad: Tensor, step: int = 4, **changed: float) -> None:
    adamw_int8_triton(state.weight, grad, state.moments, step=step, seed=SEED, **{**HYPER, **changed})


def assert_same_moments(actual: State, expected: State) -> None:
    for name, tensor, wanted in zip(("m", "m scale", "v", "v scale"), actual.moments, expected.moments, strict=True):
        if tensor.dtype == torch.float32:
            torch.testing.assert_close(tensor, wanted, rtol=1e-6, atol=0)  # a few roundings of 6e-8
        else:
            gap = (tensor.int() - wanted.int()).abs()
            assert gap.max() <= 1, name
            # A value within a rounding of a midpoint may go either way.
            assert (gap > 0).sum() <= 3, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_elements", SIZES)
def test_the_kernel_equals_the_ops_update(num_elements: int, dtype: torch.dtype) -> None:
    state = trained_state(num_elements, "float32")
    expected, grad = state.copy(), random_grad(num_elements).to(dtype)
    launch(state, grad)
    adamw_int8_(expected.weight[0], grad, expected.moments, step=4, **HYPER)
    # The order of a product and two quotients differs: a few roundings of the update, lr / 0.1 at most.
    torch.testing.assert_close(state.weight[0], expected.weight[0], rtol=1e-6, atol=1e-6)
    assert_same_moments(state, expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_every_code_is_decoded(*, reverse: bool) -> None:
    # A zero gradient leaves the decoded moments in the parameter: p = -lr * c1 * m / (c2 * sqrt(v) + eps).
    state = fresh_state(torch.zeros(256), "float32")
    codes = torch.arange(256, dtype=torch.uint8)
    state.moments = (codes.flip(0) if reverse else codes.clone(), torch.tensor([3.0]), codes, torch.tensor([2.0]))
    expected = state.copy()
    launch(state, torch.zeros(256))
    adamw_int8_(expected.weight[0], torch.zeros(256), expected.moments, step=4, **HYPER)
    assert (state.weight[0] != 0).sum() == 255  # all but the first moment zero
    # A dozen roundings of 6e-8, in another order, and those of the map.
    torch.testing.assert_close(state.weight[0], expected.weight[0], rtol=2e-6, atol=0)


@pytest.mark.parametrize("num_elements", [1, 255, 300])
def test_what_a_short_group_lacks_stays_zero(num_elements: int) -> None:
    for kind in ("float32", "bfloat16", "int8"):
        state = trained_state(num_elements, kind)
        launch(state, random_grad(num_elements))
        assert (state.moments[0][num_elements:] == 127).all()
        assert (state.moments[2][num_elements:] == 0).all()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_what_lies_beyond_a_short_group_has_no_part_in_its_weights(kind: str) -> None:
    state = trained_state(300, kind)
    state.moments[0][300:] = 255
    state.moments[2][300:] = torch.arange(212)
    expected, grad = state.copy(), random_grad(300)
    grad[-1] = 10.0  # a new scale, and so new codes for all of its group
    launch(state, grad, lr=1.0)
    update = adamw_int8_ if kind == "float32" else adamw_int8_rounded_
    weight = expected.weight[0] if kind == "float32" else expected.weight
    seed = {} if kind == "float32" else {"seed": SEED}
    update(weight, grad, expected.moments, step=4, **seed, **{**HYPER, "lr": 1.0})
    assert_same_moments(state, expected)
    assert (state.moments[2][300:] != torch.arange(212)).any()
    if kind == "int8":
        torch.testing.assert_close(state.weight[1], expected.weight[1], rtol=1e-6, atol=0)


@ROUNDED
@pytest.mark.parametrize("num_elements", SIZES)
def test_rounded_weights_have_the_references_random_numbers(num_elements: int, kind: str) -> None:
    state = trained_state(num_elements, kind)
    expected, grad = state.copy(), random_grad(num_elements).bfloat16()
    launch(state, grad)
    adamw_int8_rounded_(expected.weight, grad, expected.moments, step=4, seed=SEED, **HYPER)
    assert_same_moments(state, expected)
    # Values that differ by a few roundings part with a probability of a few units of 2^-16 (bfloat16), or of a
    # scale's digits (int8): up to 1 of 5,197 was seen.
    assert (state.weight[0].float() != expected.weight[0].float()).sum() <= 3
    if kind == "int8":
        assert (state.weight[0].int() - expected.weight[0].int()).abs().max() <= 1
        torch.testing.assert_close(state.weight[1], expected.weight[1], rtol=1e-6, atol=0)


@ROUNDED
def test_decay_alone_is_rounded_as_the_reference_to_the_bit(kind: str) -> None:
    # Without moments the value is one product by a power of two and a half, the same in any order of operations.
    num_elements = 20 * 1024 + 77
    state = fresh_state(torch.randn(num_elements), kind)
    expected, grad = state.copy(), torch.zeros(num_elements)
    changed = {**HYPER, "lr": 0.125, "weight_decay": 0.5}
    launch(state, grad, step=1, lr=0.125, weight_decay=0.5)
    adamw_int8_rounded_(expected.weight, grad, expected.moments, step=1, seed=SEED, **changed)
    for actual, wanted in zip(state.weight, expected.weight, strict=True):
        assert_bitwise(actual, wanted)


@ROUNDED
def test_rounding_keeps_the_mean(kind: str) -> None:
    # A first step moves what has a gradient by the learning rate, 63 to 62.7; a 127 that has none keeps the scale at 1.
    value, grad = torch.full((40, 256), 63.0), torch.ones(40, 256)
    value[:, 0], grad[:, 0] = 127.0, 0.0
    state = fresh_state(value.view(-1), kind)
    launch(state, grad.view(-1), step=1, lr=0.3, weight_decay=0.0)
    rounded = state.value().view(40, 256)[:, 1:].double()
    low, high = (62.5, 62.75) if kind == "bfloat16" else (62.0, 63.0)
    assert set(rounded.unique().tolist()) == {low, high}
    share = (62.7 - low) / (high - low)
    # Five standard deviations of a binomial mean, and float32's rounding of 62.7.
    tolerance = 5 * (high - low) * (share * (1 - share) / rounded.numel()) ** 0.5 + 1e-5
    assert abs(rounded.mean().item() - 62.7) <= tolerance


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy names infinity by infinity
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_a_fault_in_a_gradient_shows_in_its_group(kind: str, fault: float) -> None:
    state = trained_state(1024, kind)
    grad = random_grad(1024)
    grad[300] = fault
    launch(state, grad)
    m_codes, m_scale, v_codes, v_scale = state.moments
    assert m_scale.isfinite().tolist() == v_scale.isfinite().tolist() == [True, False, True, True]
    assert not dequantize(m_codes.view(-1, 256), m_scale, signed=True)[1, 44].isfinite()
    assert not dequantize(v_codes.view(-1, 256), v_scale, signed=False)[1, 44].isfinite()
    finite = state.value().isfinite()
    wrong = slice(256, 512) if kind == "int8" else slice(300, 301)  # codes share their group's scale
    assert not finite[wrong].any()
    assert finite.sum() == 1024 - (256 if kind == "int8" else 1)


def test_strided_gradients_give_what_contiguous_ones_give() -> None:
    state = trained_state(300, "float32")
    dense = state.copy()
    grad = random_grad(600)[::2]
    assert not grad.is_contiguous()
    launch(state, grad)
    launch(dense, grad.contiguous())
    assert_bitwise(state.weight[0], dense.weight[0])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("num_elements", [1, 300, 1024, 1025])
def test_nothing_is_written_outside(num_elements: int, kind: str) -> None:
    state = trained_state(num_elements, kind)
    room = 2048
    tensors = [*state.weight, *state.moments]
    buffers = [torch.full((len(tensor) + 2 * room,), 77, dtype=tensor.dtype) for tensor in tensors]
    parts = [buffer[room : room + len(tensor)] for buffer, tensor in zip(buffers, tensors, strict=True)]
    for part, tensor in zip(parts, tensors, strict=True):
        part.copy_(tensor)
    inside = State(tuple(parts[:-4]), (parts[-4], parts[-3], parts[-2], parts[-1]))
    grad = random_grad(num_elements)
    launch(state, grad)
    launch(inside, grad)
    for buffer, part, tensor in zip(buffers, parts, tensors, strict=True):
        assert_bitwise(part, tensor)
        assert (buffer[:room] == 77).all()
        assert (buffer[room + len(tensor) :] == 77).all()


def test_an_empty_weight_is_no_work() -> None:
    state = fresh_state(torch.empty(0), "float32")
    launch(state, torch.empty(0))
    assert state.weight[0].shape == (0,)
