"""Fresh processes for the pieces of the evidence, several at a time, each with a time limit."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Protocol

from hybridtrain.config.decode import decode
from hybridtrain.config.encode import to_json
from hybridtrain.units import format_seconds
from hybridvalidation.card_session.worker import UNIONS, Answer
from hybridvalidation.records.outcome import Outcome

_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Child(Protocol):
    """A process at work."""

    def answer(self) -> Answer | None:
        """Return its answer, None while it works; a crash or the end of its time is an answer too."""
        ...

    def stop(self) -> None:
        """End it if it still works."""
        ...


class StartChild(Protocol):
    """Starts a process."""

    def __call__(self, verb: str, job: object, limit_s: float) -> Child:
        """Return a process that does ``verb`` for at most ``limit_s``."""
        ...


class WorkerProcess:
    """``cuda_worker`` in a process of its own."""

    def __init__(self, verb: str, job: object, limit_s: float) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._limit_s = limit_s
        self._begin_s = time.monotonic()
        job_path, self._answer_path = (Path(self._folder.name, name) for name in ("job.json", "answer.json"))
        self._errors = Path(self._folder.name, "stderr")
        job_path.write_text(to_json(job), encoding="utf-8")
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(  # noqa: S603  our own module
                [
                    sys.executable, "-P", "-m", "hybridvalidation.card_session.worker", verb, str(job_path),
                    str(self._answer_path),
                ],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
                env=os.environ | (_ONE_THREAD if verb == "plan" else {}),
            )  # fmt: skip

    def answer(self) -> Answer | None:
        """Return its answer, None while it works."""
        code = self._process.poll()
        if code is None:
            if time.monotonic() - self._begin_s < self._limit_s:
                return None
            self.stop()
            limit = format_seconds(self._limit_s)
            return Answer(outcome=Outcome.ERROR, message=f"stopped after {limit}, its time limit")
        answer = self._read(code)
        self._folder.cleanup()
        return answer

    def stop(self) -> None:
        """End it at once; its files go."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _read(self, code: int) -> Answer:
        if code == 0:
            content = json.loads(self._answer_path.read_text(encoding="utf-8"))
            return decode(Answer, content, source="worker", unions=UNIONS)
        lines = self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = _without_folders(lines[-1] if lines else "no message")
        return Answer(outcome=Outcome.ERROR, message=f"the process ended with code {code}: {last}")


def _without_folders(text: str) -> str:
    """Return text with folders cut off its paths: records tell nothing of a machine's places."""
    return re.sub(r"(?:/[^\s/'\":,;]+)+/([^\s/'\":,;]+)", r"\1", text)
