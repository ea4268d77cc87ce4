"""8-bit products in plans: their rate by card and format, options of the search, and cards that have none."""

import pytest

from hybridtrain.errors import ConfigError
from hybridtrain.models.model_config import PRESETS, Workload
from hybridtrain.optimizations import (
    ChunkedLoss,
    GradientCheckpointing,
    Int8Weights,
    Lora,
    LowBitMatmul,
    MixedPrecision,
)
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import DynamicRange
from hybridtrain.planning.candidates import FitRequest
from hybridtrain.planning.dry_runs import DryRun, dry_run
from hybridtrain.planning.fitting import METHODS, best_option, fit, precisions, speed
from hybridtrain.reports.fit_arguments import FitArguments
from hybridtrain.virtual_gpu.cards.card import Host, find_card

PLAIN = [MixedPrecision(), GradientCheckpointing(recompute_every=1), ChunkedLoss(loss_chunk_tokens=1024)]


def planned(card: str, *more: Optimization) -> DryRun:
    workload = Workload(micro_batch_size=2, seq_len=1024)
    return dry_run(PRESETS["llama-3.2-1b"], compose([*PLAIN, *more]), find_card(card), workload)


def test_int8_is_faster_than_float8_on_a_geforce_card_and_both_than_bfloat16() -> None:
    plain, float8, int8 = (planned("rtx-4090", *more) for more in ([], [LowBitMatmul()], [LowBitMatmul(format="int8")]))
    assert int8.time.seconds < float8.time.seconds < plain.time.seconds
    assert float8.time.flops == int8.time.flops == plain.time.flops
    products = [op for op in int8.trace.ops if "scaled_matmul" in op.name]
    assert {op.dtype for op in products} == {"int8"}
    blocks = PRESETS["llama-3.2-1b"].num_blocks
    assert len(products) == 2 * (7 + 6 + 14) * blocks  # forward, recomputed without the last output, backward
    assert all(op.shape is not None and 2 * op.shape[0] * op.shape[1] * op.shape[2] == op.flops for op in products)


@pytest.mark.parametrize(("card", "kind", "allowed"), [
    ("rtx-3090", "float8", "int8"), ("v100-16gb", "int8", "none; drop it"),
])  # fmt: skip
def test_a_card_without_the_format_is_refused(card: str, kind: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"multiplies no {kind}; allowed: {allowed}"):
        planned(card, LowBitMatmul(format=kind))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"(?s)--matmul.*multiplies no {kind}; allowed: {allowed}"):
        FitArguments(model="llama-7b", card=card, matmul=kind).resolve()  # type: ignore[arg-type]


def test_every_precision_of_the_search_may_multiply_in_8_bits() -> None:
    low_bit = {level.name: level for _, level in precisions(METHODS, "float8")}
    assert set(low_bit) == {f"{plain.name}_float8-matmuls" for _, plain in precisions(METHODS)}
    for _, plain in precisions(METHODS):
        assert compose(low_bit[f"{plain.name}_float8-matmuls"].optimizations) != compose(plain.optimizations)


def test_lora_also_multiplies_8_bit_weights_as_they_are_stored() -> None:
    names = [level.name for _, level in precisions(["lora"], "int8")]
    assert names == ["lora_int8-matmuls", "lora-int8_int8-matmuls"]
    request = FitRequest(
        model=PRESETS["llama-3.2-1b"], card=find_card("rtx-4090"), host=Host(), seq_len=1024, num_sequences=4,
        matmul="int8",
    )  # fmt: skip
    by_name = {option.candidate.level.name: option for option in fit(request, methods=["lora"])}
    of_values, of_codes = (by_name[name] for name in names)
    assert of_codes.device_bytes < of_values.device_bytes
    assert speed(of_codes) > speed(of_values)
    assert best_option([of_values, of_codes]) is not None


def test_codes_by_row_are_multiplied_without_dequantizing_them() -> None:
    rows, products = Int8Weights(dynamic_range=DynamicRange.ROW), LowBitMatmul(format="int8")
    values, codes = planned("rtx-4090", products, Lora()), planned("rtx-4090", rows, products, Lora())
    products_of, rounded = (
        [sum(name in op.name for op in run.trace.ops) for run in (values, codes)]
        for name in ("scaled_matmul", "quantize_rows")
    )
    assert products_of[0] == products_of[1]
    # Each product rounds what it multiplies with the weight; the weight itself once, when it gets its first values.
    first = 7 * PRESETS["llama-3.2-1b"].num_blocks
    assert rounded == [2 * products_of[0], products_of[1] + first]
    assert codes.device_used_bytes < values.device_used_bytes
