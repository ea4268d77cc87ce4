"""``hybridtrain execute``: real training on the CPU with all card memory counted, compared with its dry run.

Several ranks are processes that communicate by gloo.
"""

import shutil
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import torch

from hybridtrain.config.encode import digest
from hybridtrain.data.batches import BatchSampler
from hybridtrain.data.corpus import Corpus, open_corpus
from hybridtrain.errors import ConfigError, DiskSpaceError, HostMemoryError, RankError
from hybridtrain.hybrid.cycle import HybridTrainer
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
from hybridtrain.stacks import Stack
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
from hybridtrain.units import format_bytes, format_seconds
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, StorageLedger
from hybridvalidation.child import Child, run_side_by_side
from hybridvalidation.experiment import begin_header
from hybridvalidation.experiments.allocator_witness import AllocatorPeak, allocator_peak
from hybridvalidation.records.asked import plan_figures
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import append_record, read_lines

_FILE = "executed.jsonl"
_WITNESSED_EVENTS = 20_000
"""Most events of a run whose every op torch's profiler records: about 1 GB."""
_Event = tuple[int, int, str, str, int]
"""(storage or ~storage, bytes, class, unit, step); step 0 is the construction of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedJob:
    """Job of an executed run; of equal jobs the newest record counts."""

    model: str
    shape: ModelConfig
    stack: str
    plan: Mapping[str, str]
    micro_batch_size: int
    seq_len: int
    phases: tuple[str, ...]
    """Phase of each step."""
    lr: float
    seed: int

    @property
    def key(self) -> str:
        """Digest of all fields."""
        return digest(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedStep:
    """One optimizer step."""

    step: int
    """True steps done."""
    loss: float | None
    """Nats per token, mean over micro-batches, before the update; None in PREDICT."""
    grad_norm: float | None
    """Global L2 norm before clipping."""
    seconds: float
    device_peak_bytes: int
    """Peak bytes that a card would have held."""
    planned_device_peak_bytes: int
    phase: str = Phase.FULL.value
    predicted_steps: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPeaks:
    """Peak bytes by tier, including construction of the model."""

    device_bytes: int
    host_bytes: int
    """Offloaded tensors."""
    disk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedRank:
    """Result of one rank; fields as in the run."""

    rank: int
    build_s: float
    steps: tuple[ExecutedStep, ...]
    executed: TierPeaks
    planned: TierPeaks
    process_peak_bytes: int
    allocator_peak_bytes: int = 0
    num_events: int
    difference: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedRun(Record):
    """A run on the CPU, with the dry run of its steps."""

    model: str
    shape: ModelConfig
    num_params: int
    stack: str
    plan: Mapping[str, str]
    micro_batch_size: int
    seq_len: int
    accum_steps: int
    lr: float
    """Learning rate, constant without warm-up."""
    seed: int
    corpus: str
    corpus_digest: str
    evidence: Evidence = Evidence.EXECUTED
    build_s: float
    """Seconds of drawing the initial weights, part of the run's duration."""
    num_threads: int
    steps: tuple[ExecutedStep, ...]
    executed: TierPeaks
    planned: TierPeaks
    process_peak_bytes: int
    """Peak resident memory of the process: tensors of all tiers but disk, Python, torch."""
    allocator_peak_bytes: int = 0
    """Peak of torch's CPU allocator by its own events, of runs with few of them; 0: not recorded."""
    num_events: int
    """Number of allocations and releases in the execution."""
    difference: str
    """First difference between dry run and execution; empty: none."""
    ranks: tuple[ExecutedRank, ...] = ()
    """Results per rank; peaks and steps above are then of the rank with the highest peak, events of all."""

    def faults(self) -> list[str]:
        """Return inconsistencies of the content."""
        return [] if self.steps else ["steps: empty; a run has at least one"]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.micro_batch_size * self.seq_len * self.accum_steps

    @property
    def is_equal(self) -> bool:
        """Whether dry run and execution are equal, event by event."""
        return not self.difference


def append_executed(records: Path, run: ExecutedRun) -> Path:
    """Add a run to the folder's ``executed.jsonl``; return the file."""
    return append_record(records, _FILE, run)


