"""The head: a loss in slices equals the loss in one piece, gradients included. D width, V vocabulary."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from hybridtrain.models.layers import Head, LayerNorm
from numerics import assert_bitwise, assert_error_bound, largest_error

BATCH_SIZE, SEQ_LEN, WIDTH, VOCAB_SIZE = 2, 17, 36, 101
NUM_TOKENS = BATCH_SIZE * SEQ_LEN
CHUNKS = [1, 7, NUM_TOKENS, NUM_TOKENS + 1, 1000]


@dataclass
class Result:
    """Loss and gradients."""

    loss: Tensor
    hidden: Tensor
    weight: Tensor
    norm: Tensor


class ExactNorm(nn.Module):
    """Layer normalisation in the dtype of its input, float64 included."""

    def __init__(self, norm: LayerNorm) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach().double())
        self.bias = nn.Parameter(norm.bias.detach().double())
        self.eps = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def make_head(dtype: torch.dtype = torch.float32) -> Head:
    norm = LayerNorm(WIDTH, 1e-5, dtype)
    with torch.no_grad():
        norm.weight.normal_(1.0, 0.2)
        norm.bias.normal_(0.0, 0.2)
    return Head(norm, nn.Parameter(torch.randn(VOCAB_SIZE, WIDTH, dtype=dtype)))


def make_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    hidden_BTD = torch.randn(BATCH_SIZE, SEQ_LEN, WIDTH, dtype=dtype)
    return hidden_BTD, torch.randint(0, VOCAB_SIZE, (BATCH_SIZE, SEQ_LEN))


def run(head: Head, hidden_BTD: Tensor, target_ids_BT: Tensor, chunk_tokens: int, scale: float = 1.0) -> Result:
    hidden_BTD = hidden_BTD.detach().requires_grad_()
    loss = head(hidden_BTD, target_ids_BT, chunk_tokens=chunk_tokens)
    inputs = (hidden_BTD, head.weight, head.norm.weight)
    return Result(loss.detach(), *torch.autograd.grad(loss, inputs, torch.full_like(loss, scale)))


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_a_sliced_loss_and_its_gradients_are_as_exact_as_the_whole(chunk_tokens: int) -> None:
    head, inputs = make_head(), make_inputs()
    sliced, whole = run(head, *inputs, chunk_tokens), run(head, *inputs, 0)
    exact_head = Head(ExactNorm(head.norm), nn.Parameter(head.weight.detach().double()))
    hidden_BTD = inputs[0].double().requires_grad_()
    logits = exact_head.logits(hidden_BTD).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, inputs[1].flatten())
    grads = torch.autograd.grad(loss, (hidden_BTD, exact_head.weight, exact_head.norm.weight))
    # Floor: a rounding of float32 at the magnitude of the loss (about 20) and of its gradients (below 1).
    assert_error_bound(sliced.loss, whole.loss, loss, floor=2e-6, name="loss")
    for name, exact in zip(("hidden", "weight", "norm"), grads, strict=True):
        assert_error_bound(getattr(sliced, name), getattr(whole, name), exact, floor=1e-7, name=name)


@pytest.mark.parametrize("chunk_tokens", [7, 1000])
def test_bfloat16_slices_stay_within_twice_the_error_of_the_whole(chunk_tokens: int) -> None:
    head, inputs = make_head(torch.bfloat16), make_inputs(torch.bfloat16)
    sliced, whole = run(head, *inputs, chunk_tokens), run(head, *inputs, 0)
    wide = Head(LayerNorm(WIDTH, 1e-5, torch.float32), nn.Parameter(head.weight.detach().float()))
    wide.norm.load_state_dict(head.norm.state_dict())
    exact = run(wide, inputs[0].float(), inputs[1], 0)
    for name in ("hidden", "weight"):
        # Floor: a rounding of bfloat16 at a magnitude of 0.1. float32 stands for exact: it is 65536 times finer.
        floor = 4e-4
        assert_error_bound(getattr(sliced, name), getattr(whole, name), getattr(exact, name), floor=floor, name=name)
    assert sliced.loss.dtype == torch.float32
    # The logits have a relative rounding of 2**-9 each, at a magnitude of 20; the mean is over 34 tokens.
    assert largest_error(sliced.loss, exact.loss) < 0.05


@pytest.mark.parametrize("chunk_tokens", [0, 7])
def test_a_gradient_by_the_loss_scales_every_gradient(chunk_tokens: int) -> None:
    head, inputs = make_head(), make_inputs()
    once, quarter = run(head, *inputs, chunk_tokens), run(head, *inputs, chunk_tokens, scale=0.25)
    for name in ("hidden", "weight", "norm"):
        assert_bitwise(getattr(quarter, name), getattr(once, name) * 0.25, name)  # a power of two: exact


@pytest.mark.parametrize("chunk_tokens", [0, 7])
def test_a_detached_weight_gets_no_gradient_and_changes_no_other(chunk_tokens: int) -> None:
    head, (hidden_BTD, target_ids_BT) = make_head(), make_inputs()
    expected = run(head, hidden_BTD, target_ids_BT, chunk_tokens)
    leaf = hidden_BTD.detach().requires_grad_()
    loss = head(leaf, target_ids_BT, chunk_tokens=chunk_tokens, weight_VD=head.weight.detach())
    loss.backward()
    assert head.weight.grad is None
    assert_bitwise(leaf.grad, expected.hidden, "hidden")
    assert_bitwise(head.norm.weight.grad, expected.norm, "norm")


@pytest.mark.parametrize("chunk_tokens", [0, 7])
def test_a_detached_hidden_still_gives_the_weights_gradient(chunk_tokens: int) -> None:
    head, (hidden_BTD, target_ids_BT) = make_head(), make_inputs()
    expected = run(head, hidden_BTD, target_ids_BT, chunk_tokens)
    with torch.no_grad():
        normed_BTD = head.norm(hidden_BTD)
    loss = head.projection_loss(normed_BTD, target_ids_BT, chunk_tokens=chunk_tokens, weight_VD=head.weight)
    (grad_VD,) = torch.autograd.grad(loss, head.weight)
    assert_bitwise(grad_VD, expected.weight, "weight")


def test_huge_logits_overflow_neither_loss_nor_gradients() -> None:
    head, (hidden_BTD, target_ids_BT) = make_head(), make_inputs()
    with torch.no_grad():
        head.weight.mul_(1e4)
    result = run(head, hidden_BTD, target_ids_BT, 7)
    assert all(tensor.isfinite().all() for tensor in (result.loss, result.hidden, result.weight))


def test_equal_logits_cost_the_logarithm_of_the_vocabulary() -> None:
    head, (hidden_BTD, target_ids_BT) = make_head(), make_inputs()
    with torch.no_grad():
        head.weight.zero_()
    expected = torch.tensor(float(VOCAB_SIZE)).log()
    # A sum of 34 equal terms in float32.
    torch.testing.assert_close(run(head, hidden_BTD, target_ids_BT, 7).loss, expected, rtol=1e-6, atol=0)
