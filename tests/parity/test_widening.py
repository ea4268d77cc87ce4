"""Codes that are widened matrix by matrix train as those of whole blocks do, to the bit, in less memory."""

import pytest

from hybridtrain.memory.transfer import VirtualTransfer
from hybridtrain.models.model_config import ModelConfig, block_shapes
from hybridtrain.optimizations import (
    GradAccumulation,
    GradientCheckpointing,
    Int8Weights,
    Lora,
    MixedPrecision,
    Nf4Weights,
    WeightStreaming,
)
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import WidenBy
from hybridtrain.planning.dry_runs import record_steps
from hybridtrain.virtual_gpu.account.ledger import holders
from numerics import assert_bitwise
from tiny_models import FAMILIES, GPT2_TIED_DROPOUT, LLAMA_GROUPED, random_steps
from training_history import trained_history

LORA = Lora(rank=3, alpha=5.0, dropout=0.0)
TWICE = GradAccumulation(grad_accum_steps=2)
RECOMPUTED = [GradientCheckpointing(recompute_every=2), GradAccumulation(grad_accum_steps=2, schedule="vertical")]
WAYS: dict[str, tuple[ModelConfig, type[Int8Weights | Nf4Weights], list[Optimization]]] = {
    "trained-int8": (LLAMA_GROUPED, Int8Weights, [MixedPrecision(master="absent"), *RECOMPUTED]),
    "trained-int8-streamed": (GPT2_TIED_DROPOUT, Int8Weights, [WeightStreaming(max_active_layers=1), TWICE]),
    "dora": (LLAMA_GROUPED, Nf4Weights, [Lora(rank=3, magnitude=True), MixedPrecision(), TWICE]),
    "some-matrices": (LLAMA_GROUPED, Nf4Weights, [Lora(rank=3, targets=("query",)), *RECOMPUTED]),
    "experts": (
        FAMILIES["mixtral"],
        Nf4Weights,
        [Lora(rank=3, targets=("attention",)), WeightStreaming(), *RECOMPUTED],
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_how_much_is_widened_at_a_time_changes_no_bit(way: str) -> None:
    config, codes, stack = WAYS[way]
    by_block = trained_history(config, [codes(widen_by=WidenBy.BLOCK), *stack], 2)
    by_matrix = trained_history(config, [codes(widen_by=WidenBy.MATRIX), *stack], 2)
    assert by_matrix.losses == by_block.losses
    for name, weight in by_block.weights.items():
        assert_bitwise(by_matrix.weights[name], weight, name)


def test_one_matrix_has_values_at_a_time() -> None:
    plan = compose([LORA, Nf4Weights()])
    trace = record_steps(LLAMA_GROUPED, plan, random_steps(LLAMA_GROUPED, 1), VirtualTransfer())
    _, by_unit = holders(trace, len(trace.events) - 1)
    values = {unit: size for (_, unit), size in by_unit.items() if unit.startswith("values.")}
    largest = max(shape[0] * shape[1] for shape in block_shapes(LLAMA_GROUPED).values() if len(shape) > 1)
    assert values == {"values.0": 4 * largest}


def test_a_plan_tells_how() -> None:
    assert [compose([LORA, codes]).phases.popitem()[1].widen_by for codes in (Nf4Weights(), Int8Weights())] == [
        WidenBy.MATRIX,
        WidenBy.BLOCK,
    ]
