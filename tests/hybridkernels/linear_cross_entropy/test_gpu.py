"""The kernel on a real card, against torch's cross entropy in float64."""

import pytest
import torch
from torch.nn import functional

from hybridkernels.linear_cross_entropy import linear_cross_entropy
from hybridkernels.provider import use_provider
from numerics import assert_error_bound

BLOCK = 4096
"""Of the kernel."""
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]

FLOORS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("vocab", [1, 1000, BLOCK, 50257])
@pytest.mark.parametrize("provider", ["triton", "torch"])
def test_loss_and_gradients_are_as_exact_as_torch_on_it(dtype: torch.dtype, vocab: int, provider: str) -> None:
    hidden, weight = (torch.randn(rows, 64, device="cuda").to(dtype).requires_grad_() for rows in (70, vocab))
    targets = torch.randint(vocab, (70,), device="cuda")
    with use_provider("linear_cross_entropy", provider):
        loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=32)
    ours = (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))
    others = []
    for leaves in ((hidden, weight), tuple(leaf.detach().double().requires_grad_() for leaf in (hidden, weight))):
        logits = functional.linear(*leaves)
        whole = functional.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets)
        others.append((whole.detach(), *torch.autograd.grad(whole, leaves)))
    for name, actual, torchs, exact in zip(("loss", "hidden", "weight"), ours, *others, strict=True):
        floor = 3 * FLOORS[dtype] * max(exact.abs().max().item(), 1e-3)  # three slices are summed in the dtype
        assert_error_bound(actual, torchs, exact, floor=floor, name=name)
