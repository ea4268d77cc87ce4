"""Projection and loss in slices against the whole: values, gradients, and what is held."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from hybridkernels.linear_cross_entropy import linear_cross_entropy, padded_vocab
from numerics import assert_error_bound

M, D, V = 24, 16, 100
CHUNKS = (1, 7, 24, 1000)
FLOORS = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Relative to the largest element: bfloat16's weight gradient is summed over up to 24 slices in bfloat16."""


def leaves(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(rows, D, generator=generator).to(dtype).requires_grad_() for rows in (M, V))
    return hidden, weight, torch.randint(V, (M,), generator=generator)


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = functional.linear(hidden, weight)
    return functional.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets)


def results(loss: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return loss.detach(), *torch.autograd.grad(loss * 3.0, (hidden, weight))


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_slices_are_as_exact_as_the_whole(dtype: torch.dtype, chunk_tokens: int) -> None:
    hidden, weight, targets = leaves(dtype)
    wide = tuple(tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    exact = results(whole(*wide, targets), *wide)
    same_dtype = results(whole(hidden, weight, targets), hidden, weight)
    sliced = results(linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens), hidden, weight)
    for name, actual, torchs, target in zip(("loss", "hidden", "weight"), sliced, same_dtype, exact, strict=True):
        assert_error_bound(actual, torchs, target, floor=FLOORS[dtype] * target.abs().max().item(), name=name)


def test_no_gradient_depends_on_memory_that_nothing_was_written_to() -> None:
    hidden, weight, targets = leaves(torch.bfloat16)
    torch.use_deterministic_algorithms(True)  # fills what is allocated with NaN
    try:
        loss, *grads = results(linear_cross_entropy(hidden, weight, targets, chunk_tokens=M), hidden, weight)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(bool(tensor.isfinite().all()) for tensor in (loss, *grads))


@pytest.mark.parametrize("chunk_tokens", [5, 24])
def test_gradients_are_those_of_finite_differences(chunk_tokens: int) -> None:
    """By hand: gradcheck takes the gradient of one forward pass several times, which is refused."""
    hidden, weight, targets = leaves(torch.float64)
    grads = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens), [hidden, weight]
    )
    step = 1e-6
    for leaf, grad in zip((hidden, weight), grads, strict=True):
        direction = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        losses = []
        for sign in (1, -1):
            moved = [value + sign * step * direction if value is leaf else value for value in (hidden, weight)]
            losses.append(linear_cross_entropy(*moved, targets, chunk_tokens=chunk_tokens).item())
        assert (losses[0] - losses[1]) / (2 * step) == pytest.approx((grad * direction).sum().item(), rel=1e-7)


def test_only_what_is_asked_for_is_computed() -> None:
    hidden, weight, targets = leaves(torch.float32)
    both = results(linear_cross_entropy(hidden, weight, targets, chunk_tokens=7), hidden, weight)
    with CountMatmuls() as counted:
        loss = linear_cross_entropy(hidden, weight.detach(), targets, chunk_tokens=7)
    (grad,) = torch.autograd.grad(loss * 3.0, hidden)
    assert torch.equal(grad, both[1])
    assert counted.number == 2 * 4
    with torch.no_grad(), CountMatmuls() as counted:
        assert torch.equal(linear_cross_entropy(hidden, weight, targets, chunk_tokens=7), both[0])
    assert counted.number == 4


class CountMatmuls(TorchDispatchMode):
    """Counts matrix products, and the largest tensor that any op returns."""

    number = 0
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        out = func(*args, **(kwargs or {}))
        self.number += func.overloadpacket in {torch.ops.aten.mm, torch.ops.aten.addmm_}
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def test_no_more_than_one_slice_of_logits_exists() -> None:
    hidden, weight, targets = leaves(torch.float32)
    with CountMatmuls() as seen:
        linear_cross_entropy(hidden, weight.detach(), targets, chunk_tokens=4)
    assert seen.largest <= max(4 * padded_vocab(V), weight.numel())


def test_a_second_backward_is_refused() -> None:
    hidden, weight, targets = leaves(torch.float32)
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=8)
    torch.autograd.grad(loss, hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match="was run already; run the forward pass again"):
        torch.autograd.grad(loss, hidden)


