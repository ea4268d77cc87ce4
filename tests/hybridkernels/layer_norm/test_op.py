"""Layer normalisation against torch in float64, its reference, and its fake."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybridkernels.layer_norm import layer_norm
from hybridkernels.layer_norm.reference import layer_norm_reference
from numerics import assert_bitwise, assert_error_bound

OP = torch.ops.hybridkernels.layer_norm.default
BACKWARD_OP = torch.ops.hybridkernels.layer_norm_backward.default
EPS = 1e-5
SHAPES = [(2, 5, 64), (3, 17, 36), (1, 1, 7), (300, 33)]
FLOORS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""About one rounding of a result near 1, for cases where the reference happens to be exact."""


def random_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    # The mean is away from 0, so that a one-pass variance would lose digits.
    x = torch.randn(shape) * 2 + 3
    return x.to(dtype), torch.rand(shape[-1]).add(0.5).to(dtype), torch.randn(shape[-1]).to(dtype)


def exact_layer_norm(x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    return functional.layer_norm(x, weight_D.shape, weight_D, bias_D, eps)


def with_gradients(
    norm: Callable[[Tensor, Tensor, Tensor, float], Tensor], inputs: tuple[Tensor, ...], weight: Tensor
) -> dict[str, Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = norm(*leaves, EPS)
    grads = torch.autograd.grad(out, leaves, weight.to(out.dtype))
    return {"out": out.detach(), "dx": grads[0], "dweight": grads[1], "dbias": grads[2]}


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_are_as_exact_as_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = random_inputs(shape, dtype)
    weight = torch.randn(shape).to(dtype)
    actual = with_gradients(layer_norm, inputs, weight)
    same_dtype = with_gradients(layer_norm_reference, inputs, weight)
    exact = with_gradients(exact_layer_norm, tuple(tensor.double() for tensor in inputs), weight)
    for name, tensor in actual.items():
        # Relative to the largest element: the kernel adds the rows of dweight in another order than the reference.
        floor = FLOORS[dtype] * max(1.0, exact[name].abs().max().item()) if dtype is torch.float32 else FLOORS[dtype]
        assert_error_bound(tensor, same_dtype[name], exact[name], floor=floor, name=name)


def test_a_transposed_input_gives_what_a_contiguous_one_gives() -> None:
    x, weight_D, bias_D = random_inputs((4, 6, 36), torch.float32)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    out_weight = torch.randn(x.shape)
    results = []
    for version in (strided, x):
        leaf = version.detach().requires_grad_()
        out = layer_norm(leaf, weight_D, bias_D, EPS)
        results.append((out, torch.autograd.grad(out, leaf, out_weight)[0]))
    for actual, expected in zip(*results, strict=True):
        assert_bitwise(actual.contiguous(), expected)


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_saved_statistics_are_float32_and_not_rounded_further(dtype: torch.dtype) -> None:
    x, weight_D, bias_D = random_inputs((2, 5, 64), dtype)
    _, mean, rstd = OP(x, weight_D, bias_D, EPS)
    assert (mean.dtype, rstd.dtype) == (torch.float32, torch.float32)
    variance, expected_mean = torch.var_mean(x.double(), dim=-1, correction=0, keepdim=True)
    # A few roundings of float32; one rounding to bfloat16 would be 4e-3.
    torch.testing.assert_close(mean.double(), expected_mean, rtol=1e-5, atol=0)
    torch.testing.assert_close(rstd.double(), (variance + EPS).rsqrt(), rtol=1e-5, atol=0)


def test_the_fakes_have_the_strides_of_the_ops_for_a_transposed_input() -> None:
    x, weight_D, bias_D = random_inputs((4, 6, 36), torch.float32)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    torch.library.opcheck(OP, (strided, weight_D, bias_D, EPS), test_utils="test_faketensor")
    _, mean, rstd = OP(x, weight_D, bias_D, EPS)
    arguments = (strided, x, mean, rstd, weight_D, bias_D)
    torch.library.opcheck(BACKWARD_OP, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_op_passes_torchs_own_checks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    inputs = tuple(tensor.requires_grad_() for tensor in random_inputs(shape, dtype))
    torch.library.opcheck(OP, (*inputs, EPS), test_utils=checks)


def test_the_op_can_be_traced_with_its_gradient() -> None:
    inputs = tuple(tensor.requires_grad_() for tensor in random_inputs((3, 17, 36), torch.float32))
    torch.library.opcheck(OP, (*inputs, EPS), test_utils="test_aot_dispatch_dynamic")


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_backward_op_passes_torchs_own_checks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight_D, bias_D = random_inputs(shape, dtype)
    _, mean, rstd = OP(x, weight_D, bias_D, EPS)
    arguments = (torch.randn_like(x), x, mean, rstd, weight_D, bias_D)
    torch.library.opcheck(BACKWARD_OP, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_frozen_parameters_have_no_gradient_computed_and_x_has_the_same(dtype: torch.dtype) -> None:
    x, *parameters = random_inputs((3, 17, 36), dtype)
    x.requires_grad_()
    grad = torch.randn(x.shape).to(dtype)
    (frozen,) = torch.autograd.grad(layer_norm(x, *parameters, EPS), x, grad)
    trained = [parameter.requires_grad_() for parameter in parameters]
    expected, *_ = torch.autograd.grad(layer_norm(x, *trained, EPS), (x, *trained), grad)
    assert_bitwise(frozen, expected)


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_the_op_for_frozen_parameters_passes_torchs_own_checks(dtype: torch.dtype) -> None:
    x, *parameters = random_inputs((3, 17, 36), dtype)
    _, *statistics = OP(x, *parameters, EPS)
    arguments = (torch.randn_like(x), x, *statistics, *parameters)
    op = torch.ops.hybridkernels.layer_norm_input_grad.default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    assert isinstance(op(*arguments), Tensor)  # and nothing beside it
