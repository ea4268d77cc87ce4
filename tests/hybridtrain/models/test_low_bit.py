"""8-bit products in training: values and gradients near the exact ones, and training that learns."""

import pytest
import torch
from torch.nn import functional

from hybridtrain.errors import PlanConflictError
from hybridtrain.models.low_bit import low_bit_linear
from hybridtrain.optimizations import GradAccumulation, GradientCheckpointing, Lora, LowBitMatmul, WeightStreaming
from hybridtrain.plan.compose import compose
from tiny_models import GPT2_UNTIED, LLAMA_GROUPED, random_steps
from training_history import fresh_trainer, trained_history

KINDS = pytest.mark.parametrize(("kind", "error"), [("int8", 0.03), ("float8", 0.08)])


@KINDS
@pytest.mark.parametrize("computes_output", [True, False])
def test_values_and_gradients_are_near_the_exact_ones(kind: str, error: float, *, computes_output: bool) -> None:
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((4, 16, 64), (48, 64), (48,)))
    out = low_bit_linear(x, weight, bias, kind=kind, computes_output=computes_output)
    expected = functional.linear(x, weight, bias)
    if computes_output:
        assert (out - expected).norm() < error * expected.norm()
        assert not torch.equal(out, expected)
    grad = torch.randn(4, 16, 48)
    actual = torch.autograd.grad(out, (x, weight, bias), grad)
    for found, wanted in zip(actual, torch.autograd.grad(expected, (x, weight, bias), grad), strict=True):
        assert (found - wanted).norm() < error * wanted.norm()


@pytest.mark.parametrize("model", [GPT2_UNTIED, LLAMA_GROUPED])
def test_recomputed_and_streamed_training_is_the_resident_one(model: object) -> None:
    accumulates = GradAccumulation(grad_accum_steps=2, schedule="vertical")
    plain = trained_history(model, [LowBitMatmul(), accumulates], 2)
    away = trained_history(
        model, [LowBitMatmul(), accumulates, GradientCheckpointing(recompute_every=2), WeightStreaming()], 2
    )
    assert plain.losses == away.losses
    assert plain.losses != trained_history(model, [accumulates], 2).losses
    for name, weight in plain.weights.items():
        assert torch.equal(weight, away.weights[name]), name


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_it_learns_one_batch(kind: str) -> None:
    trainer = fresh_trainer(LLAMA_GROUPED, [LowBitMatmul(format=kind)])
    (batches,) = random_steps(LLAMA_GROUPED, 1)
    losses = [trainer.step(batches, lr_factor=100.0).loss for _ in range(30)]
    assert losses[-1] < losses[0] - 0.5


def test_blocks_at_the_ends_stay_as_they_are() -> None:
    everywhere = trained_history(LLAMA_GROUPED, [], 1)
    assert trained_history(LLAMA_GROUPED, [LowBitMatmul(full_ends=99)], 1).losses == everywhere.losses
    some = trained_history(LLAMA_GROUPED, [LowBitMatmul(full_ends=1)], 1)
    assert some.losses != trained_history(LLAMA_GROUPED, [LowBitMatmul()], 1).losses != everywhere.losses


def test_adapters_train_beside_a_matrix_in_8_bits() -> None:
    trainer = fresh_trainer(LLAMA_GROUPED, [LowBitMatmul(format="int8"), Lora()])
    (batches,) = random_steps(LLAMA_GROUPED, 1)
    losses = [trainer.step(batches, lr_factor=100.0).loss for _ in range(20)]
    assert losses[-1] < losses[0]
    with pytest.raises(PlanConflictError, match="DoRA measures its matrices in the compute dtype"):
        compose([LowBitMatmul(), Lora(magnitude=True)])
