"""An activation of the gate times up against torch in float64, torch's own autograd, and its fake."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybridkernels import gated
from hybridkernels.geglu import geglu
from hybridkernels.geglu.reference import geglu_reference
from hybridkernels.swiglu import swiglu
from hybridkernels.swiglu.reference import swiglu_reference
from numerics import assert_bitwise, assert_error_bound

SHAPES = [(2, 5, 64), (3, 17, 37), (1,), (), (0, 8), (1009,)]
FLOORS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""About one rounding of a result near 1, for cases where torch happens to be exact."""
HALVES = (torch.bfloat16, torch.float16)
ACTIVATIONS = {swiglu: functional.silu, geglu: partial(functional.gelu, approximate="tanh")}
REFERENCES = {swiglu: swiglu_reference, geglu: geglu_reference}
OPS = pytest.mark.parametrize("op", ACTIVATIONS, ids=lambda op: op.__name__)

Gated = Callable[[Tensor, Tensor], Tensor]


def registered(op: Gated, suffix: str = "") -> torch._ops.OpOverload:
    return getattr(torch.ops.hybridkernels, op.__name__ + suffix).default


def random_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return gate, up and the gradient of the result."""
    gate, up, grad = ((torch.randn(shape) * 2).to(dtype) for _ in range(3))
    return gate, up, grad


def eager(op: Gated) -> Gated:
    return lambda gate, up: ACTIVATIONS[op](gate) * up


def with_gradients(function: Gated, gate: Tensor, up: Tensor, grad: Tensor) -> dict[str, Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in (gate, up)]
    out = function(*leaves)
    grads = torch.autograd.grad(out, leaves, grad)
    return {"out": out.detach(), "grad_gate": grads[0], "grad_up": grads[1]}


def exact_results(op: Gated, *tensors: Tensor) -> dict[str, Tensor]:
    return with_gradients(eager(op), *(tensor.double() for tensor in tensors))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated, "_CHUNK_ELEMENTS", {"cpu": 100})


@OPS
@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if 0 not in shape], ids=str)
def test_results_are_as_exact_as_torchs(op: Gated, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = random_inputs(shape, dtype)
    actual, same_dtype, exact = (
        with_gradients(op, *inputs),
        with_gradients(eager(op), *inputs),
        exact_results(op, *inputs),
    )
    for name, tensor in actual.items():
        assert_error_bound(tensor, same_dtype[name], exact[name], floor=FLOORS[dtype], name=name)


@OPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_types_are_bit_equal_to_torchs_autograd(op: Gated, dtype: torch.dtype) -> None:
    inputs = random_inputs((33, 129), dtype)
    expected = with_gradients(eager(op), *inputs)
    for name, tensor in with_gradients(op, *inputs).items():
        assert_bitwise(tensor, expected[name], name)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("numel", [1, 99, 100, 101, 1009])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_16_bit_results_are_rounded_once_in_every_chunk(dtype: torch.dtype, numel: int) -> None:
    inputs = random_inputs((numel,), dtype)
    exact = exact_results(swiglu, *inputs)
    for name, tensor in with_gradients(swiglu, *inputs).items():
        # Half a unit in the last place is at most eps/2 of the result; 1 % more is fp32's part in front of it.
        # The smallest normal number stands for results that underflow in float16.
        half_unit = exact[name].abs() * (torch.finfo(dtype).eps / 2) + torch.finfo(dtype).tiny * torch.finfo(dtype).eps
        assert ((tensor.double() - exact[name]).abs() <= 1.01 * half_unit).all(), name


@OPS
def test_the_op_and_the_reference_have_the_gradients_of_their_formula(op: Gated) -> None:
    gate, up, grad = random_inputs((3, 5), torch.float64)
    assert torch.autograd.gradcheck(op, (gate.requires_grad_(), up.requires_grad_()))
    expected = with_gradients(eager(op), gate, up, grad)
    for name, tensor in with_gradients(REFERENCES[op], gate, up, grad).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-12)  # two orders of double arithmetic


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_extreme_gates_give_no_nan(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    gate = torch.tensor([-largest, -1e4, -200.0, -88.5, -20.0, -0.0, 0.0, 20.0, 88.5, 200.0, 1e4, largest]).to(dtype)
    up, grad = torch.full_like(gate, 0.5), torch.full_like(gate, -0.5)
    actual, exact = with_gradients(swiglu, gate, up, grad), exact_results(swiglu, gate, up, grad)
    for name, tensor in actual.items():
        assert tensor.isfinite().all(), name
        # Relative to each element: one rounding of the type, and fp32's few in front of it.
        rtol = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(tensor.double(), exact[name], rtol=rtol, atol=torch.finfo(dtype).tiny, msg=name)


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_nan_and_infinity_pass_through_as_in_torch(dtype: torch.dtype) -> None:
    gate = torch.tensor([torch.nan, torch.inf, 1.0, 1.0]).to(dtype)
    up = torch.tensor([1.0, 1.0, torch.nan, torch.inf]).to(dtype)
    torch.testing.assert_close(swiglu(gate, up), eager(swiglu)(gate, up), equal_nan=True)


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_strided_inputs_give_what_contiguous_ones_give(dtype: torch.dtype) -> None:
    inputs = random_inputs((6, 34), dtype)
    halves = torch.cat(inputs, dim=-1).chunk(3, dim=-1)
    transposed = [tensor.t().contiguous().t() for tensor in inputs]
    expected = with_gradients(swiglu, *inputs)
    for strided in (halves, transposed):
        assert not any(tensor.is_contiguous() for tensor in strided)
        for name, tensor in with_gradients(swiglu, *strided).items():
            assert tensor.is_contiguous()
            assert_bitwise(tensor, expected[name], name)


def test_an_expanded_gradient_is_taken() -> None:
    gate, up, _ = random_inputs((4, 5), torch.bfloat16)
    gate.requires_grad_()
    swiglu(gate, up).sum().backward()
    assert gate.grad is not None
    assert_bitwise(gate.grad, with_gradients(swiglu, gate, up, torch.ones_like(up))["grad_gate"])


@OPS
def test_only_gate_and_up_are_saved(op: Gated) -> None:
    gate, up, _ = random_inputs((4, 5), torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda kept: kept):
        op(gate.requires_grad_(), up.requires_grad_())
    assert [tensor.data_ptr() for tensor in saved] == [gate.data_ptr(), up.data_ptr()]


@OPS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_ops_pass_torchs_own_checks(op: Gated, shape: tuple[int, ...]) -> None:
    gate, up, grad = random_inputs(shape, torch.bfloat16)
    torch.library.opcheck(registered(op, "_backward"), (gate, up, grad), test_utils=("test_schema", "test_faketensor"))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(registered(op), (gate.requires_grad_(), up.requires_grad_()), test_utils=checks)


def test_the_op_can_be_traced_with_its_gradient() -> None:
    gate, up, _ = random_inputs((3, 17, 36), torch.float32)
    leaves = (gate.requires_grad_(), up.requires_grad_())
    torch.library.opcheck(registered(swiglu), leaves, test_utils="test_aot_dispatch_dynamic")


@OPS
def test_the_fakes_have_the_strides_of_the_ops_for_strided_inputs(op: Gated) -> None:
    gate, up, grad = (tensor.t() for tensor in random_inputs((4, 6), torch.float32))
    torch.library.opcheck(registered(op), (gate, up), test_utils="test_faketensor")
    torch.library.opcheck(registered(op, "_backward"), (gate, up, grad), test_utils="test_faketensor")


@pytest.mark.parametrize(
    ("gate", "up"),
    [
        (torch.ones(2, 3), torch.ones(3)),
        (torch.ones(2), torch.ones(2, dtype=torch.bfloat16)),
        (torch.ones(2), torch.ones(2, device="meta")),
        (torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)),
    ],
    ids=["shape", "dtype", "device", "integers"],
)
def test_inputs_that_do_not_match_are_refused(gate: Tensor, up: Tensor) -> None:
    with pytest.raises(ValueError, match=r"swiglu: gate is torch\.\w+ \(.*\) on cpu, up is torch\.\w+ .* both need"):
        swiglu(gate, up)


def test_the_op_works_where_triton_cannot_be_imported() -> None:
    code = "import sys; sys.modules['triton'] = None; import torch; from hybridkernels.swiglu import swiglu; "
    code += "swiglu(*torch.ones(2, 3, requires_grad=True)).sum().backward(); "
    code += "assert 'hybridkernels.swiglu.triton_kernel' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
