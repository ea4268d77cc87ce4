"""The program behind a record: every file of the project that its process imported or read, with a digest of each.

A record is valid while all of these files are what they were, and torch is the same version. Nothing is listed by hand:
modules are those that the process holds at its end, other files (tables of cards, C sources) are noted as they are
opened. A file that was never imported cannot matter unless one that was changes.
"""

import importlib.util
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path

PACKAGES = ("hybridtrain", "hybridkernels", "hybridvalidation")
"""The project's own."""
_LENGTH = 16
"""Hex characters kept of a SHA-256."""
_NO_SOURCE = {".pyc", ".so"}

_opened: set[str] = set()
_is_watching = False
_known: dict[str, "Program"] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a process consisted of."""

    torch: str
    """Version without what it was built for."""
    files: Mapping[str, str]
    """Digest of each file's content by its path from the package's parent, as ``hybridtrain/trainer.py``."""

    @property
    def digest(self) -> str:
        """Sixteen hex characters for all of it."""
        lines = [f"torch {self.torch}", *(f"{path} {content}" for path, content in sorted(self.files.items()))]
        return sha256("\n".join(lines).encode()).hexdigest()[:_LENGTH]

    def first_change(self) -> str:
        """Return what is not as it was, as a sentence's end; empty: the program is still the same."""
        if self.torch != torch_version():
            return f"torch was {self.torch}, is {torch_version()}"
        for path, content in sorted(self.files.items()):
            now = _digest_of(path)
            if now != content:
                return f"{path} is gone" if now is None else f"{path} has changed"
        return ""


def watch_files() -> None:
    """Note every file of the project that this process opens from here on; the hook stays until the process ends."""
    global _is_watching  # noqa: PLW0603  an audit hook cannot be removed, so there is one a process
    if not _is_watching:
        _is_watching = True
        sys.addaudithook(_note)


def current_program() -> Program:
    """Return the files that this process has imported, and those that it has read since ``watch_files``."""
    found: dict[str, str] = {}
    for path in [*_imported(), *_opened]:
        name = _name_of(path)
        if name is not None and (content := _digest_of(name)) is not None:
            found[name] = content
    program = Program(torch=torch_version(), files=dict(sorted(found.items())))
    remember_program(program)
    return program


def remember_program(program: Program) -> None:
    """Let ``known_program`` find it, as it does what ``current_program`` returned."""
    _known[program.digest] = program


def known_program(digest: str) -> Program | None:
    """Return a program of this process, or of a child that ended, by its digest."""
    return _known.get(digest)


def torch_version() -> str:
    """Return torch's version as ``2.13.0``: a wheel for the processor plans and trains what one for CUDA does."""
    return metadata.version("torch").partition("+")[0]


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str):
        _opened.add(arguments[0])


def _imported() -> Iterable[str]:
    """Yield the source files of the project's modules."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in PACKAGES and (path := getattr(module, "__file__", None)):
            yield path
    main = sys.modules.get("__main__")  # a child's entry, by whatever name
    if main is not None and (path := getattr(main, "__file__", None)):
        yield path


def _name_of(path: str) -> str | None:
    """Return a file's name from its package's parent; None for one that is not of the project."""
    if not any(package in path for package in PACKAGES):  # most files: spare them the rest
        return None
    file = Path(path).resolve()
    if file.suffix in _NO_SOURCE:
        return None
    for package in PACKAGES:
        folder = _folder(package)
        if folder is not None and file.is_relative_to(folder):
            return f"{package}/{file.relative_to(folder).as_posix()}"
    return None


@cache
def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent


@cache
def _digest_of(name: str) -> str | None:
    """Return the digest of a file's content as it is now; None when there is no such file."""
    package, _, inside = name.partition("/")
    folder = _folder(package) if package in PACKAGES else None
    if folder is None or not (file := folder / inside).is_file():
        return None
    return sha256(file.read_bytes()).hexdigest()[:_LENGTH]
