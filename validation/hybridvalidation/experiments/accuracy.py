"""Quality cost of a stack: a small model trained for real, on the same batches and seeds as the baseline."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import torch
from torch.nn.utils import parameters_to_vector

from hybridtrain.data.batches import BatchSampler, TokenBatch, validation_batches
from hybridtrain.data.corpus import Corpus
from hybridtrain.errors import DataError
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.optim import AdamWConfig, Optimizer
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import Cell, MemoryPlan, Schedule
from hybridtrain.plan.placement import Codec, Placement
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
from hybridvalidation.records.stack_run import AccuracyFigures, SeedResult
from hybridvalidation.scenario import AccuracySpec


def train_proxies(
    spec: AccuracySpec, plan: MemoryPlan, corpus: Corpus, optimizer: Optimizer | None = None
) -> AccuracyFigures:
    """Train the proxy once per seed under ``plan`` on the CPU and validate each; raises ``DivergenceError``."""
    optimizer = AdamWConfig(lr=spec.lr) if optimizer is None else optimizer
    return AccuracyFigures(
        num_params=spec.proxy.num_params,
        num_tokens=spec.num_steps * spec.batch_size * spec.seq_len,
        num_validation_tokens=spec.validation_batches * spec.batch_size * spec.seq_len,
        corpus=corpus.name,
        corpus_digest=corpus.digest,
        seeds=tuple(_train_one(spec, plan, corpus, seed, optimizer) for seed in spec.seeds),
        accumulation_difference=accumulation_difference(spec, plan, corpus),
    )


def _train_one(spec: AccuracySpec, plan: MemoryPlan, corpus: Corpus, seed: int, optimizer: Optimizer) -> SeedResult:
    accum_steps = plan.for_phase(Phase.FULL).grad_accum_steps
    trainer = _trainer(spec, plan, seed, optimizer)
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


def _trainer(spec: AccuracySpec, plan: MemoryPlan, seed: int, optimizer: Optimizer) -> Trainer:
    config = TrainerConfig(
        optimizer=optimizer,
        schedule=LrSchedule(warmup_steps=spec.num_steps // 10, total_steps=spec.num_steps),
        seed=seed,
    )
    return Trainer(spec.proxy, plan, config, DirectTransfer(torch.device("cpu")))


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
        corpus.validation, micro_batch_size=spec.batch_size, seq_len=spec.seq_len, max_batches=spec.validation_batches
    )
    found = 0
    for batch in batches:
        found += 1
        yield torch.from_numpy(batch.token_ids_BT), torch.from_numpy(batch.target_ids_BT)
    if found < spec.validation_batches:
        raise DataError(
            f"accuracy.validation_batches: {spec.validation_batches} requested, but {corpus.name} has {found}; lower "
            f"it, or validate on a longer corpus"
        )


def accumulation_difference(spec: AccuracySpec, plan: MemoryPlan, corpus: Corpus) -> float | None:
    """Return the difference of final weights between accumulated and large-batch training, over the weights' norm.

    None without accumulation, or without fp32 weights on the device. The first seed of ``spec`` is trained, without
    dropout, whose random numbers differ by micro-batch. In exact arithmetic both are equal; in floating point the order
    of sums differs, and AdamW propagates the differences.
    """
    table = plan.for_phase(Phase.FULL)
    accum_steps = table.grad_accum_steps
    if accum_steps == 1 or table.weight != Cell(placement=Placement.DEVICE, codec=Codec.FLOAT32):
        return None
    seed, exact = spec.seeds[0], replace(spec, proxy=replace(spec.proxy, dropout=0.0))
    optimizer = AdamWConfig(lr=spec.lr)
    accumulated = _trainer(exact, plan, seed, optimizer)
    large = _trainer(exact, _without_accumulation(plan), seed, optimizer)
    sampler = BatchSampler(
        corpus.train, micro_batch_size=spec.batch_size // accum_steps, seq_len=spec.seq_len, seed=seed
    )
    for step in range(spec.num_steps):
        batches = [sampler.batch(step, micro_batch) for micro_batch in range(accum_steps)]
        accumulated.step(batches)
        large.step([_joined(batches)])
    own, other = (parameters_to_vector(run.model.parameters()).detach().double() for run in (accumulated, large))
    return float((own - other).norm() / other.norm())


def _without_accumulation(plan: MemoryPlan) -> MemoryPlan:
    return MemoryPlan(
        phases={
            phase: replace(table, grad_accum_steps=1, schedule=Schedule.HORIZONTAL, visit_micro_batches=0)
            for phase, table in plan.phases.items()
        }
    )


def _joined(batches: Sequence[TokenBatch]) -> TokenBatch:
    return TokenBatch(
        token_ids_BT=np.concatenate([batch.token_ids_BT for batch in batches]),
        target_ids_BT=np.concatenate([batch.target_ids_BT for batch in batches]),
    )
