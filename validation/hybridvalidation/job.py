"""A job: one run of one scenario under one stack, and the key of all that its figures depend on."""

from dataclasses import dataclass
from typing import Literal

import torch

from hybridtrain.config.encode import digest
from hybridtrain.data.corpus import Corpus
from hybridvalidation.environment import read_environment, source_digest
from hybridvalidation.figures import plan_figures
from hybridvalidation.scenario import AccuracySpec, BatchWorkload, CardSpec, ModelSpec, Scenario, Stack

JobKind = Literal["dry_run", "accuracy", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run."""

    kind: JobKind
    scenario: str
    stack: Stack
    model: ModelSpec
    card: CardSpec
    workload: BatchWorkload
    accuracy: AccuracySpec | None
    key: str


@dataclass(frozen=True, slots=True)
class _Key:
    """What the figures of a run depend on. Names of scenario and stack are not among them."""

    kind: str
    inputs: tuple[str, ...]
    plan: dict[str, str]
    source_digest: str
    torch: str
    machine: str


def make_job(kind: JobKind, scenario: Scenario, stack: Stack, corpus: Corpus) -> Job:
    """Return the job with its key."""
    inputs: tuple[object, ...] = (scenario.model, scenario.card, scenario.workload)
    machine = ""
    if kind == "accuracy":
        inputs = (scenario.accuracy,)
    if kind != "dry_run":
        environment = read_environment()
        machine = f"{environment.cpu} {environment.int8_update} {environment.gpu} {corpus.digest}"
    key = digest(
        _Key(
            kind,
            tuple(digest(item) for item in inputs),
            plan_figures(stack.plan()),
            source_digest(),
            torch.__version__,
            machine,
        )
    )
    return Job(
        kind=kind, scenario=scenario.name, stack=stack, model=scenario.model, card=scenario.card,
        workload=scenario.workload, accuracy=scenario.accuracy if kind == "accuracy" else None, key=key,
    )  # fmt: skip
