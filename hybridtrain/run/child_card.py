"""The card of child processes: Python that another program starts runs on the same virtual card.

Children find a ``sitecustomize`` first on PYTHONPATH. It restarts a Python that runs a file or a module as
``run_child``, which runs it on the card and leaves its answer in a folder. So scripts under a shell, ``env``, ``exec``
or a captured pipe are planned too.
"""

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from hybridtrain.virtual_gpu.facade.nvidia_smi import nvidia_smi
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu

FOLDER = "HYBRIDTRAIN_CHILD_CARD"
"""Variable of child processes."""
_SITE = """import os
import sys

here = os.path.dirname(os.path.abspath(__file__))
words, flags = sys.orig_argv[1:], []
while words and words[0].startswith("-") and words[0] not in ("-m", "-c", "-"):
    count = 2 if words[0] in ("-X", "-W") else 1
    flags += words[:count]
    del words[:count]
is_ours = os.environ.get({folder!r}) == here and sys.prefix == {prefix!r}
if is_ours and words and words[0] not in ("-c", "-"):
    os.execv(sys.executable, [sys.executable, *flags, "-c", {code!r}, *words])
sys.path.remove(here)
own = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = own
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildAnswer:
    """The answer about a script that ran in a child process."""

    text: str
    explained: str
    content: dict[str, object]
    fits: bool
    needed_bytes: int
    """For choosing among several."""

    def as_text(self, *, explain: bool = False) -> str:
        """Return the answer for a reader."""
        return self.explained if explain else self.text

    def as_mapping(self) -> dict[str, object]:
        """Return plain figures."""
        return self.content


@dataclass(slots=True)
class Children:
    """What children leave in a folder."""

    folder: Path

    def answer(self) -> ChildAnswer | None:
        """Return the answer that needs most of the card, the ones that do not fit first; None: no child used it."""
        found: list[ChildAnswer] = [self._read(path) for path in sorted(self.folder.glob("*.answer"))]
        return max(found, key=lambda one: (not one.fits, one.needed_bytes), default=None)

    def errors(self) -> list[str]:
        """Return the errors that ended children."""
        return [self._read(path) for path in sorted(self.folder.glob("*.error"))]

    def _read(self, path: Path) -> Any:
        return pickle.loads(path.read_bytes())  # noqa: S301  from our own children


def calling(module: str, function: str) -> str:
    """Return code for ``python -c`` that calls a function of ours, wherever the interpreter starts."""
    root = str(Path(__file__).parents[2])
    return f"import sys; sys.path[0] = {root!r}; from {module} import {function}; {function}()"


@contextmanager
def child_card(gpu: VirtualGpu, settings: object) -> Iterator[Children]:
    """Give Python processes that start inside the block the card; ``settings`` are for ``child_settings``."""
    with TemporaryDirectory(prefix="hybridtrain-child-") as name:
        folder = Path(os.path.realpath(name))
        (folder / "settings").write_bytes(pickle.dumps((gpu.settings(), settings)))
        (folder / "sitecustomize.py").write_text(
            _SITE.format(folder=FOLDER, prefix=sys.prefix, code=calling("hybridtrain.cli.plan", "run_child"))
        )
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        with mock.patch.dict(os.environ, {"PYTHONPATH": path, FOLDER: str(folder)}):
            yield Children(folder)


def run_program(command: Sequence[str], gpu: VirtualGpu, *, quiet: bool) -> int | None:
    """Run a program that is not Python, with the card's nvidia-smi on PATH; return its exit code, None: no program."""
    if shutil.which(command[0]) is None:
        return None
    with nvidia_smi(gpu.card, gpu.ledger.num_cards):
        return subprocess.call(list(command), stdout=sys.stderr.fileno() if quiet else None)  # noqa: S603  asked for


def child_settings() -> tuple[VirtualGpu, Any]:
    """Return the card of this child process, and the settings that its parent gave."""
    gpu, settings = pickle.loads((_folder() / "settings").read_bytes())  # noqa: S301  from our parent
    return VirtualGpu(**gpu), settings


def leave(what: ChildAnswer | str) -> None:
    """Leave an answer, or an error, for the parent."""
    kind = "error" if isinstance(what, str) else "answer"
    (_folder() / f"{os.getpid()}.{kind}").write_bytes(pickle.dumps(what))


def _folder() -> Path:
    return Path(os.environ[FOLDER])
