"""Check of planned records: every stack of a scenario is planned again and compared with its record."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from hybridtrain.config.encode import digest
from hybridtrain.progress import progress_bar
from hybridtrain.run.environment import read_environment
from hybridtrain.run.program import program_digest, torch_series
from hybridvalidation.experiments.stack_runs import Job, jobs_of, plan_all, run_from_records
from hybridvalidation.gate.compare import compare, is_equal
from hybridvalidation.gate.gate import Comparison, Finding, GateExit, Order
from hybridvalidation.records.asked import differences, key_of
from hybridvalidation.records.stack_run import StackRun
from hybridvalidation.records.store import RecordStore
from hybridvalidation.records.verification import Verification, append_verification, read_verifications
from hybridvalidation.scenario import Scenario
from hybridvalidation.scenario_files import ScenarioFiles

_NO_RECORD = "there is no record to compare with; --accept plans and records it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioPlans:
    """Planning jobs of a scenario, and their records."""

    scenario: Scenario
    jobs: tuple[Job, ...]
    records: Mapping[str, StackRun]
    """Reference record of each stack: the newest with its name if the job is equal, else one of another name with an
    equal job."""
    gone: tuple[str, ...]
    """Stacks with a record that are no longer planned, whose budget would be lost silently."""

    @property
    def state(self) -> str:
        """Digest of jobs and records."""
        return key_of(
            {job.stack.name: job.key for job in self.jobs},
            {stack: digest(record) for stack, record in self.records.items()},
        )

    def findings(self, job: Job, run: StackRun | None) -> list[Finding]:
        """Return the differences of a run from its reference; None: the run is missing."""
        record = self.records.get(job.stack.name)
        if run is not None and run.memory is None:
            return [self.finding(job.stack.name, run.message, settled_by_accept=False)]
        if run is None or run.memory is None or record is None or record.memory is None:
            return [self.finding(job.stack.name, _NO_RECORD)]
        remarks = ""
        if record.key != run.key:
            changes = differences({**record.asked, **record.plan}, {**run.asked, **run.plan})
            remarks += f"; the job has changed: {', '.join(changes)}"
        made_with = torch_series(record.environment.torch)
        if made_with != torch_series():
            remarks += f"; recorded with torch {made_with}, this is {torch_series()}"
        if is_equal(record.memory, run.memory):
            same = f"figures equal the record{remarks}"
            return [] if record.key == run.key else [self.finding(job.stack.name, same)]
        changed = compare(record.memory, run.memory)
        return [self.finding(job.stack.name, message + remarks, code) for code, message in changed]

    def finding(
        self, stack: str, message: str, code: GateExit = GateExit.COULD_NOT_MEASURE, *, settled_by_accept: bool = True
    ) -> Finding:
        """Return a finding about a stack."""
        return Finding(
            scenario=self.scenario.name, stack=stack, exit=code, message=message, settled_by_accept=settled_by_accept
        )


def read_plans(files: ScenarioFiles, names: Iterable[str], results: Path) -> list[ScenarioPlans]:
    """Return scenarios with their records; nothing is planned."""
    store, found = RecordStore(results / "records"), []
    for name in names:
        scenario = files.scenario(name)
        stacks = [files.stack(stack) for stack in scenario.stacks]
        jobs = tuple(jobs_of(scenario, stacks, ("dry_run",)))
        earlier = [run for run in store.read(scenario.name) if run.kind == "dry_run" and run.memory is not None]
        by_key, by_name = {run.key: run for run in earlier}, {run.stack: run for run in earlier}
        by_both = {(run.key, run.stack): run for run in earlier}
        held = {
            job.stack.name: by_both.get((job.key, job.stack.name)) or by_name.get(job.stack.name) or by_key.get(job.key)
            for job in jobs
        }
        records = {stack: run for stack, run in held.items() if run is not None}
        renamed = {record.stack for record in records.values()}
        gone = tuple(sorted({*by_name} - {*scenario.stacks} - renamed))
        found.append(ScenarioPlans(scenario=scenario, jobs=jobs, records=records, gone=gone))
    return found


def compare_plans(files: ScenarioFiles, plans: Sequence[ScenarioPlans], order: Order, results: Path) -> Comparison:
    """Plan again, equal jobs once, and compare; jobs without a record are planned only with --accept."""
    verified = _verifications(plans, results) if order.trusts_verified else {}
    again = [found for found in plans if found.scenario.name not in verified]
    begin = time.perf_counter()
    fresh = _planned(again, order)
    seconds = time.perf_counter() - begin
    findings, changed, equal = list[Finding](), list[StackRun](), dict[str, str]()
    for found in again:
        of_scenario = list[Finding]()
        for job in found.jobs:
            run = fresh.get(job.key)
            own = None if run is None else replace(run, scenario=found.scenario.name, stack=job.stack.name)
            of_job = found.findings(job, own)
            of_scenario += of_job
            changed += [own] if own is not None and any(finding.settled_by_accept for finding in of_job) else []
        of_scenario += [
            found.finding(stack, "has a record but is no longer part of the scenario") for stack in found.gone
        ]
        findings += of_scenario
        equal |= {} if of_scenario else {found.scenario.name: found.state}
    count = sum(job.key in fresh and job.stack.name in found.records for found in again for job in found.jobs)
    different = f" ({len(fresh)} different ones)" if len(fresh) < count else ""
    gone = [found.scenario.name for found in again if found.gone]
    return Comparison(
        subject=f"{count} dry runs{different} of {len(again)} scenarios", findings=findings,
        notes=[*([_how_long(seconds)] if fresh else []), *_trusted(plans, verified)],
        accept=lambda: _accept(files, changed, gone, results, order.reason),
        written=[_keep_verification(results, equal, seconds)] if order.keeps_verified and equal else [],
    )  # fmt: skip


def _planned(again: Sequence[ScenarioPlans], order: Order) -> dict[str, StackRun]:
    """Return today's runs by the key of their job."""
    jobs = {job.key: job for found in again for job in found.jobs if order.accept or job.stack.name in found.records}
    took = {record.key: record.duration_s for found in again for record in found.records.values()}
    longest_first, fresh = sorted(jobs.values(), key=lambda job: -took.get(job.key, 0)), dict[str, StackRun]()
    with progress_bar(longest_first, desc="plan", unit="run", shown=order.progress) as bar:
        for job, run in plan_all(longest_first, processes=order.processes):
            fresh[job.key] = run
            bar.set_postfix_str(f"{job.scenario} {job.stack.name}")
            bar.update()
    return fresh


