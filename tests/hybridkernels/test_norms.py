"""Layer and root-mean-square normalisation against torch in float64, their references, and their fakes."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybridkernels.layer_norm import layer_norm
from hybridkernels.layer_norm.reference import layer_norm_reference
from hybridkernels.rms_norm import rms_norm
from hybridkernels.rms_norm.reference import rms_norm_reference
from numerics import assert_bitwise, assert_error_bound

EPS = 1e-5
SHAPES = [(2, 5, 64), (3, 17, 36), (1, 1, 7), (300, 33)]
FLOORS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""About one rounding of a result near 1, for cases where the reference happens to be exact."""
DTYPES = pytest.mark.parametrize("dtype", FLOORS, ids=str)


@dataclass
class Norm:
    """One of the two."""

    name: str
    function: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    num_parameters: int
    num_statistics: int

    def op(self, suffix: str = "") -> torch._ops.OpOverload:
        return getattr(torch.ops.hybridkernels, self.name + suffix).default

    def inputs(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """Return x and the parameters; the mean is away from 0, so that a one-pass variance would lose digits."""
        x, bias = torch.randn(shape) * 2 + 3 * (self.num_parameters - 1), torch.randn(shape[-1])
        parameters = (torch.rand(shape[-1]).add(0.5), bias)[: self.num_parameters]
        return [tensor.to(dtype) for tensor in (x, *parameters)]

    def backward_arguments(self, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        _, *statistics = self.op()(x, *parameters, EPS)
        return torch.randn_like(x), x, *statistics, *parameters


def exact_layer_norm(x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    return functional.layer_norm(x, weight_D.shape, weight_D, bias_D, eps)


def exact_rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight_D.shape, weight_D, eps)


@pytest.fixture(params=["layer_norm", "rms_norm"])
def norm(request: pytest.FixtureRequest) -> Norm:
    return {
        "layer_norm": Norm("layer_norm", layer_norm, layer_norm_reference, exact_layer_norm, 2, 2),
        "rms_norm": Norm("rms_norm", rms_norm, rms_norm_reference, exact_rms_norm, 1, 1),
    }[request.param]


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor], weight: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = function(*leaves, EPS)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight.to(out.dtype))]


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_are_as_exact_as_the_reference(
    norm: Norm, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    inputs = norm.inputs(shape, dtype)
    weight = torch.randn(shape).to(dtype)
    actual, same_dtype = with_gradients(norm.function, inputs, weight), with_gradients(norm.reference, inputs, weight)
    exact = with_gradients(norm.exact, [tensor.double() for tensor in inputs], weight)
    for name, tensor, same, target in zip(("out", "dx", "dweight", "dbias"), actual, same_dtype, exact, strict=False):
        # Relative to the largest element: the kernel adds the rows of dweight in another order than the reference.
        floor = FLOORS[dtype] * (max(1.0, target.abs().max().item()) if dtype is torch.float32 else 1.0)
        assert_error_bound(tensor, same, target, floor=floor, name=name)


def test_a_transposed_input_gives_what_a_contiguous_one_gives(norm: Norm) -> None:
    x, *parameters = norm.inputs((4, 6, 36), torch.float32)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    results = []
    out_weight = torch.randn(x.shape)
    for version in (strided, x):
        leaf = version.detach().requires_grad_()
        out = norm.function(leaf, *parameters, EPS)
        results.append((out, torch.autograd.grad(out, leaf, out_weight)[0]))
    for actual, expected in zip(*results, strict=True):
        assert_bitwise(actual.contiguous(), expected)


@DTYPES
def test_saved_statistics_are_float32_and_not_rounded_further(norm: Norm, dtype: torch.dtype) -> None:
    x, *parameters = norm.inputs((2, 5, 64), dtype)
    _, *statistics = norm.op()(x, *parameters, EPS)
    variance, mean = torch.var_mean(x.double(), dim=-1, correction=0, keepdim=True)
    if norm.num_statistics == 1:
        variance = x.double().square().mean(-1, keepdim=True)
    for statistic, expected in zip(reversed(statistics), ((variance + EPS).rsqrt(), mean), strict=False):
        assert statistic.dtype == torch.float32
        # A few roundings of float32; one rounding to bfloat16 would be 4e-3.
        torch.testing.assert_close(statistic.double(), expected, rtol=1e-5, atol=0)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_ops_pass_torchs_own_checks(norm: Norm, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = norm.inputs(shape, dtype)
    arguments, checks = norm.backward_arguments(*inputs), ("test_schema", "test_faketensor")
    torch.library.opcheck(norm.op("_backward"), arguments, test_utils=checks)
    torch.library.opcheck(norm.op("_input_grad"), arguments, test_utils=checks)
    assert isinstance(norm.op("_input_grad")(*arguments), Tensor)  # and nothing beside it
    leaves = (tensor.requires_grad_() for tensor in inputs)
    torch.library.opcheck(norm.op(), (*leaves, EPS), test_utils=(*checks, "test_autograd_registration"))


def test_the_fakes_have_the_strides_of_the_ops_for_transposed_tensors(norm: Norm) -> None:
    x, *parameters = norm.inputs((4, 6, 36), torch.float32)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    torch.library.opcheck(norm.op(), (strided, *parameters, EPS), test_utils="test_faketensor")
    _, *others = norm.backward_arguments(x, *parameters)
    torch.library.opcheck(norm.op("_backward"), (strided, *others), test_utils="test_faketensor")


def test_the_op_can_be_traced_with_its_gradient(norm: Norm) -> None:
    leaves = (tensor.requires_grad_() for tensor in norm.inputs((3, 17, 36), torch.float32))
    torch.library.opcheck(norm.op(), (*leaves, EPS), test_utils="test_aot_dispatch_dynamic")


@DTYPES
def test_frozen_parameters_have_no_gradient_computed_and_x_has_the_same(norm: Norm, dtype: torch.dtype) -> None:
    x, *parameters = norm.inputs((3, 17, 36), dtype)
    x.requires_grad_()
    grad = torch.randn(x.shape).to(dtype)
    (frozen,) = torch.autograd.grad(norm.function(x, *parameters, EPS), x, grad)
    trained = [parameter.requires_grad_() for parameter in parameters]
    expected, *_ = torch.autograd.grad(norm.function(x, *trained, EPS), (x, *trained), grad)
    assert_bitwise(frozen, expected)


def test_tiny_inputs_are_governed_by_eps() -> None:
    x = torch.full((1, 8), 1e-4)
    # mean(x^2) = 1e-8 is a thousandth of eps: x / sqrt(1.001e-5); the band is float32's rounding.
    expected = torch.full((1, 8), 1e-4 / (1e-8 + EPS) ** 0.5)
    torch.testing.assert_close(rms_norm(x, torch.ones(8), EPS), expected, rtol=1e-6, atol=0)


def test_a_wide_weight_is_not_rounded() -> None:
    """Gemma's: what is stored is the weight less 1, and the sum is taken in fp32."""
    x = (torch.randn(3, 17, 36) * 2).bfloat16().requires_grad_()
    wide_D = (torch.rand(36).add(0.5).bfloat16().float() + 1 / 1024).requires_grad_()
    out = rms_norm(x, wide_D, EPS)
    assert_bitwise(out, rms_norm_reference(x, wide_D, EPS))
    dx, dweight = torch.autograd.grad(out, (x, wide_D), torch.ones_like(out))
    assert (dx.dtype, dweight.dtype) == (torch.bfloat16, torch.float32)
