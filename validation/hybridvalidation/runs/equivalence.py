"""Is accumulation the same as the large batch? Both are trained on the same sequences and their weights compared.

In exact arithmetic they are: the mean of equal micro-batches' mean losses is the batch's mean loss. In floating point
the sums have another order, and AdamW carries the differences on.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from hybridtrain.data.batches import BatchSampler, TokenBatch
from hybridtrain.data.corpus import Corpus
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.optim import AdamWConfig
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import Cell, MemoryPlan, Schedule
from hybridtrain.plan.placement import Codec, Placement
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
from hybridvalidation.scenario import AccuracySpec


def accumulation_difference(spec: AccuracySpec, plan: MemoryPlan, corpus: Corpus) -> float | None:
    """Return by how much accumulated training and training with the large batch end apart, over the weights' norm.

    None for a plan that accumulates nothing or does not keep fp32 weights on the device. The first seed of ``spec`` is
    trained, without dropout: its random numbers belong to a micro-batch.
    """
    table = plan.for_phase(Phase.FULL)
    accum_steps = table.grad_accum_steps
    if accum_steps == 1 or table.weight != Cell(placement=Placement.DEVICE, codec=Codec.FLOAT32):
        return None
    seed = spec.seeds[0]
    accumulated, large = _trainer(spec, plan, seed), _trainer(spec, _without_accumulation(plan), seed)
    sampler = BatchSampler(
        corpus.train, micro_batch_size=spec.batch_size // accum_steps, seq_len=spec.seq_len, seed=seed
    )
    for step in range(spec.num_steps):
        batches = [sampler.batch(step, micro_batch) for micro_batch in range(accum_steps)]
        accumulated.step(batches)
        large.step([_joined(batches)])
    pairs = list(zip(accumulated.model.parameters(), large.model.parameters(), strict=True))
    apart = sum(_square(own.detach() - other.detach()) for own, other in pairs)
    return sqrt(apart / sum(_square(other.detach()) for _, other in pairs))


def _trainer(spec: AccuracySpec, plan: MemoryPlan, seed: int) -> Trainer:
    config = TrainerConfig(
        optimizer=AdamWConfig(lr=spec.lr),
        schedule=LrSchedule(warmup_steps=spec.num_steps // 10, total_steps=spec.num_steps),
        seed=seed,
    )
    return Trainer(replace(spec.proxy, dropout=0.0), plan, config, DirectTransfer(torch.device("cpu")))


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


def _square(values: Tensor) -> float:
    return float(values.double().square().sum())
