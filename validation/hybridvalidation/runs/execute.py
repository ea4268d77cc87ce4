"""``hybridtrain execute``: real training on the CPU, every byte of the card counted, beside the dry run of it.

Of several ranks each is a process of its own, and they meet on gloo.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path

import torch

from hybridtrain.data.batches import BatchSampler
from hybridtrain.data.corpus import Corpus, open_corpus
from hybridtrain.errors import ConfigError, DiskSpaceError, HostMemoryError, RankError
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.cycle import HybridResult, HybridTrainer
from hybridtrain.memory.group import DirectGroup, Group, TorchGroup, VirtualGroup
from hybridtrain.memory.tier import available_host_bytes
from hybridtrain.memory.transfer import DirectTransfer, Transfer, VirtualTransfer
from hybridtrain.models.model_config import ModelConfig, Workload, check_workload
from hybridtrain.optim import OPTIMIZERS
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import MemoryPlan
from hybridtrain.plan.placement import Placement
from hybridtrain.planning.dry_runs import cycle_config
from hybridtrain.profiler.memory_reader import read_process_memory
from hybridtrain.run.environment import read_environment
from hybridtrain.run.program import program_digest
from hybridtrain.stacks import Stack
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
from hybridtrain.units import format_bytes, format_seconds
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, StorageLedger
from hybridvalidation.records.executed import ExecutedJob, ExecutedRank, ExecutedRun, ExecutedStep, TierPeaks
from hybridvalidation.runs.child import Child, run_side_by_side
from hybridvalidation.runs.job import plan_figures

_Event = tuple[int, int, str, str, int]
"""Storage or ~storage, its bytes, class and unit, and the step, 0 while the model is built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecuteSpec:
    """What is run."""

    model: str
    """For the record: a preset, or the name of a shape."""
    shape: ModelConfig
    stack: Stack
    grad_accum_steps: int | None = None
    """Of a step; None: the stack's."""
    workload: Workload
    num_steps: int
    """Optimizer steps; of a cycle phase steps, PREDICT included."""
    lr: float
    seed: int = 0
    disk_folder: Path | None = None
    host_limit_bytes: int | None = None
    """Host memory for offloaded tensors; None: what the machine has available."""
    runs_cycle: bool = False
    """Whether WARMUP, FULL, PREDICT and CORRECT follow one another; the stack keeps a slow average."""
    world: int = 1
    """Ranks, a process each."""

    @property
    def plan(self) -> MemoryPlan:
        """What the stack composes to."""
        return self.stack.plan(self.grad_accum_steps)

    @property
    def accum_steps(self) -> int:
        """Micro-batches of a step."""
        return self.plan.for_phase(Phase.FULL).grad_accum_steps

    @property
    def config(self) -> TrainerConfig:
        """Everything else the trainer wants."""
        return TrainerConfig(
            optimizer=OPTIMIZERS[self.stack.optimizer](lr=self.lr),
            schedule=LrSchedule(kind="constant", warmup_steps=0, total_steps=max(self.num_steps, 1)),
            seed=self.seed,
        )

    @property
    def hybrid(self) -> HybridConfig | None:
        """The cycle."""
        return cycle_config() if self.runs_cycle else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    result: HybridResult
    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passage:
    """All steps on one device, virtual or real."""

    trace: LedgerTrace
    build_s: float
    steps: tuple[_Step, ...]
    peaks: TierPeaks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """What one of several ranks is given."""

    spec: ExecuteSpec
    rank: int
    meeting: Path
    """File through which the ranks find each other."""


