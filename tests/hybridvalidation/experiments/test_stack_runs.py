"""What makes two runs the same, runs in processes of their own, and dry runs in processes that live on."""

import multiprocessing
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.config.encode import to_json
from hybridtrain.models.model_config import BatchWorkload
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.optimizations import Int8Optimizer, MixedPrecision
from hybridtrain.run.program import program_digest
from hybridtrain.stacks import Stack
from hybridtrain.virtual_gpu.cards.card import find_card
from hybridvalidation.child import ChildResult
from hybridvalidation.experiments.stack_runs import Job, make_job, plan_all, run_job, run_record
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.records.stack_run import RunKind
from hybridvalidation.scenario import CardSpec, Scenario, ScenarioTarget
from tiny_models import LLAMA_GROUPED
from tiny_runs import PROXY, SCENARIO, VANILLA

ROOT = Path(__file__).parents[3]


def key(kind: RunKind, scenario: Scenario = SCENARIO, stack: Stack = VANILLA) -> str:
    return make_job(kind, scenario, stack).key


ACCURACY_CHANGES: dict[str, Any] = {
    "proxy": replace(PROXY, num_blocks=2), "seeds": (0, 1, 3), "num_steps": 4, "batch_size": 4, "seq_len": 9,
    "lr": 2e-3, "validation_batches": 3,
}  # fmt: skip
PLANNED_CHANGES: dict[str, Any] = {
    "model": ModelSpec(preset="gpt2-small"),
    "card": CardSpec(name="rtx-4090"),
    "workload": BatchWorkload(batch_size=4, seq_len=8),
}


@pytest.mark.parametrize("name", PLANNED_CHANGES)
def test_what_a_plan_depends_on_changes_its_key_only(name: str) -> None:
    other = replace(SCENARIO, **{name: PLANNED_CHANGES[name]})
    assert key("dry_run", other) != key("dry_run")
    assert key("accuracy", other) == key("accuracy")


@pytest.mark.parametrize("name", ACCURACY_CHANGES)
def test_what_an_accuracy_depends_on_changes_its_key_only(name: str) -> None:
    other = replace(SCENARIO, accuracy=replace(SCENARIO.accuracy, **{name: ACCURACY_CHANGES[name]}))
    assert key("accuracy", other) != key("accuracy")
    assert key("dry_run", other) == key("dry_run")


def test_a_card_of_ones_own_is_told_apart_by_every_figure() -> None:
    cards = [replace(find_card("rtx-3090"), context_mib=context) for context in (426, 427)]
    keys = {key("dry_run", replace(SCENARIO, card=CardSpec(custom=card))) for card in cards}
    assert len(keys) == 2


@pytest.mark.parametrize("kind", ["dry_run", "accuracy"])
def test_the_optimizer_changes_the_key(kind: RunKind) -> None:
    keys = {key(kind, stack=replace(VANILLA, optimizer=name)) for name in ("adamw", "lion", "muon")}
    assert len(keys) == 3


@pytest.mark.parametrize("kind", ["dry_run", "accuracy"])
def test_the_stack_changes_the_key(kind: RunKind) -> None:
    stacks = [(), (Int8Optimizer(),), (MixedPrecision(),), (MixedPrecision(master="absent"),)]
    keys = {key(kind, stack=replace(VANILLA, optimizations=stack)) for stack in stacks}
    assert len(keys) == len(stacks)


@pytest.mark.parametrize("kind", ["dry_run", "accuracy"])
@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"description": "Other words"},
        {"targets": (ScenarioTarget(id="t"),)},
        {"stacks": ("lean", "vanilla")},
    ],
    ids=["name", "description", "targets", "order"],
)
def test_names_and_targets_do_not_change_the_key(kind: RunKind, changes: dict[str, Any]) -> None:
    assert key(kind, replace(SCENARIO, **changes)) == key(kind)


@pytest.mark.parametrize("kind", ["dry_run", "accuracy"])
def test_the_name_of_a_stack_and_the_order_of_its_parts_do_not_change_the_key(kind: RunKind) -> None:
    parts = (Int8Optimizer(), MixedPrecision())
    one = Stack(name="one", description="one", optimizations=parts)
    other = Stack(name="other", description="other", optimizations=parts[::-1])
    assert key(kind, stack=one) == key(kind, stack=other)


def test_kinds_are_told_apart() -> None:
    assert key("dry_run") != key("accuracy")


def test_a_crash_of_a_worker_is_an_outcome_with_its_message() -> None:
    job = replace(make_job("accuracy", SCENARIO, VANILLA), accuracy=None)
    with pytest.raises(AssertionError, match="an accuracy job without its specification"):
        run_job(job)
    fault = "worker ended with code 1: AssertionError: an accuracy job without its specification"
    crash = run_record(job, ChildResult(answer=None, fault=fault, seconds=2.0, peak_rss_bytes=0, log=""))
    assert (crash.outcome, crash.message) == (Outcome.ERROR, fault)
    assert (crash.kind, crash.scenario, crash.stack) == ("accuracy", "mine", "vanilla")
    assert (crash.memory, crash.accuracy, crash.measured) == (None, None, None)
    assert crash.duration_s > 0
    for place in (str(ROOT), str(Path.home()) + "/", "/tmp/", socket.gethostname() + "."):  # noqa: S108
        assert place not in to_json(crash), place


def test_every_job_reaches_its_worker_whole() -> None:
    stack = replace(VANILLA, optimizations=(MixedPrecision(), Int8Optimizer()))
    accuracy = replace(SCENARIO.accuracy, proxy=replace(PROXY, family="llama"))
    scenario = replace(SCENARIO, model=ModelSpec(shape=LLAMA_GROUPED), accuracy=accuracy)
    job = make_job("dry_run", scenario, stack)
    [(_, done)] = plan_all([job])
    assert done.program == program_digest()
    assert (done.key, done.kind, done.stack, done.evidence) == (job.key, "dry_run", "vanilla", Evidence.PLANNED)
    assert done.plan["optim_state.codec"] == "int8_blocks"
    assert done.memory is not None
    assert done.memory.num_params == LLAMA_GROUPED.num_params


_PARENT = """\
import multiprocessing, sys, time
sys.path[:0] = [{support!r}]
if __name__ == "__main__":
    from test_jobs_of_pool import jobs
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


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork processes that are started afresh otherwise, which takes seconds of imports each."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _method: fork)


@pytest.mark.usefixtures("_forked")
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


@pytest.mark.usefixtures("_forked")
def test_killed_processes_leave_records_that_say_so() -> None:
    deep = [replace(job, model=replace(job.model, num_blocks=60)) for job in jobs(8)]  # which takes a while each
    plans: Iterator[tuple[Job, object]] = plan_all(deep, processes=2)
    next(plans)
    for child in multiprocessing.active_children():
        child.kill()
    messages = {run.message for _, run in plans if run.outcome is Outcome.ERROR}  # type: ignore[attr-defined]
    assert messages == {"a planning process was killed, possibly because memory ran out; --jobs 1 needs less"}


@pytest.mark.usefixtures("_forked")
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
    (support / "test_jobs_of_pool.py").write_text(
        f"import sys\nsys.path[:0] = {tests!r}\nfrom test_stack_runs import jobs as jobs\n"
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