def _how_long(seconds: float) -> str:
    here = read_environment()
    checkout = (here.commit[:8] or "no checkout") + (", with changes" if here.dirty else "")
    return f"planned again in {seconds:.0f} s by program {program_digest()} (commit {checkout}, torch {here.torch})"


def _trusted(plans: Sequence[ScenarioPlans], verified: Mapping[str, Verification]) -> list[str]:
    """Return a sentence about plans that were not repeated, if any."""
    if not verified:
        return []
    count = sum(len(found.jobs) for found in plans if found.scenario.name in verified)
    newest = max(done.started_at for done in verified.values())
    told = f"{count} dry runs of {len(verified)} scenarios were verified with this program version on {newest[:10]}"
    return [f"{told}; --verify plans them again"]


def _verifications(plans: Sequence[ScenarioPlans], results: Path) -> dict[str, Verification]:
    """Return by scenario the check by which this very program, with this torch, reproduced all its records."""
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


def _keep_verification(results: Path, equal: Mapping[str, str], seconds: float) -> Path:
    """Append a line on the program that reproduced these records; return its file."""
    return append_verification(
        results / "records",
        Verification(
            key="planned records", started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            duration_s=round(seconds, 3), environment=read_environment(), program=program_digest(), scenarios=equal,
        ),
    )  # fmt: skip


def _accept(
    files: ScenarioFiles, changed: Sequence[StackRun], gone: Sequence[str], results: Path, reason: str
) -> list[Path]:
    """Append today's runs where they differ, and drop records of removed stacks."""
    store = RecordStore(results / "records")
    for run in changed:
        is_known = any(record.key == run.key for record in store.read(run.scenario))
        store.append(replace(run, accepted=reason if is_known else ""))
    for name in gone:
        scenario = files.scenario(name)
        shown = run_from_records(scenario, [files.stack(stack) for stack in scenario.stacks], store)
        store.prune(name, list(shown.records.values()))
    return [store.folder / f"{name}.jsonl" for name in sorted({run.scenario for run in changed} | {*gone})]
