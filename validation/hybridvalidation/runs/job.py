"""A job: one run of one scenario under one stack, and the key of all that its figures depend on."""

from dataclasses import dataclass
from typing import Literal

import torch

from hybridtrain.config.encode import digest
from hybridtrain.data.corpus import Corpus
from hybridtrain.virtual_gpu.card import Host
from hybridvalidation.records.environment import read_environment, source_digest
from hybridvalidation.runs.figures import plan_figures
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
    host: Host
    accuracy: AccuracySpec | None
    subject: str
    """Digest of what is run."""
    key: str
    """Digest of what is run, with which source, libraries and machine."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is run. Names of scenario and stack are not part of it."""

    kind: str
    inputs: tuple[str, ...]
    plan: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Key:
    """What the figures depend on."""

    subject: str
    source_digest: str
    torch: str
    machine: str


def subject_of(kind: JobKind, scenario: Scenario, stack: Stack) -> str:
    """Return the digest of what a run of this kind is about."""
    inputs: tuple[object, ...] = (scenario.model, scenario.card, scenario.workload_of(stack.name), scenario.host)
    if kind == "accuracy":
        inputs = () if scenario.accuracy is None else (scenario.accuracy,)
    return digest(_Subject(kind, tuple(digest(item) for item in inputs), plan_figures(stack.plan())))


def make_job(kind: JobKind, scenario: Scenario, stack: Stack, corpus: Corpus) -> Job:
    """Return the job with its key."""
    machine = ""
    if kind != "dry_run":
        environment = read_environment()
        machine = f"{environment.cpu} {environment.int8_update} {environment.gpu} {corpus.digest}"
    if kind == "measured":
        machine += f" {environment.allocator_conf} {environment.cuda}"
    subject = subject_of(kind, scenario, stack)
    key = digest(_Key(subject, source_digest(), torch.__version__, machine))
    return Job(
        kind=kind, scenario=scenario.name, stack=stack, model=scenario.model, card=scenario.card,
        workload=scenario.workload_of(stack.name), host=scenario.host,
        accuracy=scenario.accuracy if kind == "accuracy" else None,
        subject=subject, key=key,
    )  # fmt: skip
