"""One job in this process: ``python -m hybridvalidation.runs.worker JOB.json RECORD.json``."""

import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from hybridtrain.config.decode import decode
from hybridtrain.config.encode import to_json
from hybridtrain.data.corpus import embedded_corpus
from hybridtrain.dry_run import dry_run
from hybridtrain.errors import DivergenceError
from hybridtrain.optimizations import OPTIMIZATIONS
from hybridtrain.plan.compose import Optimization
from hybridvalidation.records.environment import read_environment
from hybridvalidation.records.outcome import EVIDENCE_OF_KIND, Outcome
from hybridvalidation.records.record import AccuracyFigures, MeasuredFigures, MemoryFigures, Record
from hybridvalidation.runs.accuracy import train_proxies
from hybridvalidation.runs.figures import memory_figures, plan_figures
from hybridvalidation.runs.job import Job
from hybridvalidation.runs.measure import measure_on_cuda


def run_job(job: Job) -> Record:
    """Run a job; an out-of-memory or diverged run is an outcome, everything else raises."""
    started = datetime.now(UTC)
    begin = time.perf_counter()
    outcome, message = Outcome.OK, ""
    memory: MemoryFigures | None = None
    accuracy: AccuracyFigures | None = None
    measured: MeasuredFigures | None = None
    try:
        if job.kind == "dry_run":
            memory = _plan_memory(job)
            outcome = Outcome.OK if memory.fits else Outcome.OUT_OF_MEMORY
        elif job.kind == "accuracy":
            assert job.accuracy is not None, "an accuracy job carries its specification"
            accuracy = train_proxies(job.accuracy, job.stack.plan(), embedded_corpus())
        else:
            measured = measure_on_cuda(
                job.model.resolve(), job.stack.plan(), job.card.resolve(), job.workload, embedded_corpus()
            )
    except DivergenceError as error:
        outcome, message = Outcome.DIVERGED, str(error)
    except torch.OutOfMemoryError as error:
        outcome, message = Outcome.OUT_OF_MEMORY, str(error)
    return Record(
        key=job.key, subject=job.subject, kind=job.kind, scenario=job.scenario, stack=job.stack.name,
        evidence=EVIDENCE_OF_KIND[job.kind],
        outcome=outcome, message=message, started_at=started.isoformat(timespec="seconds"),
        duration_s=round(time.perf_counter() - begin, 3), environment=read_environment(),
        plan=plan_figures(job.stack.plan()), memory=memory, accuracy=accuracy, measured=measured,
    )  # fmt: skip


def _plan_memory(job: Job) -> MemoryFigures:
    plan = job.stack.plan()
    workload = job.workload.micro_batch(plan)
    return memory_figures(dry_run(job.model.resolve(), plan, job.card.resolve(), workload, host=job.host))


def main() -> None:
    """Read the job file, run it, write the record file."""
    job_path, record_path = (Path(argument) for argument in sys.argv[1:])
    mapping = json.loads(job_path.read_text(encoding="utf-8"))
    job = decode(Job, mapping, source=str(job_path), unions={Optimization: OPTIMIZATIONS})
    record_path.write_text(to_json(run_job(job)), encoding="utf-8")


if __name__ == "__main__":
    main()