def read_executed(records: Path) -> list[ExecutedRun]:
    """Return all runs, oldest first; raises ``RecordError`` for an invalid line."""
    return read_lines(records / _FILE, ExecutedRun)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecuteSpec:
    """Specification of a run."""

    model: str
    """Name for the record: a preset, or the name of a shape."""
    shape: ModelConfig
    stack: Stack
    grad_accum_steps: int | None = None
    """Micro-batches per step; None: the stack's."""
    workload: Workload
    num_steps: int
    """Optimizer steps; with a cycle phase steps, PREDICT included."""
    lr: float
    seed: int = 0
    disk_folder: Path | None = None
    host_limit_bytes: int | None = None
    """Host memory for offloaded tensors; None: available memory."""
    runs_cycle: bool = False
    """Whether WARMUP, FULL, PREDICT and CORRECT alternate; needs a stack with a slow average."""
    world: int = 1
    """Number of ranks, one process each."""

    @property
    def plan(self) -> MemoryPlan:
        """Composed plan of the stack."""
        return self.stack.plan(self.grad_accum_steps)

    @property
    def accum_steps(self) -> int:
        """Micro-batches of a step."""
        return self.plan.for_phase(Phase.FULL).grad_accum_steps

    @property
    def config(self) -> TrainerConfig:
        """Training configuration."""
        return TrainerConfig(
            optimizer=OPTIMIZERS[self.stack.optimizer](lr=self.lr),
            schedule=LrSchedule(kind="constant", warmup_steps=0, total_steps=max(self.num_steps, 1)),
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passage:
    """All steps on one device, virtual or real."""

    trace: LedgerTrace
    build_s: float
    steps: tuple[ExecutedStep, ...]
    peaks: TierPeaks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """Job of one of several ranks."""

    spec: ExecuteSpec
    rank: int
    meeting: Path
    """File for the rendezvous of the ranks."""


def execute(spec: ExecuteSpec, corpus: Corpus, say: Callable[[str], None]) -> ExecutedRun:
    """Dry-run the steps, train them and compare; report each step.

    Raises:
        ConfigError: the workload does not fit the model, the plan does not fit the ranks, or the disk tier has no
        folder. HostMemoryError, DiskSpaceError: the machine has less than planned; nothing was built. DivergenceError:
        the loss is not finite. DataError: the corpus is shorter than a sequence. RankError: a rank failed.
    """
    check_workload(spec.shape, spec.workload)
    header = begin_header()  # now: nobody edits the sources that are loaded
    ranks = [_execute_rank(spec, corpus, DirectGroup(), say)] if spec.world == 1 else _execute_ranks(spec, say)
    heaviest = max(ranks, key=lambda rank: rank.executed.device_bytes)
    plan = plan_figures(spec.plan) | ({"world": str(spec.world)} if spec.world > 1 else {})
    job = ExecutedJob(
        model=spec.model, shape=spec.shape, stack=spec.stack.name, plan=plan,
        micro_batch_size=spec.workload.micro_batch_size, seq_len=spec.workload.seq_len,
        phases=tuple(step.phase for step in heaviest.steps), lr=spec.lr, seed=spec.seed,
    )  # fmt: skip
    return ExecutedRun(
        key=job.key, **header(), model=job.model, shape=job.shape, num_params=spec.shape.num_params, stack=job.stack,
        plan=plan, micro_batch_size=job.micro_batch_size, seq_len=job.seq_len, accum_steps=spec.accum_steps, lr=job.lr,
        seed=job.seed, corpus=corpus.name, corpus_digest=corpus.digest, build_s=heaviest.build_s,
        num_threads=torch.get_num_threads(), steps=heaviest.steps, executed=heaviest.executed, planned=heaviest.planned,
        process_peak_bytes=max(rank.process_peak_bytes for rank in ranks),
        allocator_peak_bytes=heaviest.allocator_peak_bytes,
        num_events=sum(rank.num_events for rank in ranks),
        difference="; ".join(
            rank.difference if spec.world == 1 else f"rank {rank.rank}: {rank.difference}"
            for rank in ranks if rank.difference
        ),
        ranks=tuple(ranks) if spec.world > 1 else (),
    )  # fmt: skip


def _execute_ranks(spec: ExecuteSpec, say: Callable[[str], None]) -> list[ExecutedRank]:
    """Execute each rank in a child process; when one fails the others are stopped."""
    Trainer(spec.shape, spec.plan, spec.config, VirtualTransfer(), group=VirtualGroup(0, spec.world))  # refused here
    say(f"{spec.world} ranks on gloo, {spec.num_steps} steps each")
    with tempfile.TemporaryDirectory() as folder:
        jobs = [RankJob(spec=spec, rank=rank, meeting=Path(folder) / "meeting") for rank in range(spec.world)]
        found = []
        for job, ended in run_side_by_side(jobs, _start_rank, spec.world):
            if ended.answer is None:
                raise RankError(f"rank {job.rank} of {spec.world}: {ended.fault}; the other ranks were stopped.")
            found.append(ended.answer)
    return sorted(found, key=lambda rank: rank.rank)


def _start_rank(job: RankJob) -> Child[ExecutedRank]:
    return Child("hybridvalidation.experiments.executed:execute_in_child", job, ExecutedRank)


def execute_in_child(job: RankJob) -> ExecutedRank:
    """Execute one rank in this process."""
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
    say(f"planned: {_peaks_text(planned.peaks)}; drawing {spec.shape.num_params:,} initial weights")
    transfer = DirectTransfer(torch.device("cpu"), disk_folder=spec.disk_folder, host_limit_bytes=spec.host_limit_bytes)
    is_short = len(planned.trace.events) <= _WITNESSED_EVENTS
    try:
        with allocator_peak() if is_short else nullcontext(AllocatorPeak()) as witness:
            executed = _pass(spec, sampler, transfer, group, lambda step: say(_step_text(step, spec.num_steps)))
    finally:
        transfer.close()
    difference = first_difference(planned.trace, executed.trace)
    if not difference and planned.peaks != executed.peaks:
        difference = f"peaks: the dry run {_peaks_text(planned.peaks)}; the execution {_peaks_text(executed.peaks)}"
    return ExecutedRank(
        rank=group.rank, build_s=round(executed.build_s, 3), num_events=len(executed.trace.events),
        steps=tuple(
            replace(step, planned_device_peak_bytes=plan.device_peak_bytes)
            for step, plan in zip(executed.steps, planned.steps, strict=True)
        ), executed=executed.peaks, planned=planned.peaks,
        process_peak_bytes=read_process_memory().peak_rss_bytes, allocator_peak_bytes=witness.num_bytes,
        difference=difference,
    )  # fmt: skip


def _pass(
    spec: ExecuteSpec, sampler: BatchSampler, transfer: Transfer, group: Group, on_step: Callable[[ExecutedStep], None]
) -> _Passage:
    ledger = StorageLedger()
    steps: list[ExecutedStep] = []
    begin = time.perf_counter()
    with ledger:
        trainer = Trainer(spec.shape, spec.plan, spec.config, transfer, ledger, group=group)
        runner = HybridTrainer(trainer, cycle_config() if spec.runs_cycle else None)
        count = spec.accum_steps // trainer.data_group.world
        first = trainer.data_group.rank * count
        build_s, peak_bytes = time.perf_counter() - begin, ledger.peak_bytes
        for _ in range(spec.num_steps):
            if runner.phase is Phase.PREDICT:  # what leaves the device for it belongs to the step before
                trainer.enter_phase(Phase.PREDICT)
            ledger.begin_step()
            begin = time.perf_counter()
            result = runner.advance(lambda step: [sampler.batch(step, first + part) for part in range(count)])
            step = ExecutedStep(
                step=result.step, loss=result.loss if result.num_tokens else None, grad_norm=result.grad_norm,
                seconds=round(time.perf_counter() - begin, 3), device_peak_bytes=ledger.peak_bytes,
                planned_device_peak_bytes=ledger.peak_bytes, phase=result.phase.value,
                predicted_steps=result.predicted_steps,
            )  # fmt: skip
            steps.append(step)
            on_step(step)
    return _Passage(
        trace=ledger.trace(), build_s=build_s, steps=tuple(steps),
        peaks=TierPeaks(
            device_bytes=max(peak_bytes, *(step.device_peak_bytes for step in steps)),
            host_bytes=transfer.tiers.peak_bytes(Placement.HOST),
            disk_bytes=transfer.tiers.peak_bytes(Placement.DISK),
        ),
    )  # fmt: skip


def _check_room(spec: ExecuteSpec, planned: TierPeaks) -> None:
    """Refuse runs beyond the machine's memory before hours are spent; ranks are assumed equal."""
    sizes = (planned.device_bytes, planned.host_bytes, planned.disk_bytes)
    device_bytes, host_bytes, disk_bytes = (size * spec.world for size in sizes)
    available = available_host_bytes()
    limit = available if spec.host_limit_bytes is None else spec.host_limit_bytes
    if limit is not None and host_bytes > limit:
        raise HostMemoryError(
            f"host memory: {spec.model} under '{spec.stack.name}' offloads {format_bytes(host_bytes)} "
            f"(planned), {format_bytes(limit)} are allowed; raise --host-limit-gib, or choose a stack with a disk "
            f"tier, or 8-bit weights and state."
        )
    total = host_bytes + device_bytes
    if available is not None and total > available:
        raise HostMemoryError(
            f"memory: the run needs {format_bytes(total)} on this machine, card tensors included (planned), "
            f"{format_bytes(available)} are available; close other programs, choose a smaller model or workload, or a "
            f"stack that offloads more to disk. A dry run needs no such memory."
        )
    if disk_bytes:
        _check_disk(spec, disk_bytes)


def _check_disk(spec: ExecuteSpec, num_bytes: int) -> None:
    folder = spec.disk_folder
    if folder is None:
        needs = f"stack '{spec.stack.name}' keeps {format_bytes(num_bytes)} (planned)"
        raise ConfigError("--disk", [f"{needs} on disk; give --disk FOLDER"])
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise DiskSpaceError(
            f"{folder}: stack '{spec.stack.name}' keeps {format_bytes(num_bytes)} (planned) on disk, "
            f"{format_bytes(free)} are free; free disk space, or choose a folder on a larger disk (--disk)."
        )


def _step_text(step: ExecutedStep, num_steps: int) -> str:
    norm = "" if step.grad_norm is None else f", gradient norm {step.grad_norm:.3g}"
    loss = f"{step.predicted_steps:.2f} steps predicted" if step.loss is None else f"loss {step.loss:.3f}"
    return (
        f"step {step.step}/{num_steps} {step.phase}: {loss}{norm}, {format_seconds(step.seconds)}, "
        f"device {format_bytes(step.device_peak_bytes)}"
    )


def _peaks_text(peaks: TierPeaks) -> str:
    return (
        f"device {format_bytes(peaks.device_bytes)}, host {format_bytes(peaks.host_bytes)}, "
        f"disk {format_bytes(peaks.disk_bytes)}"
    )


def first_difference(planned: LedgerTrace, executed: LedgerTrace) -> str:
    """Return a sentence on the first event that differs between dry run and execution; empty: none.

    All allocations and releases are compared in order, with bytes, class, unit and step.
    """
    for number, (plan, run) in enumerate(zip_longest(_events(planned), _events(executed))):
        if plan != run:
            return f"event {number + 1}: the dry run {_event_text(plan)}, the execution {_event_text(run)}"
    starts = [[mark.event for mark in trace.steps] for trace in (planned, executed)]
    if starts[0] != starts[1]:
        return f"steps begin after events {starts[0]} in the dry run, after {starts[1]} in the execution"
    return ""


def _events(trace: LedgerTrace) -> Iterator[_Event]:
    starts = [mark.event for mark in trace.steps]
    for number, event in enumerate(trace.events):
        storage = event if event >= 0 else ~event
        yield event, trace.sizes[storage], trace.classes[storage], trace.units[storage], bisect_right(starts, number)


def _event_text(event: _Event | None) -> str:
    if event is None:
        return "has ended"
    storage, size, tensor_class, unit, step = event
    action = "allocates" if storage >= 0 else "releases"
    owner = f" of {unit}" if unit else ""
    when = f"in step {step}" if step else "during construction of the model"
    return f"{action} {format_bytes(size)} ({size} bytes) of {tensor_class}{owner} {when}"
