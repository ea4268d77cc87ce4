"""gelu(gate) * up against torch in float64, torch's own autograd, and its fake; what it shares is swiglu's to test."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybridkernels.geglu import geglu
from hybridkernels.geglu.reference import geglu_backward_reference, geglu_reference
from numerics import assert_bitwise, assert_error_bound

OP = torch.ops.hybridkernels.geglu.default
BACKWARD_OP = torch.ops.hybridkernels.geglu_backward.default
SHAPES = [(3, 17, 37), (), (1009,)]
FLOORS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""About one rounding of a result near 1, for cases where torch happens to be exact."""


def eager(gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate, approximate="tanh") * up


def results(function, *tensors: Tensor) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    gate, up, grad = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in (gate, up)]
    out = function(*leaves)
    grads = torch.autograd.grad(out, leaves, grad)
    return {"out": out.detach(), "grad_gate": grads[0], "grad_up": grads[1]}


def random_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, grad = ((torch.randn(shape) * 2).to(dtype) for _ in range(3))
    return gate, up, grad


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_as_exact_as_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = random_inputs(shape, dtype)
    same_dtype, exact = results(eager, *inputs), results(eager, *(tensor.double() for tensor in inputs))
    for name, tensor in results(geglu, *inputs).items():
        assert_error_bound(tensor, same_dtype[name], exact[name], floor=FLOORS[dtype], name=name)


def test_float32_is_bit_equal_to_torchs_autograd() -> None:
    inputs = random_inputs((33, 129), torch.float32)
    expected = results(eager, *inputs)
    for name, tensor in results(geglu, *inputs).items():
        assert_bitwise(tensor, expected[name], name)


def test_the_reference_has_the_gradients_of_its_formula() -> None:
    gate, up, grad = random_inputs((3, 5), torch.float64)
    leaves = (gate.requires_grad_(), up.requires_grad_())
    assert torch.autograd.gradcheck(geglu, leaves)
    expected = torch.autograd.grad(geglu_reference(*leaves), leaves, grad)
    # Two orders of the same double arithmetic.
    torch.testing.assert_close(geglu_backward_reference(gate, up, grad), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(geglu_reference(gate, up), eager(gate, up), rtol=1e-12, atol=1e-12)


def test_only_gate_and_up_are_saved() -> None:
    gate, up, _ = random_inputs((4, 5), torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda kept: kept):
        geglu(gate.requires_grad_(), up.requires_grad_())
    assert [tensor.data_ptr() for tensor in saved] == [gate.data_ptr(), up.data_ptr()]


def test_the_ops_pass_torchs_own_checks() -> None:
    gate, up, grad = (tensor.t() for tensor in random_inputs((4, 6), torch.bfloat16))
    torch.library.opcheck(BACKWARD_OP, (gate, up, grad), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(OP, (gate.requires_grad_(), up.requires_grad_()))


def test_inputs_that_do_not_match_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"geglu: gate is torch\.float32 \(2, 3\) on cpu, up is .* both need one shape"
    ):
        geglu(torch.ones(2, 3), torch.ones(3))
