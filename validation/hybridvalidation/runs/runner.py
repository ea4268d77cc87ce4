"""All jobs of a scenario, each in a fresh process, none twice: a run with an equal key is read instead of repeated."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import torch

from hybridtrain.config.decode import decode
from hybridtrain.config.encode import to_json
from hybridtrain.data.corpus import embedded_corpus
from hybridvalidation.progress import progress_bar
from hybridvalidation.records.environment import read_environment
from hybridvalidation.records.outcome import EVIDENCE_OF_KIND, Outcome
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import RecordStore
from hybridvalidation.runs.figures import plan_figures
from hybridvalidation.runs.job import Job, JobKind, make_job, subject_of
from hybridvalidation.scenario import Scenario, Stack

_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Small models gain nothing from a second thread, and two runs on two cores do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioRun:
    """The records of one scenario, by kind and stack."""

    scenario: Scenario
    stacks: dict[str, Stack]
    records: dict[tuple[str, str], Record]
    num_cached: int

    def get(self, kind: str, stack: str) -> Record | None:
        """Return a record if that run was made and ended well enough to have one."""
        return self.records.get((kind, stack))


def run_scenario(
    scenario: Scenario, stacks: Iterable[Stack], store: RecordStore, *, fresh: bool, progress: bool
) -> ScenarioRun:
    """Run what has no record yet and return everything; ``fresh`` repeats all."""
    stacks = list(stacks)
    corpus = embedded_corpus()
    kinds: list[JobKind] = ["dry_run", "accuracy"]
    if torch.cuda.is_available():
        kinds.append("measured")
    jobs = [
        make_job(kind, scenario, stack, corpus) for kind in kinds for stack in stacks if _is_run(kind, scenario, stack)
    ]
    cached = {} if fresh else {job.key: record for job in jobs if (record := store.find(scenario.name, job.key))}
    records: dict[tuple[str, str], Record] = {
        (job.kind, job.stack.name): cached[job.key] for job in jobs if job.key in cached
    }
    missing = [job for job in jobs if job.key not in cached]
    with progress_bar(missing, desc=scenario.name, unit="run", shown=progress) as bar:
        for job, record in _run_all(missing):
            store.append(record)
            records[job.kind, job.stack.name] = record
            bar.set_postfix_str(f"{job.kind} {job.stack.name}")
            bar.update()
    return ScenarioRun(
        scenario=scenario, stacks={stack.name: stack for stack in stacks}, records=records,
        num_cached=len(jobs) - len(missing),
    )  # fmt: skip


def _run_all(jobs: Sequence[Job]) -> Iterator[tuple[Job, Record]]:
    """Yield each job with its record: CPU jobs side by side, one core each, then the card's jobs one by one."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        futures = {pool.submit(run_in_process, job): job for job in jobs if job.kind != "measured"}
        for future in as_completed(futures):
            yield futures[future], future.result()
    for job in jobs:
        if job.kind == "measured":
            yield job, run_in_process(job)


def run_from_records(scenario: Scenario, stacks: Iterable[Stack], store: RecordStore) -> ScenarioRun:
    """Return the newest record of every kind and stack as the files describe them now; nothing is run."""
    chosen = {stack.name: stack for stack in stacks}
    everything = store.read(scenario.name)
    records: dict[tuple[str, str], Record] = {}
    for kind in get_args(JobKind):
        for name, stack in chosen.items():
            if not _is_run(kind, scenario, stack):
                continue
            subject = subject_of(kind, scenario, stack)
            same = [record for record in everything if record.kind == kind and record.subject == subject]
            crashed = [
                record for record in everything if (record.kind, record.stack, record.subject) == (kind, name, "")
            ]
            if same or crashed:
                records[kind, name] = (same or crashed)[-1]
    return ScenarioRun(scenario=scenario, stacks=chosen, records=records, num_cached=len(records))


def _is_run(kind: JobKind, scenario: Scenario, stack: Stack) -> bool:
    return kind != "accuracy" or scenario.trains(stack.name)


def run_in_process(job: Job) -> Record:
    """Run a job in a fresh process; a crash becomes a record with the outcome ``error``."""
    started = datetime.now(UTC)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        job_path, record_path = Path(folder, "job.json"), Path(folder, "record.json")
        job_path.write_text(to_json(job), encoding="utf-8")
        done = subprocess.run(  # noqa: S603  our own module
            [sys.executable, "-P", "-m", "hybridvalidation.runs.worker", str(job_path), str(record_path)],
            capture_output=True, text=True, check=False, env=os.environ | _ONE_THREAD,
        )  # fmt: skip
        if done.returncode == 0:
            return decode(Record, json.loads(record_path.read_text(encoding="utf-8")), source="worker")
    failure = _without_paths((done.stderr.strip().splitlines() or ["no message"])[-1])
    return Record(
        key="", subject=job.subject, kind=job.kind, scenario=job.scenario, stack=job.stack.name,
        evidence=EVIDENCE_OF_KIND[job.kind],
        outcome=Outcome.ERROR, message=f"worker ended with code {done.returncode}: {failure}",
        started_at=started.isoformat(timespec="seconds"), duration_s=round(time.perf_counter() - begin, 3),
        environment=read_environment(), plan=plan_figures(job.stack.plan()),
    )  # fmt: skip


def _without_paths(text: str) -> str:
    """Return text with folders cut off its paths: records tell nothing of a machine's places."""
    return re.sub(r"(?:/[^\s/'\":,;]+)+/([^\s/'\":,;]+)", r"\1", text)
