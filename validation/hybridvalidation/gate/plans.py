"""The check of planned records: every stack of a scenario is planned again and held to the record that answers it."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from hybridtrain.config.encode import digest
from hybridtrain.run.environment import read_environment
from hybridtrain.run.program import program_digest, torch_series
from hybridvalidation.experiments.stack_runs import Job, jobs_of, plan_all, run_from_records
from hybridvalidation.gate.compare import compare, is_equal
from hybridvalidation.gate.gate import Finding, GateExit
from hybridvalidation.records.asked import differences, key_of
from hybridvalidation.records.stack_run import StackRun
from hybridvalidation.records.store import RecordStore
from hybridvalidation.records.verification import Verification, append_verification, read_verifications
from hybridvalidation.scenario import Scenario
from hybridvalidation.scenario_files import ScenarioFiles

_NO_RECORD = "there is no record to compare with; --accept plans it and keeps what it finds"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioPlans:
    """What a scenario asks to be planned, and the records that answer."""

    scenario: Scenario
    jobs: tuple[Job, ...]
    records: Mapping[str, StackRun]
    """What each stack is held to: the newest of its name, if it can be one of the same question, else that of another
    name which answers the same."""
    earlier: tuple[StackRun, ...]
    """All dry runs of the scenario's file that found figures, oldest first."""

    @property
    def gone(self) -> list[str]:
        """Stacks that have a record and are not asked any more: their budget would be given up without a word."""
        held = {record.stack for record in self.records.values()}  # one that was renamed is held to its old name's
        return sorted({record.stack for record in self.earlier} - {*self.scenario.stacks} - held)

    @property
    def state(self) -> str:
        """Digest of questions and records."""
        return key_of(
            {job.stack.name: job.key for job in self.jobs},
            {stack: digest(record) for stack, record in self.records.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlansResult:
    """What planning again found."""

    findings: tuple[Finding, ...]
    changed: tuple[StackRun, ...]
    """Runs of today that differ from their record, or have none."""
    gone: tuple[str, ...]
    """Scenarios with records of stacks that are not asked any more."""
    verified: Mapping[str, str]
    """Digest of the records of each scenario that was found again as a whole."""
    num_compared: int
    """Stacks that were planned and had a record."""
    num_planned: int
    """Equal questions of several scenarios are planned once."""
    seconds: float


def read_plans(files: ScenarioFiles, names: Iterable[str], results: Path) -> list[ScenarioPlans]:
    """Return scenarios with their records; nothing is planned."""
    store, found = RecordStore(results / "records"), []
    for name in names:
        scenario = files.scenario(name)
        stacks = [files.stack(stack) for stack in scenario.stacks]
        jobs = tuple(jobs_of(scenario, stacks, ("dry_run",)))
        earlier = tuple(run for run in store.read(scenario.name) if run.kind == "dry_run" and run.memory is not None)
        by_key, by_name = {run.key: run for run in earlier}, {run.stack: run for run in earlier}
        by_both = {(run.key, run.stack): run for run in earlier}
        held = {
            job.stack.name: by_both.get((job.key, job.stack.name)) or by_name.get(job.stack.name) or by_key.get(job.key)
            for job in jobs
        }
        records = {stack: run for stack, run in held.items() if run is not None}
        found.append(ScenarioPlans(scenario=scenario, jobs=jobs, records=records, earlier=earlier))
    return found


def known_verifications(plans: Sequence[ScenarioPlans], results: Path) -> dict[str, Verification]:
    """Return by scenario the check by which this very program, with this torch, found all of its records again."""
    here = [
        done
        for done in read_verifications(results / "records")
        if done.program == program_digest() and torch_series(done.environment.torch) == torch_series()
    ]
    return {
        found.scenario.name: done
        for found in plans
        for done in here
        if done.scenarios.get(found.scenario.name) == found.state
    }


def jobs_to_plan(plans: Iterable[ScenarioPlans], *, plans_new: bool) -> list[Job]:
    """Return what is planned again, equal questions once; ``plans_new``: what has no record to compare with too."""
    unique = {job.key: job for found in plans for job in found.jobs if plans_new or job.stack.name in found.records}
    return list(unique.values())


def verify_plans(
    plans: Sequence[ScenarioPlans], jobs: Iterable[Job], on_run: Callable[[str], None], *, processes: int | None
) -> PlansResult:
    """Plan jobs again, and compare every stack whose question is among them.

    Args:
        plans: From ``read_plans``.
        jobs: From ``jobs_to_plan``.
        on_run: Hears of each run that is done.
        processes: As of ``plan_all``.
    """
    begin = time.perf_counter()
    took = {record.key: record.duration_s for found in plans for record in found.records.values()}
    fresh: dict[str, StackRun] = {}
    for job, run in plan_all(sorted(jobs, key=lambda job: -took.get(job.key, 0)), processes=processes):
        fresh[job.key] = run
        on_run(f"{job.scenario} {job.stack.name}")
    findings, changed, verified = list[Finding](), list[StackRun](), dict[str, str]()
    for found in plans:
        name, before = found.scenario.name, len(findings)
        for job in found.jobs:
            if job.key not in fresh:
                findings.append(_finding(name, job.stack.name, GateExit.COULD_NOT_MEASURE, _NO_RECORD))
                continue
            run = replace(fresh[job.key], scenario=name, stack=job.stack.name)
            of_job = _findings(found, job, run)
            findings += of_job
            changed += [run] if any(finding.settled_by_accept for finding in of_job) else []
        findings += [
            _finding(name, gone, GateExit.COULD_NOT_MEASURE, "has a record and is not asked any more")
            for gone in found.gone
        ]
        if len(findings) == before:
            verified[name] = found.state
    return PlansResult(
        findings=tuple(findings), changed=tuple(changed), verified=verified, num_planned=len(fresh),
        num_compared=sum(job.key in fresh and job.stack.name in found.records for found in plans for job in found.jobs),
        gone=tuple(found.scenario.name for found in plans if found.gone), seconds=time.perf_counter() - begin,
    )  # fmt: skip


def keep_verification(results: Path, done: PlansResult) -> Path:
    """Append a line that says which program found which records again; return its file."""
    return append_verification(
        results / "records",
        Verification(
            key="planned records", started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            duration_s=round(done.seconds, 3), environment=read_environment(), program=program_digest(),
            scenarios=done.verified,
        ),
    )  # fmt: skip


def accept_plans(files: ScenarioFiles, done: PlansResult, results: Path, reason: str) -> list[Path]:
    """Append today's runs where they differ, and drop records of stacks that are not asked any more."""
    store = RecordStore(results / "records")
    for run in done.changed:
        is_known = any(record.key == run.key for record in store.read(run.scenario))
        store.append(replace(run, accepted=reason if is_known else ""))
    for name in done.gone:
        scenario = files.scenario(name)
        shown = run_from_records(scenario, [files.stack(stack) for stack in scenario.stacks], store)
        store.prune(name, list(shown.records.values()))
    names = sorted({run.scenario for run in done.changed} | {*done.gone})
    return [store.folder / f"{name}.jsonl" for name in names]


def _findings(found: ScenarioPlans, job: Job, run: StackRun) -> list[Finding]:
    """Return what sets a run apart from what it is held to."""
    name, stack, record = found.scenario.name, job.stack.name, found.records.get(job.stack.name)
    if run.memory is None:
        return [_finding(name, stack, GateExit.COULD_NOT_MEASURE, run.message, settled_by_accept=False)]
    if record is None or record.memory is None:
        return [_finding(name, stack, GateExit.COULD_NOT_MEASURE, _NO_RECORD)]
    remarks = ""
    if record.key != run.key:
        changes = differences({**record.asked, **record.plan}, {**run.asked, **run.plan})
        remarks += f"; what is asked has changed: {', '.join(changes)}"
    made_with = torch_series(record.environment.torch)
    if made_with != torch_series():
        remarks += f"; recorded with torch {made_with}, this is {torch_series()}"
    if is_equal(record.memory, run.memory):
        same = f"the figures are those of the record{remarks}"
        return [] if record.key == run.key else [_finding(name, stack, GateExit.COULD_NOT_MEASURE, same)]
    return [_finding(name, stack, code, message + remarks) for code, message in compare(record.memory, run.memory)]


def _finding(scenario: str, stack: str, code: GateExit, message: str, *, settled_by_accept: bool = True) -> Finding:
    return Finding(scenario=scenario, stack=stack, exit=code, message=message, settled_by_accept=settled_by_accept)