def execute(spec: ExecuteSpec, corpus: Corpus, say: Callable[[str], None]) -> ExecutedRun:
    """Dry-run the steps, train them, compare; tell each step.

    Raises:
        ConfigError: the workload does not suit the model, the plan not the ranks, or the plan uses the disk and no
            folder was named.
        HostMemoryError, DiskSpaceError: the machine holds less than planned; nothing was built.
        DivergenceError: the loss is no number any more.
        DataError: the corpus is shorter than a sequence.
        RankError: One of several ranks failed.
    """
    check_workload(spec.shape, spec.workload)
    started, begin = datetime.now(UTC), time.perf_counter()
    environment, program = read_environment(), program_digest()  # now: nobody edits the sources that are loaded
    ranks = [_execute_rank(spec, corpus, DirectGroup(), say)] if spec.world == 1 else _execute_ranks(spec, say)
    heaviest = max(ranks, key=lambda rank: rank.executed.device_bytes)
    plan = plan_figures(spec.plan) | ({"world": str(spec.world)} if spec.world > 1 else {})
    job = ExecutedJob(
        model=spec.model, shape=spec.shape, stack=spec.stack.name, plan=plan,
        micro_batch_size=spec.workload.micro_batch_size, seq_len=spec.workload.seq_len,
        phases=tuple(step.phase for step in heaviest.steps), lr=spec.lr, seed=spec.seed,
    )  # fmt: skip
    return ExecutedRun(
        key=job.key, program=program,
        model=spec.model, shape=spec.shape, num_params=spec.shape.num_params, stack=spec.stack.name,
        plan=plan, micro_batch_size=spec.workload.micro_batch_size, seq_len=spec.workload.seq_len,
        accum_steps=spec.accum_steps, lr=spec.lr, seed=spec.seed, corpus=corpus.name, corpus_digest=corpus.digest,
        started_at=started.isoformat(timespec="seconds"), duration_s=round(time.perf_counter() - begin, 3),
        build_s=heaviest.build_s, environment=environment, num_threads=torch.get_num_threads(),
        steps=heaviest.steps, executed=heaviest.executed, planned=heaviest.planned,
        process_peak_bytes=max(rank.process_peak_bytes for rank in ranks),
        num_events=sum(rank.num_events for rank in ranks),
        difference="; ".join(_of_rank(rank, spec.world) for rank in ranks if rank.difference),
        ranks=tuple(ranks) if spec.world > 1 else (),
    )  # fmt: skip


def _of_rank(rank: ExecutedRank, world: int) -> str:
    return rank.difference if world == 1 else f"rank {rank.rank}: {rank.difference}"


def _execute_ranks(spec: ExecuteSpec, say: Callable[[str], None]) -> list[ExecutedRank]:
    """Execute each rank in a process of its own; when one fails the others are stopped."""
    Trainer(spec.shape, spec.plan, spec.config, VirtualTransfer(), group=VirtualGroup(0, spec.world))  # refused here
    say(f"{spec.world} ranks on gloo, {spec.num_steps} steps each")
    with tempfile.TemporaryDirectory() as folder:
        jobs = [RankJob(spec=spec, rank=rank, meeting=Path(folder) / "meeting") for rank in range(spec.world)]
        found = []
        for job, ended in run_side_by_side(jobs, _start_rank, spec.world):
            if ended.answer is None:
                raise RankError(f"rank {job.rank} of {spec.world}: {ended.fault}; the others were stopped.")
            found.append(ended.answer)
    return sorted(found, key=lambda rank: rank.rank)


def _start_rank(job: RankJob) -> Child[ExecutedRank]:
    return Child("hybridvalidation.runs.execute:execute_in_child", job, ExecutedRank)


def execute_in_child(job: RankJob) -> ExecutedRank:
    """Execute one rank, whose process this is."""
    torch.set_num_threads(1)
    device, spec = torch.device("cpu"), job.spec
    group = TorchGroup.open(device, init_method=f"file://{job.meeting}", rank=job.rank, world=spec.world)
    corpus = open_corpus(None, vocab_size=spec.shape.vocab_size)
    found = _execute_rank(spec, corpus, group, lambda _: None)
    group.close()
    return found


