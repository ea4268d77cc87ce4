# mypy: disable-error-code="no-untyped-call"
"""Launchers and the Python processes that they start, run in this process, the only one with the virtual card."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hybridtrain.errors import ConfigError

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?(\.exe)?")
_WITH_VALUE = {"-X", "-W"}
"""Interpreter options with an argument."""
_WITHOUT_VALUE = {"-u", "-B", "-E", "-I", "-O", "-OO", "-P", "-s", "-S", "-q", "-v", "-b"}


_COUNTS_CARDS = {"accelerate", "accelerate-launch", "accelerate.commands.launch", "trl"}
"""Launchers that start one process, whatever they are told, unless they count several cards."""
_RUNNING: list[str] = []
"""Names of the commands that run, from the outermost to the innermost."""
_PROCESSES = re.compile(r"--num[_-]processes(?:=|\0)(\d+)")


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """A command for a Python interpreter."""

    name: str
    """A file, or a module name."""
    is_module: bool
    arguments: tuple[str, ...]

    def run(self) -> None:
        """Run it as ``__main__``, with ``sys.argv`` and ``sys.path`` as Python sets them."""
        outer = sys.argv, sys.path[:]
        sys.argv = [self.name, *self.arguments]
        sys.path.insert(0, str(Path.cwd() if self.is_module else Path(self.name).resolve().parent))
        _RUNNING.append(self.name)
        try:
            with warnings.catch_warnings(), self._cards():
                # A new interpreter would not have imported it before.
                warnings.filterwarnings("ignore", ".*found in sys.modules after import of package", RuntimeWarning)
                if self.is_module:
                    runpy.run_module(self.name, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(self.name, run_name="__main__")
        finally:
            _RUNNING.pop()
            sys.argv, sys.path[:] = outer

    @contextmanager
    def _cards(self) -> Iterator[None]:
        """Let a launcher count as many cards as it is told to start processes."""
        asked = _PROCESSES.search("\0".join(self.arguments))
        if asked is None or (self.name if self.is_module else Path(self.name).name) not in _COUNTS_CARDS:
            yield
            return
        count = max(int(asked[1]), torch.cuda.device_count())
        with mock.patch.object(torch.cuda, "device_count", return_value=count):
            yield


def running_script() -> str:
    """Return the name of the script or module that runs, which a launcher may have started; empty: none."""
    return _RUNNING[-1] if _RUNNING else ""


def python_command(words: Sequence[str]) -> PythonCommand | None:
    """Return the script or module that a command line runs; None if it is not Python, or ``-c`` code.

    Supported: a Python file, ``-m`` and a module, either after an interpreter, or a Python script on PATH such as
    torchrun, accelerate, trl.

    Raises:
        ConfigError: The script file does not exist.
    """
    if not words:
        return None
    first, rest = str(words[0]), [str(word) for word in words[1:]]
    if first == "-m":
        return PythonCommand(rest[0], True, tuple(rest[1:])) if rest else None
    if _PYTHON.fullmatch(Path(first).name):
        while rest and (rest[0] in _WITHOUT_VALUE or rest[0] in _WITH_VALUE):
            del rest[: 2 if rest[0] in _WITH_VALUE else 1]
        is_file = bool(rest) and not rest[0].startswith("-")
        if is_file and not Path(rest[0]).exists():
            raise ConfigError("virtual", [missing_script(rest[0])])
        return python_command(rest) if is_file or rest[:1] == ["-m"] else None
    if Path(first).is_file() and (Path(first).suffix == ".py" or not os.access(first, os.X_OK)):
        return PythonCommand(first, False, tuple(rest))
    found = shutil.which(first)
    if found is None:
        return None
    with Path(found).open("rb") as file:
        line = file.readline(256)
    is_python = line.startswith(b"#!") and b"python" in line
    return PythonCommand(found, False, tuple(rest)) if is_python else None


def missing_script(name: str) -> str:
    """Return the message for a missing script."""
    return f"script '{name}' does not exist; give a Python file, -m and a module, or a launcher such as torchrun."


def launchers(enter_world: Callable[[int], None]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements (owner, name, value) that run a launcher's processes in this process.

    Args:
        enter_world: Called with the number of processes that torchrun would start.
    """
    yield subprocess, "Popen", _Popen
    yield os, "_exit", sys.exit  # at once, without an answer; a plan has one to give
    api = import_module("torch.distributed.launcher.api")
    launch = _launch(enter_world)
    for module in (api, import_module("torch.distributed.run")):
        yield module, "elastic_launch", launch


def _launch(enter_world: Callable[[int], None]) -> Callable[..., Any]:
    def elastic_launch(config: Any, entrypoint: Any) -> Callable[..., Any]:
        def start(*arguments: Any) -> dict[int, Any]:
            """Run one of torchrun's processes: a function, or an interpreter with its script."""
            enter_world(config.max_nodes * config.nproc_per_node)
            if callable(entrypoint):
                return {0: entrypoint(*arguments)}
            command = python_command([str(entrypoint), *arguments])
            if command is None:
                raise RuntimeError(
                    f"virtual GPU: torchrun starts {entrypoint}, which is not Python; give the script itself."
                )
            command.run()
            return {0: None}

        return start

    return elastic_launch


class _Popen(subprocess.Popen[Any]):
    """A replacement of ``Popen``: Python that prints where its parent does runs here, all else as a process."""

    def __init__(self, args: Any, *rest: Any, **kwargs: Any) -> None:
        words = args if isinstance(args, list | tuple) else []
        goes_apart = kwargs.get("stdout") is not None or kwargs.get("shell") or rest
        self._ran_here = True
        with nullcontext() if goes_apart else _environment(kwargs.get("env"), kwargs.get("cwd")):
            command = None if goes_apart else python_command(words)
            if command is not None:
                self.args, self.pid, self.returncode = args, os.getpid(), 0
                self.stdin = self.stdout = self.stderr = None
                try:
                    command.run()
                except SystemExit as end:
                    self.returncode = end.code if isinstance(end.code, int) else int(end.code is not None)
        if command is None:
            self._ran_here = False
            super().__init__(args, *rest, **kwargs)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code."""
        return int(self.returncode) if self._ran_here else super().wait(timeout)

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return int(self.returncode) if self._ran_here else super().poll()

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:  # noqa: A002
        """Return its output in pipes."""
        return (None, None) if self._ran_here else super().communicate(input, timeout)

    def send_signal(self, sig: int) -> None:
        """Send a signal, if it still runs."""
        if not self._ran_here:
            super().send_signal(sig)

    def __del__(self, *args: Any, **kwargs: Any) -> None:
        if not self._ran_here:
            super().__del__(*args, **kwargs)


@contextmanager
def _environment(names: Mapping[str, str] | None, folder: Any) -> Iterator[None]:
    """Set the working folder and variables of a child process inside the block."""
    outer = Path.cwd()
    with mock.patch.dict(os.environ, names or {}):
        if folder is not None:
            os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(outer)
