"""Plans in processes that live on: what one process finds, and what becomes of failures and of killed processes."""

import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hybridvalidation.experiments.stack_runs import Job, make_job, plan_all
from hybridvalidation.records.outcome import Outcome
from tiny_runs import SCENARIO, VANILLA

ROOT = Path(__file__).parents[3]
_PARENT = """\
import multiprocessing, sys, time
sys.path[:0] = [{support!r}]
if __name__ == "__main__":
    from test_planning_jobs import jobs
    from hybridvalidation.experiments.stack_runs import plan_all
    plans = plan_all(jobs(12), processes=2)
    next(plans)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(600)
"""


def jobs(count: int) -> list[Job]:
    """Return jobs that differ in the size of the batch alone."""
    sizes = [replace(SCENARIO, workload=replace(SCENARIO.workload, batch_size=size)) for size in range(1, count + 1)]
    return [make_job("dry_run", scenario, VANILLA) for scenario in sizes]


def test_processes_find_what_one_finds_alone() -> None:
    wanted = {run.key: run.memory for _, run in plan_all(jobs(6), processes=1)}
    found = {run.key: run.memory for _, run in plan_all(jobs(6), processes=2)}
    assert found == wanted
    assert len(wanted) == 6
    assert multiprocessing.active_children() == []


def test_a_plan_that_fails_is_a_record_and_the_others_go_on() -> None:
    (good,) = jobs(1)
    bad = replace(good, workload=replace(good.workload, seq_len=10**6), key="bad")
    runs = {run.key: run for _, run in plan_all([bad, good], processes=1)}
    assert (runs["bad"].outcome, runs[good.key].outcome) == (Outcome.ERROR, Outcome.OK)
    assert "1000000 is above" in runs["bad"].message


def test_killed_processes_leave_records_that_say_so() -> None:
    deep = [replace(job, model=replace(job.model, num_blocks=200)) for job in jobs(8)]  # which takes seconds each
    plans: Iterator[tuple[Job, object]] = plan_all(deep, processes=2)
    next(plans)
    for child in multiprocessing.active_children():
        child.kill()
    messages = {run.message for _, run in plans if run.outcome is Outcome.ERROR}  # type: ignore[attr-defined]
    assert messages == {"a process that planned was killed, by the system if it was out of memory; --jobs 1 takes less"}


def test_who_stops_listening_leaves_no_process() -> None:
    plans = plan_all(jobs(12), processes=2)
    next(plans)
    assert multiprocessing.active_children()
    plans.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []


def test_a_killed_parent_takes_its_processes_with_it(tmp_path: Path) -> None:
    support = tmp_path / "support"
    support.mkdir()
    tests = [str(ROOT / "tests/support"), str(Path(__file__).parent)]
    (support / "test_planning_jobs.py").write_text(
        f"import sys\nsys.path[:0] = {tests!r}\nfrom test_planning import jobs as jobs\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(_PARENT.format(support=str(support)))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in {"Z", "X"}
