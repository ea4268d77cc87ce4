"""Work in a child process: the job goes in as JSON, the answer comes back as JSON.

``main`` runs in the child. It reads the job as one line of JSON from standard input; its class is the annotation of the
function's argument. It writes the result to a file that the parent opened. The child ends when standard input closes,
that is when the parent ends. Answer and output go to unnamed files.
"""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Final, Generic, TypeVar, get_type_hints

from hybridtrain.config.decode import Unions, decode
from hybridtrain.config.encode import encode, to_json
from hybridtrain.optimizations import OPTIMIZATIONS
from hybridtrain.plan.compose import Optimization
from hybridtrain.units import format_seconds

T = TypeVar("T")
J = TypeVar("J")

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""One thread per child: small models gain nothing from a second thread, parallel runs do."""
_POLL_S = 0.02
_UNIONS: Final[Unions] = {Optimization: OPTIMIZATIONS}
_START = "from hybridvalidation.child import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildResult(Generic[T]):
    """Result of a finished child process."""

    answer: T | None
    """The answer; None if it crashed, was stopped, or timed out."""
    fault: str
    """Reason for a missing answer, in one line without paths; empty with an answer."""
    seconds: float
    peak_rss_bytes: int
    """Peak resident memory."""
    log: str
    """Standard output and error of the child."""


class Child(Generic[T]):
    """A running child process.

    Args:
        work: ``module:function``; the function takes the job, a dataclass, and returns an ``answer`` dataclass.
        job: The job. answer: Class of the answer.
        limit_s: Time limit in seconds; None: none.
        environment: Environment variables added to this process's.
    """

    def __init__(
        self, work: str, job: object, answer: type[T], *, limit_s: float | None = None,
        environment: Mapping[str, str] = ONE_THREAD,
    ) -> None:  # fmt: skip
        self._answer, self._limit_s = answer, limit_s
        self._log, self._out = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  closed at the end
        self._begin_s = time.monotonic()
        self._ended: ChildResult[T] | None = None
        self._peak_rss_bytes = 0
        self._process = subprocess.Popen(  # noqa: S603  our own module
            [sys.executable, "-P", "-c", _START, work, str(self._out.fileno())],
            stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, pass_fds=[self._out.fileno()],
            env=os.environ | environment,
        )  # fmt: skip
        assert self._process.stdin is not None, "asked for"
        self._input = self._process.stdin
        with suppress(BrokenPipeError):  # where it has ended already, its output says why
            self._input.write(to_json(job).encode() + b"\n")
            self._input.flush()  # and not closed before the end: see the module

    def poll(self) -> ChildResult[T] | None:
        """Return the child's result, None while it runs."""
        if self._ended is None:
            code = self._reap(os.WNOHANG)
            if code is not None:
                self._end(f"worker ended with code {code}: {_last_line(self._text())}" if code else "")
            elif self._limit_s is not None and time.monotonic() - self._begin_s > self._limit_s:
                self.stop(f"stopped after {format_seconds(self._limit_s)}, its time limit")
        return self._ended

    def wait(self) -> ChildResult[T]:
        """Wait for the child; return its result."""
        while (ended := self.poll()) is None:
            time.sleep(_POLL_S)
        return ended

    def stop(self, why: str = "stopped") -> None:
        """Kill the child if it still runs."""
        if self._ended is None:
            if self._process.returncode is None:
                os.kill(self._process.pid, signal.SIGKILL)
                self._reap(0)
            self._end(why)

    def _reap(self, options: int) -> int | None:
        """Reap the child with its memory use, which ``Popen.wait`` does not return."""
        pid, status, usage = os.wait4(self._process.pid, options)
        if not pid:
            return None
        self._peak_rss_bytes = usage.ru_maxrss * 1024
        self._process.returncode = os.waitstatus_to_exitcode(status)
        return self._process.returncode

    def _end(self, fault: str) -> None:
        answer = None
        if not fault:
            self._out.seek(0)
            answer = decode(self._answer, json.loads(self._out.read()), source="worker", unions=_UNIONS)
        self._ended = ChildResult(
            answer=answer, fault=fault, seconds=time.monotonic() - self._begin_s,
            peak_rss_bytes=self._peak_rss_bytes, log=self._text(),
        )  # fmt: skip
        for file in (self._log, self._out, self._input):
            with suppress(BrokenPipeError):
                file.close()

    def _text(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")


def run_side_by_side(
    jobs: Sequence[J], start: Callable[[J], Child[T]], width: int
) -> Iterator[tuple[J, ChildResult[T]]]:
    """Yield each job with its result, ``width`` children at a time; leaving early stops running ones."""
    waiting, working = list(jobs), list[tuple[J, Child[T]]]()
    try:
        while waiting or working:
            while waiting and len(working) < width:
                job = waiting.pop(0)
                working.append((job, start(job)))
            for pair in list(working):
                if (ended := pair[1].poll()) is not None:
                    working.remove(pair)
                    yield pair[0], ended
            time.sleep(_POLL_S)
    finally:
        for _, child in working:
            child.stop()


def _last_line(text: str) -> str:
    return without_folders((text.strip().splitlines() or ["no message"])[-1])


def without_folders(text: str) -> str:
    """Return a text without the folders of its paths: records name no places of a machine."""
    return re.sub(r"(?:/[^\s/'\":,;]+)+/([^\s/'\":,;]+)", r"\1", text)


def main() -> None:
    """Run the parent's job, in the child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; what it means is the parent's
    work, out = sys.argv[1], int(sys.argv[2])
    line = sys.stdin.buffer.readline()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    function = resolve_name(work)
    job_class = get_type_hints(function)[next(iter(inspect.signature(function).parameters))]
    answer = function(decode(job_class, json.loads(line), source=work, unions=_UNIONS))
    content = json.dumps(encode(answer), allow_nan=False)
    with os.fdopen(out, "w", encoding="utf-8") as file:
        file.write(content)


def _end_with_parent() -> None:
    """End this process when standard input closes: nothing else stops a run whose parent was killed."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)
