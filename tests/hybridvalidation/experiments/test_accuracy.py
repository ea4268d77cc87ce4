from dataclasses import replace

import pytest

from hybridtrain.data.corpus import embedded_corpus
from hybridtrain.errors import DataError
from hybridtrain.optimizations.grad_accumulation import GradAccumulation
from hybridtrain.optimizations.gradient_checkpointing import GradientCheckpointing
from hybridtrain.optimizations.mixed_precision import MixedPrecision
from hybridtrain.plan.compose import Optimization, compose
from hybridvalidation.experiments import accuracy
from hybridvalidation.experiments.accuracy import accumulation_difference
from hybridvalidation.scenario import AccuracySpec
from tiny_models import GPT2_TIED_DROPOUT, LLAMA_GROUPED

CORPUS = embedded_corpus()
SPEC = AccuracySpec(
    proxy=replace(LLAMA_GROUPED, vocab_size=256), seeds=(3, 4, 5), num_steps=8, batch_size=4, seq_len=32, lr=1e-3,
    validation_batches=1,
)  # fmt: skip
ORDER_OF_SUMS = 1e-6
"""fp32 sums in another order: 2**-24 a step, carried on by eight updates."""


def difference(*optimizations: Optimization, spec: AccuracySpec = SPEC) -> float | None:
    return accumulation_difference(spec, compose(optimizations), CORPUS)


@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
def test_accumulation_ends_where_the_large_batch_ends(schedule: str) -> None:
    found = difference(
        GradAccumulation(grad_accum_steps=4, schedule=schedule), GradientCheckpointing(recompute_every=2)
    )  # type: ignore[arg-type]
    assert found is not None
    assert found < ORDER_OF_SUMS


def test_dropout_does_not_hide_it() -> None:
    spec = replace(SPEC, proxy=replace(GPT2_TIED_DROPOUT, vocab_size=256))
    found = difference(GradAccumulation(grad_accum_steps=2), spec=spec)
    assert found is not None
    assert found < ORDER_OF_SUMS


def test_a_batch_of_other_sequences_ends_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = accuracy._joined
    monkeypatch.setattr(accuracy, "_joined", lambda batches: joined(batches[:-1]))
    found = difference(GradAccumulation(grad_accum_steps=4))
    assert found is not None
    assert found > 1000 * ORDER_OF_SUMS


@pytest.mark.parametrize(
    "stack",
    [(), (GradAccumulation(grad_accum_steps=1),), (GradAccumulation(grad_accum_steps=4), MixedPrecision())],
    ids=["off", "one", "bf16"],
)
def test_without_fp32_accumulation_there_is_nothing_to_compare(stack: tuple[Optimization, ...]) -> None:
    assert difference(*stack) is None


def test_more_validation_batches_than_the_corpus_holds_are_refused() -> None:
    short = replace(CORPUS, validation=CORPUS.validation[: 2 * SPEC.batch_size * SPEC.seq_len + 1])
    assert len(list(accuracy._windows(replace(SPEC, validation_batches=2), short))) == 2
    with pytest.raises(DataError, match="validation_batches: 3 requested, but embedded has 2"):
        list(accuracy._windows(replace(SPEC, validation_batches=3), short))
