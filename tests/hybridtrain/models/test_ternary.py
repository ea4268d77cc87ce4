"""BitNet b1.58: values, straight-through gradients, and training that learns."""

import pytest
import torch
from torch.nn import functional

from hybridtrain.models.ternary import int8_activation, ternary_linear, ternary_weight
from hybridtrain.optimizations import Bitnet, GradAccumulation, GradientCheckpointing, Lora, WeightStreaming
from hybridtrain.plan.compose import compose
from tiny_models import LLAMA_GROUPED, random_steps
from training_history import fresh_trainer, trained_history


def test_a_weight_has_three_values_spread_by_its_mean_magnitude() -> None:
    weight = torch.randn(40, 30)
    found = ternary_weight(weight)
    gamma = weight.abs().mean()
    assert set(found.div(gamma).round().unique().tolist()) == {-1.0, 0.0, 1.0}
    assert torch.equal(found != 0, weight.abs() > gamma / 2)  # round half to even: exactly a half is 0
    assert torch.equal(ternary_weight(torch.zeros(3, 3)), torch.zeros(3, 3))


def test_an_activation_is_within_half_a_step() -> None:
    x = torch.randn(5, 64)
    steps = x.abs().amax(-1, keepdim=True) / 127
    assert ((int8_activation(x) - x).abs() <= steps * 0.5001).all()  # the product is rounded itself


@pytest.mark.parametrize("computes_output", [True, False])
def test_gradients_pass_the_rounding(*, computes_output: bool) -> None:
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((6, 8), (5, 8), (5,)))
    out = ternary_linear(x, weight, bias, computes_output=computes_output)
    x_through = x + (int8_activation(x) - x).detach()
    weight_through = weight + (ternary_weight(weight) - weight).detach()
    expected = functional.linear(x_through, weight_through, bias)
    grad = torch.randn(6, 5)
    if computes_output:
        torch.testing.assert_close(out, expected)
    actual = torch.autograd.grad(out, (x, weight, bias), grad)
    for found, wanted in zip(actual, torch.autograd.grad(expected, (x, weight, bias), grad), strict=True):
        torch.testing.assert_close(found, wanted)


def test_recomputed_and_streamed_training_is_the_resident_one() -> None:
    accumulates = GradAccumulation(grad_accum_steps=2, schedule="vertical")
    plain = trained_history(LLAMA_GROUPED, [Bitnet(), accumulates], 2)
    away = trained_history(
        LLAMA_GROUPED, [Bitnet(), accumulates, GradientCheckpointing(recompute_every=2), WeightStreaming()], 2
    )
    assert plain.losses == away.losses
    assert plain.losses != trained_history(LLAMA_GROUPED, [accumulates], 2).losses
    for name, weight in plain.weights.items():
        assert torch.equal(weight, away.weights[name]), name


def test_it_learns_one_batch() -> None:
    trainer = fresh_trainer(LLAMA_GROUPED, [Bitnet()])
    (batches,) = random_steps(LLAMA_GROUPED, 1)
    losses = [trainer.step(batches, lr_factor=100.0).loss for _ in range(30)]
    assert losses[-1] < losses[0] - 0.5


def test_frozen_matrices_cannot_learn_three_values() -> None:
    with pytest.raises(ValueError, match="bitnet trains the matrices, which"):
        compose([Bitnet(), Lora()])
