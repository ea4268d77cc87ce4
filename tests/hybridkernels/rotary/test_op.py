"""Rotary positions against complex multiplication in float64, and the op's gradient and fake."""

import pytest
import torch
from torch import Tensor

from hybridkernels.rotary import rotary
from hybridkernels.rotary.reference import rotary_reference
from numerics import assert_bitwise, assert_error_bound, largest_error

OP = torch.ops.hybridkernels.rotary.default
SHAPES = [(2, 5, 4, 16), (1, 17, 3, 12), (2, 1, 1, 2)]
FLOORS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""About one rounding of a result near 1, for cases where the reference happens to be exact."""


def tables(seq_len: int, half_dim: int) -> tuple[Tensor, Tensor]:
    frequencies_R = 100.0 ** -(torch.arange(half_dim) / half_dim)
    angles_TR = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies_R)
    return angles_TR.cos(), angles_TR.sin()


def random_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(shape).to(dtype), *tables(shape[1], shape[3] // 2)


def turned(x_BTNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Return the rotation as a product of complex numbers, float64."""
    number = torch.complex(*x_BTNH.double().chunk(2, dim=-1))
    unit = torch.complex(cos_TR.double(), sin_TR.double())[:, None]
    product = number * unit
    return torch.cat([product.real, product.imag], dim=-1)


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_pair_is_turned_like_a_complex_number(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = random_inputs(shape, dtype)
    assert_error_bound(rotary(*inputs), rotary_reference(*inputs), turned(*inputs), floor=FLOORS[dtype], name="out")


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_is_the_one_autograd_finds_for_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x_BTNH, cos_TR, sin_TR = random_inputs(shape, dtype)
    x_BTNH.requires_grad_()
    weight = torch.randn(shape).to(dtype)
    (actual,) = torch.autograd.grad(rotary(x_BTNH, cos_TR, sin_TR), x_BTNH, weight)
    (expected,) = torch.autograd.grad(rotary_reference(x_BTNH, cos_TR, sin_TR), x_BTNH, weight)
    assert_bitwise(actual, expected, "dx")  # the same two products and one sum per element


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_rows_can_have_positions_of_their_own(dtype: torch.dtype) -> None:
    x_BTNH, cos_TR, sin_TR = random_inputs((2, 5, 4, 16), dtype)
    places_BT = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])
    turned_BTNH = rotary(x_BTNH, cos_TR[places_BT], sin_TR[places_BT])
    for row, places_T in enumerate(places_BT):
        expected = rotary(x_BTNH[row, :, None], cos_TR[places_T, None], sin_TR[places_T, None])
        assert_bitwise(turned_BTNH[row], expected[:, 0], "row")


def test_columns_beyond_the_tables_stay() -> None:
    x_BTNH = torch.randn(2, 5, 4, 16).requires_grad_()
    cos_TR, sin_TR = tables(5, 3)
    out = rotary(x_BTNH, cos_TR, sin_TR)
    assert_bitwise(out[..., :6], rotary(x_BTNH[..., :6].contiguous(), cos_TR, sin_TR))
    assert_bitwise(out[..., 6:], x_BTNH[..., 6:])
    torch.library.opcheck(OP, (x_BTNH, cos_TR, sin_TR))
    (grad,) = torch.autograd.grad(out, x_BTNH, torch.ones_like(out))
    assert (grad[..., 6:] == 1).all()


def test_dot_products_depend_on_the_distance_only() -> None:
    cos_TR, sin_TR = tables(32, 8)
    q, k = torch.randn(16), torch.randn(16)
    q_TH = rotary(q.expand(1, 32, 1, 16), cos_TR, sin_TR)[0, :, 0]
    k_TH = rotary(k.expand(1, 32, 1, 16), cos_TR, sin_TR)[0, :, 0]
    near_start = (q_TH[:22] * k_TH[10:]).sum(-1)  # distance 10 everywhere
    # Rounding of 16 products of magnitude about 1.
    assert largest_error(near_start, near_start[:1]) < 1e-5


def test_slices_of_a_projection_give_what_contiguous_tensors_give() -> None:
    cos_TR, sin_TR = tables(9, 8)
    sliced = torch.randn(2, 9, 3 * 64)[..., 64:128].view(2, 9, 4, 16)
    assert not sliced.is_contiguous()
    assert_bitwise(rotary(sliced, cos_TR, sin_TR), rotary(sliced.contiguous(), cos_TR, sin_TR))
    torch.library.opcheck(OP, (sliced, cos_TR, sin_TR), test_utils="test_faketensor")


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_op_passes_torchs_own_checks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x_BTNH, cos_TR, sin_TR = random_inputs(shape, dtype)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(OP, (x_BTNH.requires_grad_(), cos_TR, sin_TR), test_utils=checks)


def test_the_op_can_be_traced_with_its_gradient() -> None:
    x_BTNH, cos_TR, sin_TR = random_inputs((1, 17, 3, 12), torch.float32)
    arguments = (x_BTNH.requires_grad_(), cos_TR, sin_TR)
    torch.library.opcheck(OP, arguments, test_utils="test_aot_dispatch_dynamic")


def test_told_positions_are_rows_of_the_tables() -> None:
    x_BTNH, cos_TR, sin_TR = random_inputs((2, 7, 3, 12), torch.float32)
    positions_BT = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]])
    x_BTNH.requires_grad_()
    weight = torch.randn(x_BTNH.shape)
    told = rotary(x_BTNH, cos_TR, sin_TR, positions_BT)
    gathered = rotary(x_BTNH, cos_TR[positions_BT], sin_TR[positions_BT])
    assert_bitwise(told, gathered)
    grads = [torch.autograd.grad(out, x_BTNH, weight)[0] for out in (told, gathered)]
    assert_bitwise(*grads)
    assert_bitwise(told[1], rotary(x_BTNH[1:], cos_TR, sin_TR)[0])
