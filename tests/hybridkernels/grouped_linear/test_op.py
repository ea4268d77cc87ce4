"""One linear layer an expert against its definition, and the ops' fakes."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hybridkernels.grouped_linear import grouped_linear, op
from hybridkernels.grouped_linear.reference import grouped_linear_reference
from numerics import assert_error_bound

OPS = torch.ops.hybridkernels
P, D, E, F = 23, 8, 5, 6
ENDS = {
    "all": [3, 7, 8, 20, 23],
    "first-and-last-without": [0, 7, 8, 23, 23],
    "one-has-all": [0, 0, 23, 23, 23],
}
FLOORS = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
"""One rounding of results of up to 8, for cases where torch happens to be exact."""


def random_inputs(dtype: torch.dtype, outputs: int = F) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, the weight and the gradient of the result."""
    x, weight, grad = (torch.randn(shape).to(dtype) for shape in ((P, D), (E, outputs, D), (P, outputs)))
    return x, weight, grad


def results(function, x: Tensor, weight: Tensor, grad: Tensor, ends: Tensor) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
    out = function(*leaves, ends)
    grads = torch.autograd.grad(out, leaves, grad)
    return {"out": out.detach(), "dx": grads[0], "dweight": grads[1]}


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_results_are_as_exact_as_the_definition(ends: list[int], dtype: torch.dtype) -> None:
    inputs, group_ends = random_inputs(dtype), torch.tensor(ends, dtype=torch.int32)
    same_dtype = results(grouped_linear_reference, *inputs, group_ends)
    exact = results(grouped_linear_reference, *(tensor.double() for tensor in inputs), group_ends)
    for name, tensor in results(grouped_linear, *inputs, group_ends).items():
        assert tensor.is_contiguous(), name
        assert_error_bound(tensor, same_dtype[name], exact[name], floor=FLOORS[dtype], name=name)


def test_experts_without_rows_have_zero_gradients() -> None:
    ends = torch.tensor(ENDS["first-and-last-without"], dtype=torch.int32)
    dweight = results(grouped_linear, *random_inputs(torch.float32), ends)["dweight"]
    assert [bool(expert.any()) for expert in dweight] == [False, True, True, True, False]


def test_only_gradients_that_are_asked_for_are_computed_and_their_operands_saved() -> None:
    x, weight, _ = random_inputs(torch.float32)
    ends = torch.tensor(ENDS["all"], dtype=torch.int32)
    one_way = 2 * P * D * F
    for trained in (x, weight):
        saved: list[int] = []
        trained.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda kept: kept):  # type: ignore[func-returns-value]  # noqa: B023
            out = grouped_linear(x, weight, ends)
        other = weight if trained is x else x
        assert set(saved) == {other.data_ptr(), ends.data_ptr()}
        with FlopCounterMode(display=False) as counted:
            out.sum().backward()
        assert counted.get_total_flops() == one_way
        trained.requires_grad_(requires_grad=False)


def test_the_ops_pass_torchs_own_checks() -> None:
    x, weight, grad = random_inputs(torch.float32)
    ends = torch.tensor(ENDS["all"], dtype=torch.int32)
    torch.library.opcheck(OPS.grouped_linear.default, (x.requires_grad_(), weight.requires_grad_(), ends))
    checks = ("test_schema", "test_faketensor")
    strided = torch.randn(F, P).t()
    torch.library.opcheck(OPS.grouped_linear_input_grad.default, (strided, weight.detach(), ends), test_utils=checks)
    torch.library.opcheck(OPS.grouped_linear_weight_grad.default, (grad, x.detach(), ends), test_utils=checks)


def test_torchs_grouped_kernel_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU torch's op runs a loop; operands, their strides and the ends are those of a card."""
    inputs = random_inputs(torch.bfloat16, outputs=16)
    ends = torch.tensor(ENDS["first-and-last-without"], dtype=torch.int32)
    expected = results(grouped_linear, *inputs, ends)
    monkeypatch.setattr(op, "_takes_grouped_mm", lambda *_: True)
    for name, tensor in results(grouped_linear, *inputs, ends).items():
        torch.testing.assert_close(tensor, expected[name], msg=name)


@pytest.mark.parametrize(
    ("x", "weight", "ends"),
    [
        (torch.ones(4, 3), torch.ones(2, 5, 4), torch.ones(2, dtype=torch.int32)),
        (torch.ones(4, 3), torch.ones(2, 5, 3), torch.ones(3, dtype=torch.int32)),
        (torch.ones(4, 3), torch.ones(2, 5, 3), torch.ones(2, dtype=torch.int64)),
        (torch.ones(4, 3), torch.ones(2, 5, 3).half(), torch.ones(2, dtype=torch.int32)),
        (torch.ones(4, 3), torch.ones(2, 5, 3), torch.ones(2, dtype=torch.int32, device="meta")),
    ],
    ids=["width", "ends", "ends-dtype", "dtypes", "device"],
)
def test_other_inputs_are_refused(x: Tensor, weight: Tensor, ends: Tensor) -> None:
    with pytest.raises(ValueError, match=r"grouped_linear: x, weight and group_ends are .*; allowed: \(P, D\)"):
        grouped_linear(x, weight, ends)
