"""Runs of a scenario under its stacks: dry runs, proxies trained on the CPU, steps measured on a CUDA card."""

import gc
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch

from hybridtrain.config.decode import decode
from hybridtrain.config.encode import to_json
from hybridtrain.data.corpus import embedded_corpus
from hybridtrain.errors import DivergenceError
from hybridtrain.models.model_config import BatchWorkload, ModelConfig
from hybridtrain.planning.dry_runs import DryRunInputs
from hybridtrain.planning.figures import MemoryFigures, figures_of_ranks
from hybridtrain.progress import progress_bar
from hybridtrain.run.environment import read_environment
from hybridtrain.run.program import program_digest
from hybridtrain.stacks import Stack
from hybridtrain.virtual_gpu.cards.card import Card, Host
from hybridtrain.virtual_gpu.cards.links import World, find_link
from hybridvalidation.child import Child, ChildResult
from hybridvalidation.experiment import Experiment, begin_header, child_header, in_children
from hybridvalidation.experiments.accuracy import train_proxies
from hybridvalidation.experiments.measure import measure_on_cuda
from hybridvalidation.records.asked import key_of, plan_figures, values_of
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.records.stack_run import RunKind, StackRun
from hybridvalidation.records.store import RecordStore
from hybridvalidation.scenario import AccuracySpec, Scenario

_EVIDENCE: Mapping[RunKind, Evidence] = {
    "dry_run": Evidence.PLANNED, "accuracy": Evidence.EXECUTED, "measured": Evidence.MEASURED,
}  # fmt: skip
_JOBS_OF_PROCESS = 3
"""Fewest dry runs per process; with fewer the start-up costs more than it saves."""
_ALLOCATIONS_BETWEEN_COLLECTIONS = 200_000
"""Garbage collection threshold: a dry run's millions of records all live to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run."""

    kind: RunKind
    scenario: str
    stack: Stack
    model: ModelConfig
    card: Card
    workload: BatchWorkload
    host: Host
    world: World
    accuracy: AccuracySpec | None
    asked: Mapping[str, str]
    """All values besides the plan that affect the result."""
    key: str
    """Digest of the job, independent of program version and of scenario and stack names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioRun:
    """The records of one scenario, by kind and stack."""

    scenario: Scenario
    stacks: dict[str, Stack]
    records: dict[tuple[RunKind, str], StackRun]
    num_cached: int
    """Number of runs read from records."""

    def get(self, kind: RunKind, stack: str) -> StackRun | None:
        """Return the record of a run; None if missing or failed."""
        return self.records.get((kind, stack))

    def memory(self, stack: str) -> MemoryFigures | None:
        """Return the figures of a stack's dry run; None if missing."""
        record = self.get("dry_run", stack)
        return None if record is None else record.memory

    @property
    def rank_host(self) -> Host:
        """One rank's share of the host, as figures are per rank."""
        return self.scenario.host.shared(self.scenario.ranks().local_size)

    @property
    def num_made(self) -> int:
        """Number of new records."""
        return len(self.records) - self.num_cached


def make_job(kind: RunKind, scenario: Scenario, stack: Stack) -> Job:
    """Return the job with its key."""
    workload, world, accuracy = scenario.workload_of(stack.name), scenario.ranks(), scenario.accuracy
    model, card = scenario.model.resolve(), scenario.card.resolve()
    if kind == "accuracy":
        assert accuracy is not None, "a scenario without [accuracy]"
        asked = values_of(accuracy=accuracy, optimizer=stack.training().optimizer)
    else:
        asked = values_of(model=model, card=card, workload=workload, host=scenario.host)
        asked |= values_of(optimizer=stack.training().optimizer)
        if world.size > 1:
            asked |= {"world.size": str(world.size), "world.cards_per_machine": str(world.cards_per_machine)}
            asked |= values_of(link=find_link(world.link))
            asked |= values_of(network=find_link(world.network)) if world.size > world.cards_per_machine else {}
    return Job(
        kind=kind, scenario=scenario.name, stack=stack, model=model, card=card, workload=workload, host=scenario.host,
        world=world, accuracy=accuracy if kind == "accuracy" else None, asked=asked,
        key=key_of({"kind": kind}, asked, plan_figures(stack.plan())),
    )  # fmt: skip


def jobs_of(scenario: Scenario, stacks: Iterable[Stack], kinds: Iterable[RunKind]) -> list[Job]:
    """Return the jobs of some kinds."""
    stacks = list(stacks)
    return [
        make_job(kind, scenario, stack)
        for kind in kinds
        for stack in stacks
        if kind != "accuracy" or scenario.trains(stack.name)
    ]


