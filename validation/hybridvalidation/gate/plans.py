"""The check of planned records: every stack of a scenario is planned again and held to the record that answers it."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from hybridvalidation.gate.compare import compare, is_equal
from hybridvalidation.gate.gate import Finding, GateExit
from hybridvalidation.records.asked import differences
from hybridvalidation.records.environment import read_environment
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.records.program import program_digest, torch_series
from hybridvalidation.records.stack_run import StackRun
from hybridvalidation.records.store import RecordStore
from hybridvalidation.records.verification import Verification, append_verification, digest_of, read_verifications
from hybridvalidation.runs.job import Job, plan_figures
from hybridvalidation.runs.planning import plan_all
from hybridvalidation.runs.runner import jobs_of, run_from_records
from hybridvalidation.scenario import Scenario
from hybridvalidation.scenario_files import ScenarioFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioPlans:
    """What a scenario asks to be planned, and the records that answer."""

    scenario: Scenario
    jobs: tuple[Job, ...]
    records: Mapping[str, StackRun]
    """By stack; the newest that answers the same question."""
    earlier: tuple[StackRun, ...]
    """All dry runs of the scenario's file, oldest first."""

    @property
    def gone(self) -> list[str]:
        """Stacks that have a record and are not asked any more: their budget would be given up without a word."""
        return sorted({record.stack for record in self.earlier} - {*self.scenario.stacks})


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
    num_planned: int
    """Equal questions of several scenarios are planned once."""
    seconds: float


def read_plans(files: ScenarioFiles, names: Iterable[str], results: Path) -> list[ScenarioPlans]:
    """Return scenarios with their records; nothing is planned."""
    store, found = RecordStore(results / "records"), []
    for name in names:
        scenario = files.scenario(name)
        stacks = [files.stack(stack) for stack in scenario.stacks]
        records = run_from_records(scenario, stacks, store).records
        found.append(
            ScenarioPlans(
                scenario=scenario,
                jobs=tuple(jobs_of(scenario, stacks, ("dry_run",))),
                records={stack: record for (kind, stack), record in records.items() if kind == "dry_run"},
                earlier=tuple(record for record in store.read(scenario.name) if record.kind == "dry_run"),
            )
        )
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
        if done.scenarios.get(found.scenario.name) == digest_of(found.records.values())
        and len(found.records) == len(found.jobs)
        and not found.gone
    }


def verify_plans(
    plans: Sequence[ScenarioPlans], on_run: Callable[[str], None], *, processes: int | None
) -> PlansResult:
    """Plan every stack again, equal questions once, and compare.

    Args:
        plans: From ``read_plans``.
        on_run: Hears of each run that is done.
        processes: As of ``plan_all``.
    """
    begin = time.perf_counter()
    took = {record.key: record.duration_s for found in plans for record in found.records.values()}
    unique = {job.key: job for found in plans for job in found.jobs}
    fresh: dict[str, StackRun] = {}
    for job, run in plan_all(sorted(unique.values(), key=lambda job: -took.get(job.key, 0)), processes=processes):
        fresh[job.key] = run
        on_run(f"{job.scenario} {job.stack.name}")
    findings, changed, verified = list[Finding](), list[StackRun](), dict[str, str]()
    for found in plans:
        name, before = found.scenario.name, len(findings)
        for job in found.jobs:
            run = replace(fresh[job.key], scenario=name, stack=job.stack.name)
            of_job = _findings(found, job, run)
            findings += of_job
            changed += [run] if any(finding.settled_by_accept for finding in of_job) else []
        findings += [
            _finding(name, gone, GateExit.COULD_NOT_MEASURE, "has a record and is not asked any more")
            for gone in found.gone
        ]
        if len(findings) == before:
            verified[name] = digest_of(found.records.values())
    return PlansResult(
        findings=tuple(findings), changed=tuple(changed), verified=verified, num_planned=len(unique),
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
    name, stack, record = found.scenario.name, job.stack.name, found.records.get(job.stack.name)
    if run.memory is None:
        return [_finding(name, stack, GateExit.COULD_NOT_MEASURE, run.message, settled_by_accept=False)]
    if record is None or record.memory is None:
        why = _why_no_record(found, job) if record is None else f"its record has no figures ({record.message})"
        return [_finding(name, stack, GateExit.COULD_NOT_MEASURE, f"there is no record to compare with{why}")]
    if is_equal(record.memory, run.memory):
        return []
    made_with = torch_series(record.environment.torch)
    other = "" if made_with == torch_series() else f" (recorded with torch {made_with}, this is {torch_series()})"
    return [_finding(name, stack, code, message + other) for code, message in compare(record.memory, run.memory)]


def _why_no_record(found: ScenarioPlans, job: Job) -> str:
    """Return what is asked otherwise than in the newest record of the same name."""
    newest = next((record for record in reversed(found.earlier) if record.stack == job.stack.name), None)
    if newest is None or newest.outcome is Outcome.ERROR:
        return ""
    changes = differences({**newest.asked, **newest.plan}, {**job.asked, **plan_figures(job.stack.plan())})
    return f"; what is asked has changed: {'; '.join(changes)}" if changes else ""


def _finding(scenario: str, stack: str, code: GateExit, message: str, *, settled_by_accept: bool = True) -> Finding:
    return Finding(scenario=scenario, stack=stack, exit=code, message=message, settled_by_accept=settled_by_accept)
