"""The trainer on a CUDA card, capped at the scenario card's memory."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from hybridtrain.data.batches import BatchSampler, TokenBatch
from hybridtrain.data.corpus import Corpus
from hybridtrain.errors import ConfigError
from hybridtrain.memory.cuda_transfer import open_transfer
from hybridtrain.models.model_config import BatchWorkload, ModelConfig
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import MemoryPlan
from hybridtrain.profiler.nvml import DeviceReader, DeviceReadError
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.cards.card import Card
from hybridvalidation.records.stack_run import MeasuredFigures

_WARMUP_STEPS = 2
"""Untimed steps: the first allocates the optimizer state, the second fills the allocator's cache."""
_COUNTED_STEPS = 5
_LEAST_FREE = 0.9
"""Share of the cap that must be free: a desktop uses a little, another run much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One optimizer step on the card, with its own peaks."""

    step: int
    loss: float
    grad_norm: float | None
    seconds: float
    peak_allocated_bytes: int
    peak_reserved_bytes: int


class DeviceUse:
    """Bytes of a card used by this process outside torch's allocator: CUDA context, kernels, libraries.

    NVML reads the whole card before this process uses it and at the end; the difference is this process's. Without NVML
    the card counts as unused by others.

    Args:
        device: The card.
        used_before_bytes: Used memory of the whole card before this process; None: read it now.
    """

    def __init__(self, device: torch.device, used_before_bytes: int | None = None) -> None:
        self._device = device
        self._reader: DeviceReader | None = None
        self._before = 0
        try:
            self._reader = DeviceReader(device.index)
            self._before = self._reader.read().used_bytes if used_before_bytes is None else used_before_bytes
        except DeviceReadError:
            self._reader = None

    def outside_bytes(self) -> int:
        """Return the used bytes that torch's allocator has not reserved."""
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        used = total - free if self._reader is None else self._reader.read().used_bytes - self._before
        return max(0, used - torch.cuda.memory_reserved(self._device))

    def close(self) -> None:
        """Release NVML."""
        if self._reader is not None:
            self._reader.close()


def measure_on_cuda(
    model: ModelConfig, plan: MemoryPlan, card: Card, workload: BatchWorkload, corpus: Corpus, config: TrainerConfig
) -> MeasuredFigures:
    """Train a few steps and read the allocator.

    Raises:
        torch.OutOfMemoryError: a request exceeds the cap. ConfigError: other programs leave less memory than the cap.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    use = DeviceUse(device)
    total_bytes = int(torch.cuda.get_device_properties(device).total_memory)
    cap = cap_memory(device, min(card.memory_bytes, total_bytes) - card.context_bytes)
    accum_steps = plan.for_phase(Phase.FULL).grad_accum_steps
    micro_batch_size = workload.batch_size // accum_steps
    sampler = BatchSampler(corpus.train, micro_batch_size=micro_batch_size, seq_len=workload.seq_len, seed=0)
    transfer = open_transfer(device, disk_folder=Path(tempfile.gettempdir()))
    try:
        trainer = Trainer(model, plan, config, transfer)
        steps = [
            run_step(trainer, [sampler.batch(step, micro_batch) for micro_batch in range(accum_steps)], device)
            for step in range(_WARMUP_STEPS + _COUNTED_STEPS)
        ]
        outside_bytes = use.outside_bytes()
    finally:
        transfer.close()
        use.close()
    peak_reserved_bytes = max(step.peak_reserved_bytes for step in steps)
    times = tuple(step.seconds for step in steps[_WARMUP_STEPS:])
    return MeasuredFigures(
        peak_allocated_bytes=max(step.peak_allocated_bytes for step in steps),
        peak_reserved_bytes=peak_reserved_bytes,
        device_used_bytes=peak_reserved_bytes + outside_bytes,
        num_alloc_retries=num_alloc_retries(device),
        step_times_s=times,
        tokens_per_s=accum_steps * micro_batch_size * workload.seq_len / median(times),
        cap_bytes=cap,
    )


def cap_memory(device: torch.device, cap_bytes: int) -> int:
    """Cap torch's allocator at ``cap_bytes``, or at slightly fewer free bytes; return the cap.

    Raises:
        ConfigError: less than nine tenths of it are free.
    """
    free, total = torch.cuda.mem_get_info(device)
    if free < _LEAST_FREE * cap_bytes:
        fault = (
            f"{format_bytes(free)} are free of {format_bytes(total)}, less than the run's cap of "
            f"{format_bytes(cap_bytes)}; end other programs on the card"
        )
        raise ConfigError("CUDA card", [fault])
    cap = min(cap_bytes, free)
    torch.cuda.set_per_process_memory_fraction(cap / total, device)
    return cap


def run_step(trainer: Trainer, batches: Sequence[TokenBatch], device: torch.device) -> MeasuredStep:
    """Run one step, synchronized before and after; peaks include memory held before it."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    result = trainer.step(batches)
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    return MeasuredStep(
        step=result.step, loss=result.loss, grad_norm=result.grad_norm, seconds=seconds,
        peak_allocated_bytes=torch.cuda.max_memory_allocated(device),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(device),
    )  # fmt: skip


def num_alloc_retries(device: torch.device) -> int:
    """Return the number of times that the allocator released its cache and retried."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