def run_from_records(scenario: Scenario, stacks: Iterable[Stack], store: RecordStore) -> ScenarioRun:
    """Return the newest matching record of every kind and stack; nothing is run."""
    stacks = list(stacks)
    newest = {record.key: record for record in store.read(scenario.name)}
    records = _by_place(jobs_of(scenario, stacks, get_args(RunKind)), newest)
    return ScenarioRun(
        scenario=scenario, stacks={stack.name: stack for stack in stacks}, records=records, num_cached=len(records)
    )


def _by_place(jobs: Iterable[Job], answers: Mapping[str, StackRun]) -> dict[tuple[RunKind, str], StackRun]:
    return {(job.kind, job.stack.name): answers[job.key] for job in jobs if job.key in answers}


def run_scenario(
    scenario: Scenario, stacks: Iterable[Stack], known: Sequence[RecordStore], store: RecordStore, *, progress: bool,
    planned_only: bool = False,
) -> ScenarioRun:  # fmt: skip
    """Run jobs without a record; return all records. Records of any program version count; ``gate`` verifies them.

    ``known``: stores to search, in order; ``store``: store for new records. ``planned_only``: make dry runs only; other
    kinds use their newest record of any torch version.
    """
    stacks = list(stacks)
    kinds: list[RunKind] = ["dry_run"] if planned_only else ["dry_run", "accuracy"]
    if torch.cuda.is_available() and not planned_only:
        kinds.append("measured")
    jobs = jobs_of(scenario, stacks, kinds)
    experiment = Experiment[Job, StackRun](
        name=scenario.name, key=lambda job: job.key, run=_run_all, file=lambda run: f"{run.scenario}.jsonl",
        line=lambda job, _: f"{job.kind} {job.stack.name}", holds=_holds,
    )  # fmt: skip
    older = [record for place in reversed(known) for record in place.read(scenario.name)]
    answers = _same_corpus(jobs, {record.key: record for record in older if _holds(record)})
    missing = [job for job in jobs if job.key not in answers]
    with progress_bar(missing, desc=scenario.name, unit="run", shown=progress) as bar:
        made = experiment.run_missing(
            jobs, answers.values(), records=store.folder, say=bar.set_postfix_str, on_record=lambda _: bar.update()
        )
    records = _by_place(jobs, made.answers)
    if planned_only:
        every = [run_from_records(scenario, stacks, place).records for place in (*known, store)]
        records = {key: record for found in every for key, record in found.items()} | records
    return ScenarioRun(
        scenario=scenario, stacks={stack.name: stack for stack in stacks}, records=records,
        num_cached=len(records) - len(made.new),
    )  # fmt: skip


def _holds(record: StackRun) -> bool:
    """Return whether a record is valid for its job; a measurement belongs to its card."""
    if record.why_repeat() or record.kind != "measured":
        return not record.why_repeat()
    here, there = read_environment(), record.environment
    return (here.gpu, here.cuda, here.allocator_conf) == (there.gpu, there.cuda, there.allocator_conf)


def _same_corpus(jobs: Sequence[Job], found: Mapping[str, StackRun]) -> Mapping[str, StackRun]:
    """Drop proxies of other texts: the corpus is that of a machine's Python, and stacks are compared on one."""
    keys = [job.key for job in jobs if job.kind == "accuracy"]
    corpora = {figures.corpus_digest for key in keys if key in found and (figures := found[key].accuracy) is not None}
    if len(corpora) + any(key not in found for key in keys) < 2:
        return found
    here = embedded_corpus().digest
    return {
        key: record for key, record in found.items() if record.accuracy is None or record.accuracy.corpus_digest == here
    }


def _run_all(jobs: Sequence[Job]) -> Iterator[tuple[Job, StackRun]]:
    """Yield each job with its record: CPU jobs side by side, one core each, then the card's jobs one by one."""
    yield from plan_all([job for job in jobs if job.kind == "dry_run"])
    yield from in_children(start_run, run_record, os.cpu_count() or 1)([job for job in jobs if job.kind == "accuracy"])
    yield from in_children(start_run, run_record, 1)([job for job in jobs if job.kind == "measured"])


def start_run(job: Job) -> Child[StackRun]:
    """Run a job in a child process."""
    return Child("hybridvalidation.experiments.stack_runs:run_job", job, StackRun)


def run_record(job: Job, ended: ChildResult[StackRun]) -> StackRun:
    """Return the record of a finished job; a crash has the outcome ``error``."""
    return ended.answer or _record(job, child_header(ended))


