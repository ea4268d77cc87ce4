"""The Triton kernel in Triton's interpreter, against torch's cross entropy in float64."""

import pytest
import torch
from torch import Tensor

from hybridkernels.linear_cross_entropy.triton_kernel import BLOCK, cross_entropy_grad_triton
from numerics import assert_error_bound
from token_losses import torchs_results

FLOORS = {torch.float32: 2e-6, torch.float16: 1e-3}
"""Some roundings of the type, for cases where torch happens to be exact; gradients are at most 1 in size."""
SHAPES = ((1, 1), (2, 7), (3, BLOCK - 1), (2, BLOCK), (2, BLOCK + 1), (1, 2 * BLOCK + 100))
GUARD = 9.0


def case(num_tokens: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return a guarded buffer, the logits within it, and targets."""
    generator = torch.Generator().manual_seed(vocab)
    buffer = torch.full((num_tokens + 2, vocab + 13), GUARD, dtype=dtype)
    logits = buffer[1:-1, 5 : 5 + vocab]
    logits.copy_(torch.randn(num_tokens, vocab, generator=generator) * 4)
    return buffer, logits, torch.randint(vocab, (num_tokens,), generator=generator)


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_losses_and_gradients_are_as_exact_as_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    buffer, logits, targets = case(*shape, dtype)
    same_dtype, exact = (torchs_results(work.clone(), targets, 0.25) for work in (logits, logits.double()))
    losses = cross_entropy_grad_triton(logits, targets, 0.25)
    floor = FLOORS[torch.float32] * max(1.0, exact[0].abs().max().item())
    assert_error_bound(losses, same_dtype[0], exact[0], floor=floor, name="losses")
    assert_error_bound(logits, same_dtype[1], exact[1], floor=FLOORS[dtype] * 0.25, name="gradient")
    logits.fill_(GUARD)
    assert (buffer == GUARD).all(), "written outside of the logits"


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("vocab", [7, BLOCK + 100])
def test_ignored_targets_and_a_soft_cap_are_as_exact_as_torch(vocab: int, softcap: float, dtype: torch.dtype) -> None:
    buffer, logits, targets = case(4, vocab, dtype)
    targets[::2] = -100
    same_dtype, exact = (torchs_results(work.clone(), targets, 0.25, softcap) for work in (logits, logits.double()))
    losses = cross_entropy_grad_triton(logits, targets, 0.25, softcap, ignores=True)
    # tanh is of exponentials, exact to some roundings of 1: the cap multiplies them.
    floor = FLOORS[torch.float32] * max(1.0, exact[0].abs().max().item(), softcap)
    assert_error_bound(losses, same_dtype[0], exact[0], floor=floor, name="losses")
    assert_error_bound(logits, same_dtype[1], exact[1], floor=FLOORS[dtype] * 0.25 * max(1.0, softcap), name="gradient")
    assert not losses[::2].any()
    assert not logits[::2].any()
    logits.fill_(GUARD)
    assert (buffer == GUARD).all(), "written outside of the logits"


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's numpy; a card has no such
def test_extreme_logits_stay_finite_and_faults_stay_visible() -> None:
    largest = torch.finfo(torch.float32).max
    rows = [[largest, -largest, 0.0], [1e30, 1e30, -1e30], [-torch.inf, 0.0, 1.0], [torch.nan, 0.0, 1.0]]
    logits, targets = torch.tensor(rows), torch.tensor([0, 1, 2, 2])
    exact = torchs_results(logits[:3].double(), targets[:3], 1.0)
    losses = cross_entropy_grad_triton(logits, targets, 1.0)
    torch.testing.assert_close(losses[:3].double(), exact[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits[:3].double(), exact[1], rtol=1e-6, atol=1e-7)
    assert losses[3].isnan()
    assert logits[3].isnan().all()


def test_a_whole_block_of_masked_logits_counts_for_nothing() -> None:
    logits = torch.full((1, BLOCK + 3), -torch.inf)
    logits[0, BLOCK:] = torch.tensor([0.0, 1.0, 2.0])
    exact = torchs_results(logits.double(), torch.tensor([BLOCK + 1]), 1.0)
    losses = cross_entropy_grad_triton(logits, torch.tensor([BLOCK + 1]), 1.0)
    torch.testing.assert_close(losses.double(), exact[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.double(), exact[1], rtol=1e-6, atol=1e-7)


def test_no_token_gives_no_loss() -> None:
    assert cross_entropy_grad_triton(torch.empty(0, 5), torch.empty(0, dtype=torch.int64), 1.0).shape == (0,)
