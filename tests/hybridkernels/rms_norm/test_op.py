"""Root-mean-square normalisation against torch in float64, its reference, and its fake."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybridkernels.rms_norm import rms_norm
from hybridkernels.rms_norm.reference import rms_norm_reference
from numerics import assert_bitwise, assert_error_bound

OP = torch.ops.hybridkernels.rms_norm.default
BACKWARD_OP = torch.ops.hybridkernels.rms_norm_backward.default
EPS = 1e-5
SHAPES = [(2, 5, 64), (3, 17, 36), (1, 1, 7), (300, 33)]
FLOORS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""About one rounding of a result near 1, for cases where the reference happens to be exact."""


def random_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (torch.randn(shape) * 2).to(dtype), torch.rand(shape[-1]).add(0.5).to(dtype)


def exact_rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight_D.shape, weight_D, eps)


def with_gradients(
    norm: Callable[[Tensor, Tensor, float], Tensor], inputs: tuple[Tensor, ...], weight: Tensor
) -> dict[str, Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = norm(*leaves, EPS)
    grads = torch.autograd.grad(out, leaves, weight.to(out.dtype))
    return {"out": out.detach(), "dx": grads[0], "dweight": grads[1]}


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_are_as_exact_as_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = random_inputs(shape, dtype)
    weight = torch.randn(shape).to(dtype)
    actual = with_gradients(rms_norm, inputs, weight)
    same_dtype = with_gradients(rms_norm_reference, inputs, weight)
    exact = with_gradients(exact_rms_norm, tuple(tensor.double() for tensor in inputs), weight)
    for name, tensor in actual.items():
        # Relative to the largest element: the kernel adds the rows of dweight in another order than the reference.
        floor = FLOORS[dtype] * max(1.0, exact[name].abs().max().item()) if dtype is torch.float32 else FLOORS[dtype]
        assert_error_bound(tensor, same_dtype[name], exact[name], floor=floor, name=name)


def test_tiny_inputs_are_governed_by_eps() -> None:
    x = torch.full((1, 8), 1e-4)
    # mean(x^2) = 1e-8 is a thousandth of eps: x / sqrt(1.001e-5); the band is float32's rounding.
    expected = torch.full((1, 8), 1e-4 / (1e-8 + EPS) ** 0.5)
    torch.testing.assert_close(rms_norm(x, torch.ones(8), EPS), expected, rtol=1e-6, atol=0)


def test_a_transposed_input_gives_what_a_contiguous_one_gives() -> None:
    x, weight_D = random_inputs((4, 6, 36), torch.float32)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    out_weight = torch.randn(x.shape)
    results = []
    for version in (strided, x):
        leaf = version.detach().requires_grad_()
        out = rms_norm(leaf, weight_D, EPS)
        results.append((out, torch.autograd.grad(out, leaf, out_weight)[0]))
    for actual, expected in zip(*results, strict=True):
        assert_bitwise(actual.contiguous(), expected)


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_the_saved_statistic_is_float32(dtype: torch.dtype) -> None:
    _, rstd = OP(*random_inputs((2, 5, 64), dtype), EPS)
    assert rstd.dtype == torch.float32
    assert rstd.shape == (2, 5, 1)


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_op_passes_torchs_own_checks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    inputs = tuple(tensor.requires_grad_() for tensor in random_inputs(shape, dtype))
    torch.library.opcheck(OP, (*inputs, EPS), test_utils=checks)


def test_the_fake_has_the_strides_of_the_op_for_a_transposed_input() -> None:
    x, weight_D = random_inputs((4, 6, 36), torch.float32)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    torch.library.opcheck(OP, (strided, weight_D, EPS), test_utils="test_faketensor")


def test_the_backward_fake_has_the_strides_of_the_op_for_a_transposed_gradient() -> None:
    x, weight_D = random_inputs((4, 6, 36), torch.float32)
    strided = torch.randn(6, 4, 36).transpose(0, 1)
    _, rstd = OP(x, weight_D, EPS)
    torch.library.opcheck(BACKWARD_OP, (strided, x, rstd, weight_D), test_utils="test_faketensor")


def test_the_op_can_be_traced_with_its_gradient() -> None:
    inputs = tuple(tensor.requires_grad_() for tensor in random_inputs((3, 17, 36), torch.float32))
    torch.library.opcheck(OP, (*inputs, EPS), test_utils="test_aot_dispatch_dynamic")


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_backward_op_passes_torchs_own_checks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight_D = random_inputs(shape, dtype)
    _, rstd = OP(x, weight_D, EPS)
    arguments = (torch.randn_like(x), x, rstd, weight_D)
    torch.library.opcheck(BACKWARD_OP, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_wide_weight_is_not_rounded() -> None:
    """Gemma's: what is stored is the weight less 1, and the sum is taken in fp32."""
    x, weight_D = random_inputs((3, 17, 36), torch.bfloat16)
    wide_D = (weight_D.float() + 1 / 1024).requires_grad_()
    x.requires_grad_()
    out = rms_norm(x, wide_D, EPS)
    assert_bitwise(out, rms_norm_reference(x, wide_D, EPS))
    dx, dweight = torch.autograd.grad(out, (x, wide_D), torch.ones_like(out))
    assert (dx.dtype, dweight.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_frozen_parameters_have_no_gradient_computed_and_x_has_the_same(dtype: torch.dtype) -> None:
    x, *parameters = random_inputs((3, 17, 36), dtype)
    x.requires_grad_()
    grad = torch.randn(x.shape).to(dtype)
    (frozen,) = torch.autograd.grad(rms_norm(x, *parameters, EPS), x, grad)
    trained = [parameter.requires_grad_() for parameter in parameters]
    expected, *_ = torch.autograd.grad(rms_norm(x, *trained, EPS), (x, *trained), grad)
    assert_bitwise(frozen, expected)


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_the_op_for_frozen_parameters_passes_torchs_own_checks(dtype: torch.dtype) -> None:
    x, *parameters = random_inputs((3, 17, 36), dtype)
    _, *statistics = OP(x, *parameters, EPS)
    arguments = (torch.randn_like(x), x, *statistics, *parameters)
    op = torch.ops.hybridkernels.rms_norm_input_grad.default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    assert isinstance(op(*arguments), Tensor)  # and nothing beside it