def run_job(job: Job) -> StackRun:
    """Run a job in this process; out-of-memory and divergence are outcomes, other errors are raised."""
    header, outcome, message = begin_header(), Outcome.OK, ""
    memory, accuracy, measured = None, None, None
    plan, training = job.stack.plan(), job.stack.training()
    try:
        if job.kind == "dry_run":
            setup = DryRunInputs(
                model=job.model, plan=plan, card=job.card, workload=job.workload.micro_batch(plan), host=job.host,
                config=training, world=job.world,
            )  # fmt: skip
            memory = figures_of_ranks(setup.dry_run_ranks())
            if not memory.fits:
                outcome, message = Outcome.OUT_OF_MEMORY, memory.shortage(job.host.shared(job.world.local_size))
        elif job.kind == "accuracy":
            assert job.accuracy is not None, "an accuracy job without its specification"
            optimizer = job.stack.training(job.accuracy.lr).optimizer
            accuracy = train_proxies(job.accuracy, plan, embedded_corpus(), optimizer)
        else:
            measured = measure_on_cuda(job.model, plan, job.card, job.workload, embedded_corpus(), training)
    except DivergenceError as error:
        outcome, message = Outcome.DIVERGED, str(error)
    except torch.OutOfMemoryError as error:
        outcome, message = Outcome.OUT_OF_MEMORY, str(error) or "out of memory without a failed request"
    ended = header() | {"outcome": outcome, "message": message}
    return _record(job, ended, memory=memory, accuracy=accuracy, measured=measured)


def _record(job: Job, header: Mapping[str, Any], **figures: Any) -> StackRun:
    return StackRun(
        key=job.key, kind=job.kind, scenario=job.scenario, stack=job.stack.name, evidence=_EVIDENCE[job.kind],
        asked=job.asked, plan=plan_figures(job.stack.plan()), **header, **figures,
    )  # fmt: skip


def plan_all(jobs: Sequence[Job], *, processes: int | None = None) -> Iterator[tuple[Job, StackRun]]:
    """Yield each dry run as it finishes; a failed one has the outcome ``error``.

    Args:
        jobs: Jobs, the longest first.
        processes: Parallel processes; 1: this process. None: one per core, fewer for few jobs.
    """
    width = min(processes or os.cpu_count() or 1, -(-len(jobs) // _JOBS_OF_PROCESS))
    if width <= 1:
        for job in jobs:
            yield job, _plan(job)
        return
    program_digest()  # now: what is edited while this runs must not count as what ran
    pool = ProcessPoolExecutor(width, mp_context=multiprocessing.get_context("spawn"), initializer=_set_up)
    folder = TemporaryDirectory(prefix="hybridtrain-plans-")
    try:
        paths = [Path(folder.name, f"{number}.json") for number in range(len(jobs))]
        waiting = {pool.submit(_plan_to, *pair): pair for pair in zip(jobs, paths, strict=True)}
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                job, path = waiting.pop(future)
                yield job, _answer(job, future, path)
        pool.shutdown()
    finally:  # left early: nobody wants the rest
        for process in multiprocessing.active_children():
            process.kill()
        pool.shutdown(cancel_futures=True)  # waits, so that its thread alone reaps them
        folder.cleanup()


def _set_up() -> None:
    """Set up a process: one thread, no own Ctrl-C, and an end when its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    program_digest()
    parent = multiprocessing.parent_process()
    assert parent is not None, "a child without a connection"
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait_for_any([sentinel])
    os._exit(1)


def _plan(job: Job) -> StackRun:
    before = gc.get_threshold()
    gc.set_threshold(_ALLOCATIONS_BETWEEN_COLLECTIONS, *before[1:])
    try:
        return run_job(job)
    except Exception as error:  # noqa: BLE001  whatever it is, the record names it
        return _failed(job, f"{type(error).__name__}: {error}")
    finally:
        gc.set_threshold(*before)


def _plan_to(job: Job, path: Path) -> None:
    """Write a plan to a file: a process killed while it sends much leaves the pool waiting for the rest for ever."""
    path.write_text(to_json(_plan(job)), encoding="ascii")


def _answer(job: Job, future: Future[None], path: Path) -> StackRun:
    try:
        future.result()
        return decode(StackRun, json.loads(path.read_text(encoding="ascii")), source=path.name)
    except BrokenProcessPool:
        return _failed(job, "a planning process was killed, possibly because memory ran out; --jobs 1 needs less")


def _failed(job: Job, message: str) -> StackRun:
    return _record(job, begin_header()() | {"outcome": Outcome.ERROR, "message": message})
