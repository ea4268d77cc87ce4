"""Cross entropy that becomes its own gradient, against plain torch in float64, on the CPU and by shape alone."""

import re

import pytest
import torch
from torch import Tensor

from hybridkernels.linear_cross_entropy import cross_entropy_grad_, op, padded_vocab
from hybridkernels.linear_cross_entropy.op import cross_entropy_grad_plain
from hybridkernels.linear_cross_entropy.reference import cross_entropy_grad_reference
from numerics import assert_error_bound
from token_losses import torchs_results

FLOORS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Some roundings of the work's type, for cases where torch happens to be exact; gradients are at most 1 in size."""
SHAPES = ((1, 1), (1, 7), (3, 64), (5, 1000), (37, 513))


def random_case(num_tokens: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens * 100_003 + vocab)
    logits = (torch.randn(num_tokens, vocab, generator=generator) * 4).to(dtype)
    return logits, torch.randint(vocab, (num_tokens,), generator=generator)


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_losses_and_gradients_are_as_exact_as_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits, targets = random_case(*shape, dtype)
    same_dtype, exact = (torchs_results(work, targets, 0.25) for work in (logits, logits.double()))
    losses = cross_entropy_grad_(logits, targets, 0.25)
    assert losses.dtype == torch.float32
    assert_error_bound(losses, same_dtype[0], exact[0], floor=FLOORS[torch.float32] * exact[0].abs().max().item())
    assert_error_bound(logits, same_dtype[1], exact[1], floor=FLOORS[dtype] * 0.25)


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_ignored_targets_and_a_soft_cap_are_as_exact_as_torch(softcap: float, dtype: torch.dtype) -> None:
    logits, targets = random_case(9, 130, dtype)
    targets[::2] = -100
    same_dtype, exact = (torchs_results(work, targets, 0.25, softcap) for work in (logits, logits.double()))
    losses = cross_entropy_grad_(logits, targets, 0.25, softcap=softcap, ignores=True)
    assert not losses[::2].any()
    assert not logits[::2].any()
    assert_error_bound(losses, same_dtype[0], exact[0], floor=FLOORS[torch.float32] * exact[0].abs().max().item())
    assert_error_bound(logits, same_dtype[1], exact[1], floor=FLOORS[dtype] * 0.25)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_the_reference_is_torchs_cross_entropy(softcap: float) -> None:
    logits, targets = random_case(6, 50, torch.float64)
    targets[2] = -100
    for actual, expected in zip(
        cross_entropy_grad_reference(logits, targets, 0.5, softcap),
        torchs_results(logits, targets, 0.5, softcap),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_in_a_wider_buffer_are_the_only_ones_written(dtype: torch.dtype) -> None:
    logits, targets = random_case(5, 100, dtype)
    buffer = torch.full((7, padded_vocab(100)), 9.0, dtype=dtype)
    view = buffer[1:6, :100]
    view.copy_(logits)
    assert torch.equal(cross_entropy_grad_(view, targets, 1.0), cross_entropy_grad_(logits, targets, 1.0))
    assert torch.equal(view, logits)
    assert (buffer[:, 100:] == 9.0).all()
    assert (buffer[[0, 6]] == 9.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_taken_in_blocks_are_the_rows_taken_alone(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = random_case(11, 96, dtype)
    whole, pieces = logits.clone(), logits.clone()
    expected = cross_entropy_grad_plain(whole, targets, 0.1)
    monkeypatch.setitem(op._BLOCK_ELEMENTS, "cpu", 4 * 96)
    assert torch.equal(cross_entropy_grad_plain(pieces, targets, 0.1), expected)
    assert torch.equal(pieces, whole)


def test_extreme_logits_stay_finite_and_faults_stay_visible() -> None:
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor(
        [[largest, -largest, 0.0], [1e30, 1e30, -1e30], [-torch.inf, 0.0, 1.0], [torch.nan, 0.0, 1.0]]
    )
    targets = torch.tensor([0, 1, 2, 2])
    exact = torchs_results(logits[:3].double(), targets[:3], 1.0)
    losses = cross_entropy_grad_(logits, targets, 1.0)
    torch.testing.assert_close(losses[:3].double(), exact[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits[:3].double(), exact[1], rtol=1e-6, atol=1e-7)
    assert losses[3].isnan()
    assert logits[3].isnan().all()


def test_no_token_gives_no_loss() -> None:
    assert cross_entropy_grad_(torch.empty(0, 5), torch.empty(0, dtype=torch.int64), 1.0).shape == (0,)


def test_the_op_keeps_torchs_rules() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits, targets = random_case(3, 20, dtype)
        torch.library.opcheck(torch.ops.hybridkernels.cross_entropy_grad_.default, (logits, targets, 0.5))


def test_on_meta_tensors_only_shapes_are_made() -> None:
    logits = torch.empty(4, 9, dtype=torch.bfloat16, device="meta")
    losses = cross_entropy_grad_(logits, torch.empty(4, dtype=torch.int64, device="meta"), 1.0)
    assert (losses.shape, losses.dtype, losses.device.type) == ((4,), torch.float32, "meta")


@pytest.mark.parametrize(
    ("logits", "targets"),
    [
        (torch.ones(2, 3, 4), torch.zeros(2, dtype=torch.int64)),
        (torch.ones(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)),
        (torch.ones(2, 3), torch.zeros(3, dtype=torch.int64)),
        (torch.ones(2, 3), torch.zeros(2)),
        (torch.ones(3, 2).t(), torch.zeros(2, dtype=torch.int64)),
    ],
    ids=["three-axes", "integers", "length", "float-targets", "strided-rows"],
)
def test_other_inputs_are_refused(logits: Tensor, targets: Tensor) -> None:
    before = logits.clone()
    with pytest.raises(ValueError, match=rf"logits are {re.escape(str(logits.dtype))} .*allowed: .*flatten or convert"):
        cross_entropy_grad_(logits, targets, 1.0)
    assert torch.equal(logits, before)
