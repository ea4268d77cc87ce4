"""What a run tells of element types: casts by phase, and which type suits card and gradients."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridtrain.data.corpus import open_corpus
from hybridtrain.engine.loss_scale import LossScale
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.models.model_config import BatchWorkload
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.optimizations import (
    FusedUpdate,
    GradAccumulation,
    Int8Weights,
    MixedPrecision,
    OptimizerOffload,
    PredictorState,
    WeightStreaming,
)
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.run.precision import overflow_advice, precision_advice
from hybridtrain.run.train import TrainResult, train
from hybridtrain.trainer_config import LrSchedule
from hybridtrain.training_file import TrainFile
from tiny_models import GPT2_UNTIED

SHAPE = replace(GPT2_UNTIED, vocab_size=256)
NUM_STEPS = 3
DOWN, UP, HALF = "float32 to bfloat16", "bfloat16 to float32", "float32 to float16"


@pytest.fixture(autouse=True)
def _no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def trained(stack: Sequence[Optimization], folder: Path, hybrid: HybridConfig | None = None) -> tuple[TrainResult, str]:
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    file = TrainFile(
        model=ModelSpec(shape=SHAPE), workload=BatchWorkload(batch_size=4, seq_len=16), optimizations=tuple(stack),
        num_steps=NUM_STEPS, sample_tokens=0, hybrid=hybrid, schedule=LrSchedule(warmup_steps=1, total_steps=20),
    )  # fmt: skip
    said: list[str] = []
    corpus = open_corpus(text, vocab_size=256)
    return train(file, corpus, folder / "run", resume=False, say=said.append, progress=False), "\n".join(said)


MIXED = MixedPrecision()
STEPS: dict[str, tuple[list[Optimization], dict[str, int]]] = {
    "fp32": ([], {}),
    "mixed": ([MIXED], {DOWN: 2, UP: 4}),  # bytes per parameter and step: weights written, gradients widened
    "sums in float32": ([MIXED, GradAccumulation()], {DOWN: 2, UP: 4 * 4}),
    "no master": ([MixedPrecision(master="absent")], {DOWN: 2, UP: 4 + 4}),  # the weight is widened too
    "on the host": ([MIXED, OptimizerOffload(update_on="host")], {DOWN: 2, UP: 4}),
    "streamed": ([MIXED, OptimizerOffload(), WeightStreaming()], {DOWN: 2, UP: 4}),
    "fused": ([MIXED, FusedUpdate()], {DOWN: 2, UP: 4}),
}


@pytest.mark.parametrize("name", STEPS)
def test_casts_of_a_step_are_those_of_weights_and_gradients(name: str, tmp_path: Path) -> None:
    stack, expected = STEPS[name]
    result, said = trained(stack, tmp_path)
    found = {types: told["bytes"] for types, told in result.casts.as_mapping().get("full", {}).items()}
    assert found == {types: size * NUM_STEPS * SHAPE.num_params for types, size in expected.items()}
    assert ("casts in full: " in said) is bool(expected) is ("casts" in result.as_mapping())
    assert "precision: " not in said


def test_each_phase_has_its_own_casts(tmp_path: Path) -> None:
    stack = [MixedPrecision(active_phases=(Phase.PREDICT,), compute_dtype="float16"), PredictorState()]
    hybrid = HybridConfig(warmup_steps=1, full_steps=1, fuse=False)
    result, said = trained(stack, tmp_path, hybrid)
    found = result.casts.as_mapping()
    assert set(found) == {"predict"}  # float32 comes back from its copy
    jumps, size = result.statistics.steps_by_phase["predict"], 2 * SHAPE.num_params  # type: ignore[union-attr]
    assert jumps > 0
    assert found["predict"][HALF]["bytes"] == 2 * jumps * size  # when it begins, and after the jump
    assert f"casts in predict: {found['predict'][HALF]['count']:,} {HALF} (" in said


def test_codes_are_a_type_too(tmp_path: Path) -> None:
    result, _ = trained([Int8Weights(master="float32")], tmp_path)
    assert set(result.casts.as_mapping()["full"]) == {"float32 to int8"}


HALVES = MixedPrecision(compute_dtype="float16")
ADVICE: dict[tuple[str, tuple[int, int] | None], str] = {
    ("fp32", (9, 0)): "compute_dtype = 'bfloat16'",
    ("fp32", (7, 5)): "compute_dtype = 'float16'",
    ("fp32", (6, 1)): "",
    ("fp32", None): "",
    ("bf16", (7, 5)): "(compute capability 7.5) has no bfloat16 tensor cores, which need 8.0; set",
    ("bf16", (8, 0)): "",
    ("bf16", None): "",
    ("fp16", (7, 5)): "",
    ("predict", (7, 0)): "has no bfloat16 tensor cores,",
}
BY_NAME: dict[str, list[Optimization]] = {
    "fp32": [], "bf16": [MIXED], "fp16": [HALVES], "predict": [MixedPrecision(active_phases=(Phase.PREDICT,))],
}  # fmt: skip


@pytest.mark.parametrize("case", ADVICE, ids=str)
def test_a_type_that_suits_the_card_is_recommended(case: tuple[str, tuple[int, int] | None]) -> None:
    told = list(precision_advice(compose(BY_NAME[case[0]]), case[1]))
    assert len(told) == bool(ADVICE[case])
    assert all(ADVICE[case] in line for line in told)


def test_gradients_that_overflow_call_for_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = LossScale()
    assert not list(overflow_advice(scale, (8, 6)))
    for _ in range(3):
        scale.overflowed()
    assert "overflowed 3 times" in next(overflow_advice(scale, (8, 6)))
    assert not list(overflow_advice(scale, (7, 5)))  # there is no bfloat16
    assert not list(overflow_advice(None, None))
    monkeypatch.setattr("hybridtrain.trainer.LossScale", lambda: LossScale(2.0**40))
    _, said = trained([HALVES], tmp_path)
    assert "precision: float16 gradients overflowed " in said
