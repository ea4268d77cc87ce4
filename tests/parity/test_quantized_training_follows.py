"""Training with rounded storage ends where plain fp32 training does: real text, paired by seed."""

from collections.abc import Sequence
from functools import cache
from statistics import fmean

import pytest
import torch
from torch import Tensor

from hybridtrain.data.batches import BatchSampler
from hybridtrain.data.corpus import Corpus, embedded_corpus
from hybridtrain.memory import formats
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations import Bf16Optimizer, Int8Optimizer, Int8Weights, MixedPrecision
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
from hybridtrain.units import MIB
from stacks import ADAFACTOR, settings_of

MODEL = ModelConfig(
    family="gpt2", vocab_size=257, max_seq_len=32, num_blocks=3, width=64, num_heads=4, num_kv_heads=4, ffn_width=128
)

NUM_STEPS, LAST_STEPS, BATCH_SIZE, SEQ_LEN = 200, 40, 2, 32
SEEDS = (0, 1, 2)
LR = 1e-3
"""At 3e-3 training is so unsteady that any change of the last bits moves the end by up to 0.1."""
NO_MASTER = MixedPrecision(master="absent")
ROUNDED: dict[str, list[Optimization]] = {
    "int8-weights-trained": [NO_MASTER, Int8Weights()],
    "int8-weights-of-a-master": [Int8Weights()],
    "bf16-weights-and-moments": [NO_MASTER, Bf16Optimizer()],
    "bf16-weights-int8-moments": [NO_MASTER, Int8Optimizer()],
}
SEED_OF = {name: seed for seed, name in zip((0, 1, 2, 1), ROUNDED, strict=True)}
"""One seed each, all three among them: the band is that of each seed alone, and one seed shows rounding to nearest."""
BAND = 0.015
"""Nats, for each seed. Measured: at most 0.003 over these stacks at their seeds (0.004 over all seeds of 4
blocks, twice the batch, 300 steps), the sum of rounding and of two runs drifting apart after it; four times that,
because another processor sums in another order, one more such draw. The baselines of the three seeds have a standard
deviation of 0.10: unpaired, nothing would show."""
FACTORED_BAND = 0.04
"""Adafactor is another rule, not a rounding of AdamW: no momentum, another second moment. Measured -0.010 and
+0.002 at two seeds (-0.010 to +0.007 with 4 blocks, twice the batch, 300 steps); four times the first."""
LEAST_DROP = 2.0
"""Nats that the baseline must learn from its first loss, ln(257) = 5.55, so that following it means something."""


@cache
def corpus() -> Corpus:
    return embedded_corpus(MIB)


def final_loss(stack: Sequence[Optimization], seed: int) -> float:
    """Train and return the mean training loss of the last steps."""
    config = TrainerConfig(
        optimizer=AdamWConfig(lr=LR), schedule=LrSchedule(warmup_steps=30, total_steps=NUM_STEPS), seed=seed
    )
    trainer = Trainer(MODEL, compose(stack), settings_of(stack, config), DirectTransfer(torch.device("cpu")))
    sampler = BatchSampler(corpus().train, micro_batch_size=BATCH_SIZE, seq_len=SEQ_LEN, seed=seed)
    losses = [trainer.step([sampler.batch(step, 0)]).loss for step in range(NUM_STEPS)]
    return fmean(losses[-LAST_STEPS:])


@cache
def baseline(seed: int) -> float:
    return final_loss([], seed)


def difference(stack: Sequence[Optimization], seed: int) -> float:
    """Return how far a seed ends above the baseline of the same seed."""
    return final_loss(stack, seed) - baseline(seed)


def test_the_baseline_learns_and_its_seeds_differ_by_more_than_a_band() -> None:
    finals = [baseline(seed) for seed in SEEDS]
    first = torch.tensor(float(MODEL.vocab_size)).log().item()
    assert max(finals) < first - LEAST_DROP
    assert max(finals) - min(finals) > FACTORED_BAND  # pairing by seed is what makes these bands possible


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_storage_ends_where_fp32_does(name: str) -> None:
    found = difference(ROUNDED[name], SEED_OF[name])
    assert abs(found) <= BAND
    assert found != 0  # it was rounded at all


def test_adafactor_ends_near_adamw() -> None:
    found = difference([ADAFACTOR], seed=2)
    assert abs(found) <= FACTORED_BAND
    assert found != 0  # it was another rule


def round_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the chance out of stored weights, int8 codes and bfloat16 values alike."""
    quantize = formats.int8_quantize

    def nearest_code(value_P: Tensor, codes_P: Tensor, scales_G: Tensor, **settings: bool) -> None:
        quantize(value_P, codes_P, scales_G, stochastic=False, static=settings.get("static", False))

    def nearest_value(value_P: Tensor, target_P: Tensor) -> None:
        target_P.copy_(value_P)

    monkeypatch.setattr(formats, "int8_quantize", nearest_code)
    monkeypatch.setattr(formats, "round_stochastically", nearest_value)


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("name", ["int8-weights-trained", "bf16-weights-and-moments"])
def test_weights_rounded_to_nearest_leave_the_band(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Updates below half a step of the grid are lost each time. Measured +0.030 to +0.063 over stacks and seeds of
    # 4 blocks, twice the batch, 300 steps; here +0.046 to +0.060.
    round_to_nearest(monkeypatch)
    assert difference(ROUNDED[name], seed=0) > BAND
