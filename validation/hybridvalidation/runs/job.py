"""A job: one run of one scenario under one stack, and the record of how it went."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import torch

from hybridtrain.errors import DivergenceError
from hybridtrain.models.model_config import BatchWorkload, ModelConfig
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import SETTINGS, MemoryPlan
from hybridtrain.planning.dry_runs import RunSetup
from hybridtrain.planning.figures import MemoryFigures, figures_of_ranks
from hybridtrain.run.environment import read_environment
from hybridtrain.run.program import program_digest
from hybridtrain.stacks import Stack
from hybridtrain.virtual_gpu.cards.card import Card, Host
from hybridtrain.virtual_gpu.cards.links import World, find_link
from hybridvalidation.records.asked import key_of, values_of
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.records.stack_run import AccuracyFigures, MeasuredFigures, RunKind, StackRun
from hybridvalidation.scenario import AccuracySpec, Scenario

EVIDENCE_OF_KIND: dict[RunKind, Evidence] = {
    "dry_run": Evidence.PLANNED, "accuracy": Evidence.EXECUTED, "measured": Evidence.MEASURED,
}  # fmt: skip
"""How the figures of each kind of run are got."""


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
    """Everything that decides the result beside the plan, resolved to values."""
    key: str
    """Digest of what is run, whoever runs it with whatever version. Names of scenario and stack are not part of it."""


def make_job(kind: RunKind, scenario: Scenario, stack: Stack) -> Job:
    """Return the job with its key."""
    workload, world, accuracy = scenario.workload_of(stack.name), scenario.ranks(), scenario.accuracy
    model, card = scenario.model.resolve(), scenario.card.resolve()
    if kind == "accuracy":
        assert accuracy is not None, "asked of scenarios that train"
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


def run_and_record(job: Job, find: Callable[[], MemoryFigures | AccuracyFigures | MeasuredFigures]) -> StackRun:
    """Return the record of a run; an out-of-memory or diverged run is an outcome, everything else raises."""
    started, begin = datetime.now(UTC), time.perf_counter()
    outcome, message, found = Outcome.OK, "", None
    try:
        found = find()
    except DivergenceError as error:
        outcome, message = Outcome.DIVERGED, str(error)
    except torch.OutOfMemoryError as error:
        outcome, message = Outcome.OUT_OF_MEMORY, str(error) or "the card refused a request and did not say which"
    memory = found if isinstance(found, MemoryFigures) else None
    if memory is not None and not memory.fits:
        outcome, message = Outcome.OUT_OF_MEMORY, memory.shortage(job.host.shared(job.world.local_size))
    return StackRun(
        key=job.key, kind=job.kind, scenario=job.scenario, stack=job.stack.name, evidence=EVIDENCE_OF_KIND[job.kind],
        outcome=outcome, message=message, started_at=started.isoformat(timespec="seconds"),
        duration_s=round(time.perf_counter() - begin, 3), environment=read_environment(), program=program_digest(),
        asked=job.asked, plan=plan_figures(job.stack.plan()), memory=memory,
        accuracy=found if isinstance(found, AccuracyFigures) else None,
        measured=found if isinstance(found, MeasuredFigures) else None,
    )  # fmt: skip


def run_dry(job: Job) -> StackRun:
    """Plan what a job asks for."""
    plan = job.stack.plan()
    setup = RunSetup(
        model=job.model, plan=plan, card=job.card, workload=job.workload.micro_batch(plan), host=job.host,
        config=job.stack.training(), world=job.world,
    )  # fmt: skip
    return run_and_record(job, lambda: figures_of_ranks(setup.dry_run_ranks()))


def plan_figures(plan: MemoryPlan) -> dict[str, str]:
    """Return the plan in force during ordinary steps, as ``path: value``; of a cycle also what differs in phases."""
    full = plan.for_phase(Phase.FULL)
    values = full.values()
    kept = {
        path: str(value)
        for path, value in values.items()
        if not (SETTINGS[path].omit_if_default and value == SETTINGS[path].default)
    }
    if not full.history_tensors:
        return kept
    return kept | {
        f"{phase}.{path}": str(value)
        for phase in Phase
        for path, value in plan.for_phase(phase).values().items()
        if value != values[path]
    }
