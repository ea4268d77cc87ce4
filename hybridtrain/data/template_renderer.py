"""Rendering of chat templates by a separate process (template_process.py).

CPU time, memory and text length are limited there; a killed process is restarted for the next text.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from hybridtrain.data.template_process import MOST_BYTES, MOST_CHARACTERS, MOST_SECONDS
from hybridtrain.errors import DataError
from hybridtrain.units import format_bytes

PROGRAM: Final = Path(__file__).with_name("template_process.py")
"""The program of the rendering process."""
_LIMITS: Final = {
    "time": f"takes more than {MOST_SECONDS} s of CPU time",
    "memory": f"takes more than {format_bytes(MOST_BYTES)} of memory",
    "length": f"writes more than {MOST_CHARACTERS:,} characters",
    "died": "crashes the rendering process",
}


class TemplateLimitError(DataError):
    """The template exceeds a limit; it would with any messages."""


def ask(template: str, shared: str, names: Sequence[Mapping[str, object]], *, marks: bool) -> Mapping[str, Any]:
    """Render messages by a template; return the texts, and whether the template has {% generation %} marks.

    ``shared`` is JSON.

    Raises:
        ValueError: the template rejects the messages. DataError: it cannot be parsed. TemplateLimitError: it exceeds a
        limit of time, memory or characters.
    """
    rest = json.dumps({"template": template, "names": names, "marks": marks})
    answer = _PROCESS.ask(f'{{"shared": {shared}, {rest[1:]}')
    fault, why = answer.get("fault"), answer.get("why")
    if fault == "syntax":
        raise DataError(f"the chat template cannot be parsed ({why}); set chat_template to another one")
    if fault == "moved":
        raise ValueError(f"the chat template {why}, or set loss_on = 'all'")
    if fault == "refused":
        raise ValueError(f"the chat template rejects the messages ({why})")
    if fault is not None:
        raise TemplateLimitError(f"the chat template {_LIMITS[fault]}; set chat_template to another one")
    return answer


class _Process:
    """The program at work, begun when it is first asked, and anew after it ended or this process forked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, line: str) -> Mapping[str, Any]:
        """Send a request; return the answer."""
        with self._lock:
            try:
                running = self._started()
                assert running.stdin is not None, "a pipe"
                assert running.stdout is not None, "a pipe"
                with suppress(BrokenPipeError):
                    running.stdin.write(line.encode("ascii") + b"\n")
                    running.stdin.flush()
                answer = running.stdout.readline()
            except BaseException:
                self.close()  # an unread answer would be taken for the next one's
                raise
            if answer.endswith(b"\n"):
                content: Mapping[str, Any] = json.loads(answer)
                return content
            number = running.wait()
            self.close()
            return {"fault": "time" if number == -signal.SIGXCPU else "died"}

    def _started(self) -> subprocess.Popen[bytes]:
        if self._running is None or self._owner != os.getpid():
            self._owner = os.getpid()
            try:
                self._running = subprocess.Popen(  # noqa: S603  ours
                    [sys.executable, "-I", str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, start_new_session=True,  # Ctrl-C is this process's to answer
                )  # fmt: skip
            except OSError as error:
                raise DataError(
                    f"the process that renders chat templates cannot be started ({error.strerror}); allow child "
                    f"processes, or end other processes"
                ) from error
            assert self._running.stdin is not None, "a pipe"
            self._running.stdin.write(json.dumps(sys.path).encode("ascii") + b"\n")
        return self._running

    def close(self) -> None:
        """Terminate the process."""
        running, self._running = self._running, None
        if running is not None and self._owner == os.getpid():
            with running:
                running.kill()


_PROCESS: Final = _Process()
atexit.register(_PROCESS.close)