def _execute_rank(spec: ExecuteSpec, corpus: Corpus, group: Group, say: Callable[[str], None]) -> ExecutedRank:
    sampler = BatchSampler(
        corpus.train, micro_batch_size=spec.workload.micro_batch_size, seq_len=spec.workload.seq_len, seed=spec.seed
    )
    virtual = VirtualGroup(group.rank, group.world) if group.world > 1 else group
    planned = _pass(spec, sampler, VirtualTransfer(), virtual, lambda _: None)
    _check_room(spec, planned.peaks)
    say(f"planned: {_told(planned.peaks)}; drawing {spec.shape.num_params:,} initial weights")
    transfer = DirectTransfer(torch.device("cpu"), disk_folder=spec.disk_folder, host_limit_bytes=spec.host_limit_bytes)
    try:
        executed = _pass(spec, sampler, transfer, group, lambda step: say(_step_told(step, spec.num_steps)))
    finally:
        transfer.close()
    return ExecutedRank(
        rank=group.rank, build_s=round(executed.build_s, 3), num_events=len(executed.trace.events),
        steps=tuple(map(_recorded, executed.steps, planned.steps)), executed=executed.peaks, planned=planned.peaks,
        process_peak_bytes=read_process_memory().peak_rss_bytes, difference=_difference(planned, executed),
    )  # fmt: skip


def _pass(
    spec: ExecuteSpec, sampler: BatchSampler, transfer: Transfer, group: Group, on_step: Callable[[_Step], None]
) -> _Passage:
    ledger = StorageLedger()
    steps: list[_Step] = []
    begin = time.perf_counter()
    with ledger:
        trainer = Trainer(spec.shape, spec.plan, spec.config, transfer, ledger, group=group)
        runner = HybridTrainer(trainer, spec.hybrid)
        count = spec.accum_steps // trainer.data_group.world
        first = trainer.data_group.rank * count
        build_s, peak_bytes = time.perf_counter() - begin, ledger.peak_bytes
        for _ in range(spec.num_steps):
            if runner.phase is Phase.PREDICT:  # what leaves the device for it belongs to the step before
                trainer.enter_phase(Phase.PREDICT)
            ledger.begin_step()
            begin = time.perf_counter()
            result = runner.advance(lambda step: [sampler.batch(step, first + part) for part in range(count)])
            steps.append(_Step(result=result, seconds=time.perf_counter() - begin, peak_bytes=ledger.peak_bytes))
            on_step(steps[-1])
    return _Passage(
        trace=ledger.trace(), build_s=build_s, steps=tuple(steps),
        peaks=TierPeaks(
            device_bytes=max(peak_bytes, *(step.peak_bytes for step in steps)),
            host_bytes=transfer.tiers.peak_bytes(Placement.HOST),
            disk_bytes=transfer.tiers.peak_bytes(Placement.DISK),
        ),
    )  # fmt: skip


def _check_room(spec: ExecuteSpec, planned: TierPeaks) -> None:
    """Refuse what the machine cannot hold before hours are spent on it; each rank is taken to hold as much."""
    planned = TierPeaks(
        device_bytes=planned.device_bytes * spec.world,
        host_bytes=planned.host_bytes * spec.world,
        disk_bytes=planned.disk_bytes * spec.world,
    )
    available = available_host_bytes()
    limit = available if spec.host_limit_bytes is None else spec.host_limit_bytes
    if limit is not None and planned.host_bytes > limit:
        raise HostMemoryError(
            f"host memory: {spec.model} under '{spec.stack.name}' offloads {format_bytes(planned.host_bytes)} "
            f"(planned), {format_bytes(limit)} are allowed; raise --host-limit-gib, or choose a stack with disk tiers "
            f"or 8-bit weights and state."
        )
    total = planned.host_bytes + planned.device_bytes
    if available is not None and total > available:
        raise HostMemoryError(
            f"memory: an execution holds the card's tensors in this machine's memory too, {format_bytes(total)} in all "
            f"(planned), {format_bytes(available)} are available; close other programs, choose a smaller model or "
            f"workload, or a stack that moves more to disk. A dry run needs none of it."
        )
    if planned.disk_bytes:
        _check_disk(spec, planned.disk_bytes)


