"""The same trainer on a CUDA card, under a hard cap of the scenario card's size."""

import time
from collections.abc import Sequence
from statistics import median

import torch

from hybridtrain.data.batches import BatchSampler, TokenBatch
from hybridtrain.data.corpus import Corpus
from hybridtrain.memory.cuda_transfer import open_transfer
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import MemoryPlan
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.virtual_gpu.card import Card
from hybridvalidation.record import MeasuredFigures
from hybridvalidation.scenario import BatchWorkload

_WARMUP_STEPS = 2
_COUNTED_STEPS = 5


def measure_on_cuda(
    model: ModelConfig, plan: MemoryPlan, card: Card, workload: BatchWorkload, corpus: Corpus
) -> MeasuredFigures:
    """Train a few steps and read the allocator; raises ``torch.OutOfMemoryError`` when the cap refuses a request."""
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.get_device_properties(device).total_memory
    cap = min(card.memory_bytes, total) - card.context_bytes
    torch.cuda.set_per_process_memory_fraction(cap / total, device)
    accum_steps = plan.for_phase(Phase.FULL).grad_accum_steps
    sampler = BatchSampler(
        corpus.train, micro_batch_size=workload.batch_size // accum_steps, seq_len=workload.seq_len, seed=0
    )
    trainer = Trainer(model, plan, TrainerConfig(), open_transfer(device))
    times = []
    for step in range(_WARMUP_STEPS + _COUNTED_STEPS):
        batches = [sampler.batch(step, micro_batch) for micro_batch in range(accum_steps)]
        seconds = _timed_step(trainer, batches, device)
        if step >= _WARMUP_STEPS:
            times.append(seconds)
    free, _ = torch.cuda.mem_get_info(device)
    statistics = torch.cuda.memory_stats(device)
    return MeasuredFigures(
        peak_allocated_bytes=int(statistics["allocated_bytes.all.peak"]),
        peak_reserved_bytes=int(statistics["reserved_bytes.all.peak"]),
        device_used_bytes=int(total - free),
        num_alloc_retries=int(statistics["num_alloc_retries"]),
        step_times_s=tuple(times),
        tokens_per_s=workload.batch_size * workload.seq_len / median(times),
        cap_bytes=cap,
    )


def _timed_step(trainer: Trainer, batches: Sequence[TokenBatch], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    trainer.step(batches)
    torch.cuda.synchronize(device)
    return time.perf_counter() - begin
