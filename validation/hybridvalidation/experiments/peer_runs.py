"""A row of ``hybridtrain peers``: an engine's trainer, planned, executed small, or measured under the card's cap."""

import math
import time
from contextlib import suppress
from dataclasses import replace
from statistics import median

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hybridtrain.data.corpus import embedded_corpus
from hybridtrain.errors import DivergenceError
from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.allocator.replay import OutOfMemory
from hybridtrain.virtual_gpu.cards.card import Card, Host
from hybridtrain.virtual_gpu.facade.card_run import CardRun
from hybridtrain.virtual_gpu.facade.estimate import with_unlimited_memory
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu
from hybridvalidation.engines import hybridtrain as ours
from hybridvalidation.engines.task import Task, train
from hybridvalidation.experiments.measure import cap_memory, measure_on_cuda
from hybridvalidation.experiments.peers import PeerFigures, PeerJob
from hybridvalidation.records.outcome import Evidence

_COUNTED_STEPS = 5


def work(job: PeerJob) -> PeerFigures:
    """Run one row, in the child process."""
    if job.evidence is Evidence.PLANNED:
        return plan(
            job.task, job.card.resolve(), job.host, AllocatorConfig(expandable_segments=job.expandable_segments)
        )
    if job.evidence is Evidence.EXECUTED:
        return execute(job.task)
    if job.expandable_segments:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    return measure(job.task, job.card.resolve())


def plan(task: Task, card: Card, host: Host, allocator: AllocatorConfig | None = None) -> PeerFigures:
    """Run two steps on the virtual card; if they do not fit, report where, and the need on a larger card."""
    if task.stack is not None:  # our own: a dry run, which knows host, disk and the copies between
        run = ours.run_dry(task, card, host)
        shortage = _told(run.oom) if run.oom is not None else "" if run.fits else "too little host memory or disk space"
        return _figures(run, shortage, host_peak_bytes=run.host_peak_bytes, num_params=run.num_params)
    gpu, shortage = _on_virtual_card(task, card, host, allocator)
    if shortage:
        gpu, _ = _on_virtual_card(task, with_unlimited_memory(card), Host(), allocator)
    found = _figures(gpu.report(), shortage, host_peak_bytes=gpu.host_peak_bytes, num_params=gpu.num_params)
    return replace(found, without_gradient=len(gpu.without_gradient))


def execute(task: Task) -> PeerFigures:
    """Train for real on the CPU.

    Raises:
        DivergenceError: a loss is not finite, or the last one is not below the first.
    """
    torch.manual_seed(0)  # random weights, the same for every recipe of an engine
    losses = train(task)
    if not (len(losses) == task.num_steps and all(map(math.isfinite, losses)) and losses[-1] < losses[0]):
        raise DivergenceError(
            f"losses {losses} of {task.num_steps} steps must be finite and decrease; check the recipe"
        )
    return PeerFigures(losses=tuple(losses))


def measure(task: Task, card: Card) -> PeerFigures:
    """Train on this machine's CUDA card, capped at the memory of ``card``, and read the allocator."""
    if task.stack is not None:
        return _measure_ours(task, card)
    device = torch.device("cuda", torch.cuda.current_device())
    cap_memory(device, card.allocator_capacity_bytes)
    task = replace(task, num_steps=1 + _COUNTED_STEPS)
    ends: list[float] = []

    def note(*_args: object) -> None:
        torch.cuda.synchronize(device)
        ends.append(time.perf_counter())

    handle, shortage, losses = register_optimizer_step_post_hook(note), "", list[float]()
    try:
        losses = train(task)
    except torch.OutOfMemoryError as refusal:
        shortage = str(refusal)
    finally:
        handle.remove()
    updates = max(1, len(ends) // task.num_steps)  # of a step: several where each parameter has its own optimizer
    seconds = 0.0 if shortage else (ends[-1] - ends[updates - 1]) / _COUNTED_STEPS
    return PeerFigures(
        peak_allocated_bytes=torch.cuda.max_memory_allocated(device),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(device), fits=not shortage, shortage=shortage,
        step_time_s=seconds, losses=tuple(losses),
    )  # fmt: skip


def _measure_ours(task: Task, card: Card) -> PeerFigures:
    stack, memory_plan = ours.stack_and_plan(task)
    corpus, config = embedded_corpus(), stack.training()
    try:
        found = measure_on_cuda(task.model, memory_plan, card, task.workload, corpus, config)
    except torch.OutOfMemoryError as refusal:
        return PeerFigures(shortage=str(refusal))
    return PeerFigures(
        peak_allocated_bytes=found.peak_allocated_bytes, peak_reserved_bytes=found.peak_reserved_bytes, fits=True,
        step_time_s=median(found.step_times_s),
    )  # fmt: skip


def _on_virtual_card(task: Task, card: Card, host: Host, allocator: AllocatorConfig | None) -> tuple[VirtualGpu, str]:
    """Return the card after the steps, and the allocation that it refused."""
    memory = None if host.memory_gib is None else host.tensor_bytes
    gpu = VirtualGpu(card, host_memory=memory, allocator=allocator)
    try:
        with suppress(torch.OutOfMemoryError), gpu:
            train(task)
    except RuntimeError as refusal:
        if "DefaultCPUAllocator" not in str(refusal):
            raise
        return gpu, f"host memory: {format_bytes(gpu.ledger.host_bytes)} needed of {format_bytes(host.tensor_bytes)}"
    return gpu, "" if gpu.oom is None else _told(gpu.oom)


def _told(oom: OutOfMemory) -> str:
    place = f"step {oom.step}, {oom.stage.value} {oom.unit}".strip() if oom.step else "building"
    return f"out of memory at {place}"


def _figures(run: CardRun, shortage: str, *, host_peak_bytes: int, num_params: int) -> PeerFigures:
    return PeerFigures(
        num_params=num_params, peak_allocated_bytes=run.peak.allocated_bytes,
        peak_reserved_bytes=run.peak_reserved_bytes, host_peak_bytes=host_peak_bytes, fits=not shortage,
        shortage=shortage, step_time_s=run.time.seconds, bound=run.bound.value,
    )  # fmt: skip
