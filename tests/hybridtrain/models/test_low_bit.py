"""8-bit products in training: values and gradients near the exact ones, and training that learns."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from hybridtrain.errors import PlanConflictError
from hybridtrain.models.low_bit import low_bit_linear
from hybridtrain.optimizations import (
    GradAccumulation,
    GradientCheckpointing,
    Int8Weights,
    Lora,
    LowBitMatmul,
    MixedPrecision,
    OptimizerOffload,
    TiledMlp,
    WeightStreaming,
    Zero,
)
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import DynamicRange, WidenBy
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_codes_are_multiplied_as_they_are(dtype: torch.dtype) -> None:
    codes_FD = torch.randint(-127, 128, (48, 64), dtype=torch.int8)
    scales_F = torch.rand(48) / 127
    scales_F[3] = 0.0
    values_FD = codes_FD.float() * scales_F[:, None]
    x = torch.randn(4, 16, 64, dtype=dtype, requires_grad=True)
    weight = torch.full((48, 64), torch.nan, dtype=dtype, requires_grad=True)  # never read
    out = low_bit_linear(x, weight, None, "int8", (codes_FD, scales_F), computes_output=True)
    grad = torch.randn(4, 16, 48, dtype=dtype)
    grad_x, grad_weight = torch.autograd.grad(out, (x, weight), grad)
    wide = x.detach().float()
    for found, wanted in (
        (out, wide @ values_FD.t()),
        (grad_x, grad.float() @ values_FD),
        (grad_weight, grad.float().view(64, 48).t() @ wide.view(64, 64)),
    ):
        assert found.dtype == dtype
        assert (found - wanted).norm() < 0.03 * wanted.norm()


ROWS = Int8Weights(dynamic_range=DynamicRange.ROW, master="float32")


@pytest.mark.parametrize(
    "others",
    [
        [GradientCheckpointing(recompute_every=2), WeightStreaming()],
        [OptimizerOffload(), GradientCheckpointing(recompute_every=1), TiledMlp(mlp_tile_tokens=3), WeightStreaming()],
        [OptimizerOffload(update_on="host")],
        [MixedPrecision(), WeightStreaming()],
    ],
    ids=["streamed", "tiled", "host", "mixed"],
)
@pytest.mark.parametrize("model", [GPT2_UNTIED, LLAMA_GROUPED])
def test_training_on_stored_codes_is_the_same_anywhere(model: object, others: list[Optimization]) -> None:
    products = [LowBitMatmul(format="int8"), ROWS, GradAccumulation(grad_accum_steps=2, schedule="vertical")]
    # Tiles round gradients by tile, mixed precision to bfloat16: wherever the rest is.
    plain = trained_history(model, [*products, *(o for o in others if isinstance(o, MixedPrecision | TiledMlp))], 2)
    away = trained_history(model, [*products, *others], 2)
    assert plain.losses == away.losses
    for name, weight in plain.weights.items():
        assert torch.equal(weight, away.weights[name]), name


def test_training_on_stored_codes_follows_that_on_values() -> None:
    (batches,) = random_steps(LLAMA_GROUPED, 1)

    def losses(*optimizations: Optimization) -> list[float]:
        trainer = fresh_trainer(LLAMA_GROUPED, [*optimizations])
        return [trainer.step(batches, lr_factor=100.0).loss for _ in range(30)]

    codes, values = losses(LowBitMatmul(format="int8"), ROWS), losses(LowBitMatmul(format="int8"))
    exact = losses()
    assert codes != values
    fall = exact[0] - exact[-1]
    assert fall > 0.5
    assert all(abs(a - b) < 0.05 * fall for a, b in zip(codes, exact, strict=True))


def test_codes_by_row_are_dequantized_where_no_8_bit_product_takes_them() -> None:
    def losses(*optimizations: Optimization) -> list[float]:
        return trained_history(LLAMA_GROUPED, [*optimizations, GradAccumulation(grad_accum_steps=2)], 2).losses

    by_matrix, alone = replace(ROWS, widen_by=WidenBy.MATRIX), losses(ROWS)
    assert losses(by_matrix) == losses(ROWS, LowBitMatmul(format="int8", full_ends=99)) == alone
    assert losses(by_matrix, LowBitMatmul()) == losses(ROWS, LowBitMatmul()) != alone


@pytest.mark.parametrize(
    ("others", "fault"),
    [
        ([Int8Weights(dynamic_range=DynamicRange.ROW, master="absent")], "are rounded from a master"),
        ([replace(ROWS, symmetric=False)], "new symmetric ranges"),
        ([replace(ROWS, static_scales=True)], "new symmetric ranges"),
        ([ROWS, Zero(stage=1)], "cannot share a range"),
    ],
    ids=["no-master", "middles", "static", "zero"],
)
def test_what_codes_by_row_do_not_support_is_refused(others: list[Optimization], fault: str) -> None:
    with pytest.raises(PlanConflictError, match=fault):
        compose(others)


def test_blocks_at_the_ends_stay_as_they_are() -> None:
    everywhere = trained_history(LLAMA_GROUPED, [], 1)
    assert trained_history(LLAMA_GROUPED, [LowBitMatmul(full_ends=99)], 1).losses == everywhere.losses
    some = trained_history(LLAMA_GROUPED, [LowBitMatmul(full_ends=1)], 1)
    assert some.losses != trained_history(LLAMA_GROUPED, [LowBitMatmul()], 1).losses != everywhere.losses


@pytest.mark.parametrize("stored", [[], [Int8Weights(dynamic_range=DynamicRange.ROW)]], ids=["values", "codes"])
def test_adapters_train_beside_a_matrix_in_8_bits(stored: list[Optimization]) -> None:
    trainer = fresh_trainer(LLAMA_GROUPED, [LowBitMatmul(format="int8"), Lora(), *stored])
    (batches,) = random_steps(LLAMA_GROUPED, 1)
    losses = [trainer.step(batches, lr_factor=100.0).loss for _ in range(20)]
    assert losses[-1] < losses[0]
    with pytest.raises(PlanConflictError, match="DoRA measures its matrices in the compute dtype"):
        compose([LowBitMatmul(), Lora(magnitude=True)])
