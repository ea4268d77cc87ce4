"""Work in processes of its own: answers, crashes, time limits, and nothing left behind however the parent ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from child_work import Numbers
from hybridvalidation.child import Child, ChildResult, run_side_by_side

SUPPORT = Path(__file__).parents[1] / "support"
PATIENCE_S = 60.0
JOB = Numbers(values=(1.0, 2.5), name="a" * 200_000)


@pytest.fixture(autouse=True)
def _support_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))


def start(verb: str, job: Numbers = JOB, **options: Any) -> Child[Numbers]:
    return Child(f"child_work:{verb}", job, Numbers, **options)


def until(condition: Any) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.fixture(scope="module")
def doubled() -> Iterator[ChildResult[Numbers]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SUPPORT))
        yield start("double").wait()


def test_an_answer_comes_back_whole(doubled: ChildResult[Numbers]) -> None:
    assert doubled.answer == Numbers(values=(2.0, 5.0), name="1")
    assert doubled.fault == ""
    assert doubled.seconds > 0


def test_what_it_wrote_and_held_is_known(doubled: ChildResult[Numbers]) -> None:
    assert "doubling\n" in doubled.log
    assert JOB.name in doubled.log
    assert 2**20 < doubled.peak_rss_bytes < 2**40


def test_a_crash_is_told_in_a_line_without_folders() -> None:
    ended = start("fail", Numbers(values=(), name="x")).wait()
    assert ended.answer is None
    assert ended.fault == "worker ended with code 1: ValueError: no such file: child_work.py x"
    assert "Traceback" in ended.log


def test_a_killed_child_is_told() -> None:
    ended = start("die", Numbers(values=())).wait()
    assert (ended.answer, ended.fault) == (None, "worker ended with code -9: no message")


def test_a_child_that_never_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert start("double").wait().fault == "worker ended with code 1: no message"


def test_a_child_ends_with_its_time(tmp_path: Path) -> None:
    child = start("sleep", Numbers(values=(), name=str(tmp_path / "pid")), limit_s=0.2)
    assert child.poll() is None
    ended = child.wait()
    assert ended.answer is None
    assert ended.fault.startswith("stopped after ")
    assert ended.fault.endswith(", its time limit")
    assert child.poll() is ended


def test_stopped_children_are_gone_at_once(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    child = start("sleep", Numbers(values=(), name=str(path)))
    until(lambda: path.exists() and path.read_text())
    child.stop()
    assert not is_alive(int(path.read_text()))
    child.stop()
    assert child.wait().fault == "stopped"


def test_side_by_side_every_job_ends_and_leaving_early_stops_the_rest(tmp_path: Path) -> None:
    jobs = [Numbers(values=(float(number),)) for number in range(3)]
    found = {job.values: ended.answer for job, ended in run_side_by_side(jobs, lambda job: start("double", job), 2)}
    assert found == {(number,): Numbers(values=(2 * number,), name="1") for number in (0.0, 1.0, 2.0)}
    path = tmp_path / "pid"
    work = {"first": "double", str(path): "sleep"}
    both = [Numbers(values=(), name=name) for name in work]
    for _ in run_side_by_side(both, lambda job: start(work[job.name], job), 2):
        break
    assert not path.exists() or not is_alive(int(path.read_text() or "0") or 2**22 - 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_however_the_parent_ends_its_child_does_and_leaves_no_file(tmp_path: Path, number: signal.Signals) -> None:
    pid, temporary = tmp_path / "pid", tmp_path / "tmp"
    temporary.mkdir()
    program = (
        "import signal, sys; from hybridvalidation.child import Child; from child_work import Numbers; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # a shell's background jobs ignore it
        "Child('child_work:sleep', Numbers(values=(), name=sys.argv[1]), Numbers).wait()"
    )
    environment = os.environ | {"PYTHONPATH": str(SUPPORT), "TMPDIR": str(temporary)}
    parent = subprocess.Popen([sys.executable, "-c", program, str(pid)], env=environment, stderr=subprocess.DEVNULL)
    until(lambda: pid.exists() and pid.read_text())
    parent.send_signal(number)
    parent.wait()
    until(lambda: not is_alive(int(pid.read_text())))
    assert list(temporary.iterdir()) == []