def test_without_tokens_the_mean_is_nan_and_gradients_are_zero() -> None:
    hidden = torch.empty(0, D, requires_grad=True)
    weight = torch.ones(V, D, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.empty(0, dtype=torch.int64), chunk_tokens=4)
    assert loss.isnan()
    grads = torch.autograd.grad(loss, (hidden, weight), torch.ones(()))
    assert grads[0].shape == (0, D)
    assert not grads[1].any()


@pytest.mark.parametrize(("vocab", "columns"), [(1, 64), (64, 64), (65, 128), (32000, 32000), (50257, 50304)])
def test_rows_are_padded_to_whole_accesses(vocab: int, columns: int) -> None:
    assert padded_vocab(vocab) == columns


@pytest.mark.parametrize(
    ("shapes", "chunk_tokens"),
    [(((M, D), (V, D + 1), (M,)), 4), (((M, D), (V, D), (M + 1,)), 4), (((2, M, D), (V, D), (M,)), 4),
     (((M, D), (V, D), (M,)), 0)],
    ids=["width", "targets", "axes", "chunk"],
)  # fmt: skip
def test_other_inputs_are_refused(shapes: tuple[tuple[int, ...], ...], chunk_tokens: int) -> None:
    hidden, weight = (torch.ones(shape) for shape in shapes[:2])
    with pytest.raises(ValueError, match=r"linear_cross_entropy: hidden is .* chunk_tokens \d+; allowed: \(M, D\)"):
        linear_cross_entropy(hidden, weight, torch.zeros(shapes[2], dtype=torch.int64), chunk_tokens=chunk_tokens)


def test_two_dtypes_are_refused() -> None:
    hidden, weight, targets = leaves(torch.float32)
    with pytest.raises(ValueError, match="of one dtype"):
        linear_cross_entropy(hidden.bfloat16(), weight, targets, chunk_tokens=4)


def whole_capped(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float) -> Tensor:
    logits = functional.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(softcap * torch.tanh(logits / softcap) if softcap else logits, targets)


@pytest.mark.parametrize("num_targets", [None, M - 6])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_ignored_targets_do_not_count_and_logits_can_be_capped(
    dtype: torch.dtype, softcap: float, num_targets: int | None
) -> None:
    hidden, weight, targets = leaves(dtype)
    targets[[0, 3, 6, 7, 8, 23]] = -100
    wide = tuple(tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    exact = results(whole_capped(*wide, targets, softcap), *wide)
    same_dtype = results(whole_capped(hidden, weight, targets, softcap), hidden, weight)
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=7, softcap=softcap, num_targets=num_targets)
    for name, actual, torchs, target in zip(
        ("loss", "hidden", "weight"), results(loss, hidden, weight), same_dtype, exact, strict=True
    ):
        assert_error_bound(actual, torchs, target, floor=FLOORS[dtype] * target.abs().max().item(), name=name)


def test_where_no_target_counts_loss_and_gradients_are_zero() -> None:
    hidden, weight, targets = leaves(torch.float32)
    loss, *grads = results(
        linear_cross_entropy(hidden, weight, torch.full_like(targets, -100), chunk_tokens=7), hidden, weight
    )
    assert loss == 0
    assert not any(grad.any() for grad in grads)


def test_without_ignored_targets_the_dispatcher_sees_what_it_saw() -> None:
    """Counting the targets is the host's, by whatever way they come: no op more, no tensor more."""
    hidden, weight, targets = leaves(torch.float32)
    seen = []
    for num_targets in (None, M):
        with OpNames() as names:
            linear_cross_entropy(hidden, weight, targets, chunk_tokens=9, num_targets=num_targets)
        seen.append(names.found)
    assert seen[0] == seen[1]
    assert "aten.ne.Scalar" not in seen[0]
    assert seen[0].count("hybridkernels.cross_entropy_grad_.default") == 3


class OpNames(TorchDispatchMode):
    """Collects the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{"softcap": -1.0}, {"num_targets": M + 1}, {"num_targets": -1}], ids=str)
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"softcap is .* of 24; allowed: 0 or above, and from 0 to all"):
        linear_cross_entropy(*leaves(torch.float32), chunk_tokens=4, **options)
