"""What a stack costs in quality: a small model trained for real, on the same batches and seeds as the baseline."""

from collections.abc import Iterator
from statistics import fmean

import torch

from hybridtrain.data.batches import BatchSampler, validation_batches
from hybridtrain.data.corpus import Corpus
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.optim import AdamWConfig
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import MemoryPlan
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
from hybridvalidation.records.record import AccuracyFigures, SeedResult
from hybridvalidation.runs.equivalence import accumulation_difference
from hybridvalidation.scenario import AccuracySpec


def train_proxies(spec: AccuracySpec, plan: MemoryPlan, corpus: Corpus) -> AccuracyFigures:
    """Train the proxy once per seed under ``plan`` on the CPU and validate each; raises ``DivergenceError``."""
    return AccuracyFigures(
        num_params=spec.proxy.num_params,
        num_tokens=spec.num_steps * spec.batch_size * spec.seq_len,
        num_validation_tokens=spec.validation_batches * spec.batch_size * spec.seq_len,
        corpus=corpus.name,
        corpus_digest=corpus.digest,
        seeds=tuple(_train_one(spec, plan, corpus, seed) for seed in spec.seeds),
        accumulation_difference=accumulation_difference(spec, plan, corpus),
    )


def _train_one(spec: AccuracySpec, plan: MemoryPlan, corpus: Corpus, seed: int) -> SeedResult:
    accum_steps = plan.for_phase(Phase.FULL).grad_accum_steps
    config = TrainerConfig(
        optimizer=AdamWConfig(lr=spec.lr),
        schedule=LrSchedule(warmup_steps=spec.num_steps // 10, total_steps=spec.num_steps),
        seed=seed,
    )
    trainer = Trainer(spec.proxy, plan, config, DirectTransfer(torch.device("cpu")))
    sampler = BatchSampler(
        corpus.train, micro_batch_size=spec.batch_size // accum_steps, seq_len=spec.seq_len, seed=seed
    )
    losses = [
        trainer.step([sampler.batch(step, micro_batch) for micro_batch in range(accum_steps)]).loss
        for step in range(spec.num_steps)
    ]
    loss, accuracy = _validate(spec, trainer, corpus)
    return SeedResult(
        seed=seed, validation_loss=loss, validation_accuracy=accuracy,
        final_train_loss=fmean(losses[-max(1, spec.num_steps // 10) :]),
    )  # fmt: skip


def _validate(spec: AccuracySpec, trainer: Trainer, corpus: Corpus) -> tuple[float, float]:
    """Return mean loss in nats per token and top-1 accuracy over the validation windows."""
    trainer.model.eval()
    losses: list[float] = []
    hits: list[float] = []
    for token_ids_BT, target_ids_BT in _windows(spec, corpus):
        logits_MV = trainer.executor.forward(token_ids_BT).flatten(0, 1).float()
        targets_M = target_ids_BT.flatten()
        losses.append(float(torch.nn.functional.cross_entropy(logits_MV, targets_M)))
        hits.append(float((logits_MV.argmax(-1) == targets_M).float().mean()))
    trainer.model.train()
    return fmean(losses), fmean(hits)


def _windows(spec: AccuracySpec, corpus: Corpus) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    batches = validation_batches(
        corpus.validation,
        micro_batch_size=spec.batch_size,
        seq_len=spec.seq_len,
        max_batches=spec.validation_batches,
    )
    for batch in batches:
        yield torch.from_numpy(batch.token_ids_BT), torch.from_numpy(batch.target_ids_BT)
