"""Dry runs of many jobs: in processes that live on, so that what ops return for a shape is worked out once in each."""

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from multiprocessing.connection import wait as wait_for_any

import torch

from hybridtrain.run.environment import read_environment
from hybridtrain.run.program import program_digest
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.records.stack_run import StackRun
from hybridvalidation.runs.job import EVIDENCE_OF_KIND, Job, plan_figures, run_dry

_JOBS_OF_PROCESS = 3
"""A process that plans fewer takes longer to start than it saves."""
_ALLOCATIONS_BETWEEN_COLLECTIONS = 200_000
"""A dry run makes millions of records that all live to its end; looking through them for garbage finds none."""


def plan_all(jobs: Sequence[Job], *, processes: int | None = None) -> Iterator[tuple[Job, StackRun]]:
    """Yield each dry run as it is done; a failure of one is a record with the outcome ``error``.

    Args:
        jobs: Long ones first, where that is known.
        processes: At a time; 1: this one alone. None: one for each core, unless the jobs are few.
    """
    width = min(processes or os.cpu_count() or 1, -(-len(jobs) // _JOBS_OF_PROCESS))
    if width <= 1:
        for job in jobs:
            yield job, _plan(job)
        return
    program_digest()  # now: what is edited while this runs must not count as what ran
    pool = ProcessPoolExecutor(width, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)
    try:
        waiting: dict[Future[StackRun], Job] = {pool.submit(_plan, job): job for job in jobs}
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield (job := waiting.pop(future)), _answer(job, future)
        pool.shutdown()
    finally:  # left early: nobody wants the rest
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.kill()


def failed_run(job: Job, message: str, seconds: float = 0.0) -> StackRun:
    """Return the record of a run that gave no answer."""
    return StackRun(
        key=job.key, kind=job.kind, scenario=job.scenario, stack=job.stack.name, evidence=EVIDENCE_OF_KIND[job.kind],
        outcome=Outcome.ERROR, message=message, started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        duration_s=round(seconds, 3), environment=read_environment(), program=program_digest(), asked=job.asked,
        plan=plan_figures(job.stack.plan()),
    )  # fmt: skip


def _begin() -> None:
    """Set a process up: one thread, no Ctrl-C of its own, and an end when its parent ends, however that does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    program_digest()
    parent = multiprocessing.parent_process()
    assert parent is not None, "a child has one"
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait_for_any([sentinel])
    os._exit(1)


def _plan(job: Job) -> StackRun:
    before = gc.get_threshold()
    gc.set_threshold(_ALLOCATIONS_BETWEEN_COLLECTIONS, *before[1:])
    try:
        return run_dry(job)
    except Exception as error:  # noqa: BLE001  whatever it is, the record names it
        return failed_run(job, f"{type(error).__name__}: {error}")
    finally:
        gc.set_threshold(*before)


def _answer(job: Job, future: Future[StackRun]) -> StackRun:
    try:
        return future.result()
    except BrokenProcessPool:
        return failed_run(
            job, "a process that planned was killed, by the system if it was out of memory; --jobs 1 takes less"
        )