def _check_disk(spec: ExecuteSpec, num_bytes: int) -> None:
    folder = spec.disk_folder
    if folder is None:
        needs = f"stack '{spec.stack.name}' keeps {format_bytes(num_bytes)} (planned)"
        raise ConfigError("--disk", [f"{needs} on disk; name a folder: --disk FOLDER"])
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise DiskSpaceError(
            f"{folder}: stack '{spec.stack.name}' keeps {format_bytes(num_bytes)} (planned) on disk, "
            f"{format_bytes(free)} are free; free some, or name a folder on a larger disk (--disk)."
        )


def _difference(planned: _Passage, executed: _Passage) -> str:
    found = first_difference(planned.trace, executed.trace)
    if not found and planned.peaks != executed.peaks:
        found = f"peaks: the dry run {_told(planned.peaks)}; the execution {_told(executed.peaks)}"
    return found


def _recorded(executed: _Step, planned: _Step) -> ExecutedStep:
    return ExecutedStep(
        step=executed.result.step, loss=executed.result.loss if executed.result.num_tokens else None,
        grad_norm=executed.result.grad_norm, seconds=round(executed.seconds, 3), device_peak_bytes=executed.peak_bytes,
        planned_device_peak_bytes=planned.peak_bytes, phase=executed.result.phase.value,
        predicted_steps=executed.result.predicted_steps,
    )  # fmt: skip


def _step_told(step: _Step, num_steps: int) -> str:
    result = step.result
    norm = "" if result.grad_norm is None else f", gradient norm {result.grad_norm:.3g}"
    loss = f"{result.predicted_steps:.2f} steps predicted"
    if result.num_tokens and result.loss is not None:
        loss = f"loss {result.loss:.3f}"
    return (
        f"step {result.step}/{num_steps} {result.phase}: {loss}{norm}, {format_seconds(step.seconds)}, "
        f"device {format_bytes(step.peak_bytes)}"
    )


def _told(peaks: TierPeaks) -> str:
    return (
        f"device {format_bytes(peaks.device_bytes)}, host {format_bytes(peaks.host_bytes)}, "
        f"disk {format_bytes(peaks.disk_bytes)}"
    )


def first_difference(planned: LedgerTrace, executed: LedgerTrace) -> str:
    """Return a sentence on the first event in which a dry run and a run differ; empty when none does.

    Compared are every allocation and release in order, each with bytes, class, unit and step.
    """
    for number, (plan, run) in enumerate(zip_longest(_events(planned), _events(executed))):
        if plan != run:
            return f"event {number + 1}: the dry run {_event_told(plan)}, the execution {_event_told(run)}"
    starts = [[mark.event for mark in trace.steps] for trace in (planned, executed)]
    if starts[0] != starts[1]:
        return f"steps begin after events {starts[0]} in the dry run, after {starts[1]} in the execution"
    return ""


def _events(trace: LedgerTrace) -> Iterator[_Event]:
    starts = iter([*(mark.event for mark in trace.steps), len(trace.events)])
    step, following = 0, next(starts)
    for number, event in enumerate(trace.events):
        while number >= following:
            step, following = step + 1, next(starts)
        storage = event if event >= 0 else ~event
        yield event, trace.sizes[storage], trace.classes[storage], trace.units[storage], step


def _event_told(event: _Event | None) -> str:
    if event is None:
        return "has ended"
    storage, size, tensor_class, unit, step = event
    action = "allocates" if storage >= 0 else "releases"
    owner = f" of {unit}" if unit else ""
    when = f"in step {step}" if step else "while the model is built"
    return f"{action} {format_bytes(size)} ({size} bytes) of {tensor_class}{owner} {when}"
