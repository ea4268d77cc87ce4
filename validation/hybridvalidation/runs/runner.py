"""All jobs of a scenario, none twice: what has a record is read instead of repeated."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from hybridtrain.data.corpus import embedded_corpus
from hybridtrain.planning.figures import MemoryFigures
from hybridtrain.progress import progress_bar
from hybridtrain.run.environment import Environment, read_environment
from hybridtrain.stacks import Stack
from hybridtrain.virtual_gpu.cards.card import Host
from hybridvalidation.records.stack_run import RunKind, StackRun
from hybridvalidation.records.store import RecordStore
from hybridvalidation.runs.child import Child, Ended, run_side_by_side
from hybridvalidation.runs.job import Job, make_job
from hybridvalidation.runs.planning import failed_run, plan_all
from hybridvalidation.scenario import Scenario

_WORK: Mapping[RunKind, str] = {
    "accuracy": "hybridvalidation.runs.accuracy:run_accuracy",
    "measured": "hybridvalidation.runs.measure:run_measured",
}
"""What a process of its own does for each kind; dry runs share processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioRun:
    """The records of one scenario, by kind and stack."""

    scenario: Scenario
    stacks: dict[str, Stack]
    records: dict[tuple[RunKind, str], StackRun]
    num_cached: int
    """Of them read, not made."""

    def get(self, kind: RunKind, stack: str) -> StackRun | None:
        """Return a record if that run was made and ended well enough to have one."""
        return self.records.get((kind, stack))

    def memory(self, stack: str) -> MemoryFigures | None:
        """Return the figures of a stack's dry run, if it has some."""
        record = self.get("dry_run", stack)
        return None if record is None else record.memory

    @property
    def rank_host(self) -> Host:
        """The machine as one rank finds it, for figures are those of a rank."""
        return self.scenario.host.shared(self.scenario.ranks().local_size)

    @property
    def num_made(self) -> int:
        """Records that are new."""
        return len(self.records) - self.num_cached


def run_scenario(
    scenario: Scenario,
    stacks: Iterable[Stack],
    known: Sequence[RecordStore],
    store: RecordStore,
    *,
    progress: bool,
    planned_only: bool = False,
) -> ScenarioRun:
    """Run what has no record yet and return everything. Any program's record answers; ``gate`` holds it to this one.

    Args:
        scenario: What is run.
        stacks: Its stacks.
        known: Where records are looked for, the first first; none: every run is made.
        store: Where new records are written.
        progress: Whether a bar is shown.
        planned_only: Make dry runs alone; of all else the newest record stands, whatever torch made it.
    """
    stacks = list(stacks)
    kinds: list[RunKind] = ["dry_run"] if planned_only else ["dry_run", "accuracy"]
    if torch.cuda.is_available() and not planned_only:
        kinds.append("measured")
    jobs = jobs_of(scenario, stacks, kinds)
    found = _same_corpus(jobs, _valid(scenario, jobs, known))
    records = {(job.kind, job.stack.name): found[job.key] for job in jobs if job.key in found}
    missing = [job for job in jobs if job.key not in found]
    with progress_bar(missing, desc=scenario.name, unit="run", shown=progress) as bar:
        for job, record in _run_all(missing):
            store.append(record)
            records[job.kind, job.stack.name] = record
            bar.set_postfix_str(f"{job.kind} {job.stack.name}")
            bar.update()
    if planned_only:
        older = [run_from_records(scenario, stacks, place).records for place in (*known, store)]
        records = {key: record for found in older for key, record in found.items()} | records
    return ScenarioRun(
        scenario=scenario, stacks={stack.name: stack for stack in stacks}, records=records,
        num_cached=len(records) - len(missing),
    )  # fmt: skip


def run_from_records(scenario: Scenario, stacks: Iterable[Stack], store: RecordStore) -> ScenarioRun:
    """Return the newest record of every kind and stack as the files describe them now; nothing is run."""
    stacks = list(stacks)
    newest = {record.key: record for record in store.read(scenario.name)}
    jobs = jobs_of(scenario, stacks, get_args(RunKind))
    records = {(job.kind, job.stack.name): newest[job.key] for job in jobs if job.key in newest}
    return ScenarioRun(
        scenario=scenario, stacks={stack.name: stack for stack in stacks}, records=records, num_cached=len(records)
    )


def jobs_of(scenario: Scenario, stacks: Iterable[Stack], kinds: Iterable[RunKind]) -> list[Job]:
    """Return every run of some kinds."""
    stacks = list(stacks)
    return [
        make_job(kind, scenario, stack)
        for kind in kinds
        for stack in stacks
        if kind != "accuracy" or scenario.trains(stack.name)
    ]


def run_in_process(job: Job) -> StackRun:
    """Run a job in a fresh process; a crash becomes a record with the outcome ``error``."""
    return _recorded(job, _start(job).wait())


def _valid(scenario: Scenario, jobs: Sequence[Job], known: Sequence[RecordStore]) -> dict[str, StackRun]:
    """Return the newest valid record of each job that has one, by key."""
    here = read_environment() if any(job.kind == "measured" for job in jobs) else None
    found: dict[str, StackRun] = {}
    for store in known:
        valid = {
            record.key: record
            for record in store.read(scenario.name)
            if not record.why_repeat() and (record.kind != "measured" or _card(record.environment) == _card(here))
        }
        found = valid | found
    return found


def _card(environment: Environment | None) -> tuple[str, ...] | None:
    """Return what a measurement belongs to."""
    return None if environment is None else (environment.gpu, environment.cuda, environment.allocator_conf)


def _same_corpus(jobs: Sequence[Job], found: dict[str, StackRun]) -> dict[str, StackRun]:
    """Drop proxies that cannot be compared: the text is that of a machine's Python, and stacks are compared on one."""
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
    trained = [job for job in jobs if job.kind == "accuracy"]
    for job, ended in run_side_by_side(trained, _start, os.cpu_count() or 1):
        yield job, _recorded(job, ended)
    for job in jobs:
        if job.kind == "measured":
            yield job, run_in_process(job)


def _start(job: Job) -> Child[StackRun]:
    return Child(_WORK[job.kind], job, StackRun)


def _recorded(job: Job, ended: Ended[StackRun]) -> StackRun:
    return ended.answer or failed_run(job, ended.fault, ended.seconds)
