"""Records on disk: one JSON line each, appended and never changed."""

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from hybridtrain.atomic_write import replace_file
from hybridtrain.config.decode import decode
from hybridtrain.config.encode import to_json
from hybridtrain.errors import ConfigError, RecordError
from hybridvalidation.records.record import Record
from hybridvalidation.records.stack_run import StackRun

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecordStore:
    """A folder with one ``.jsonl`` file per scenario."""

    folder: Path

    def append(self, record: StackRun) -> None:
        """Add a record and wait until it is on disk."""
        append_record(self.folder, f"{record.scenario}.jsonl", record)

    def read(self, scenario: str) -> list[StackRun]:
        """Return all records of a scenario, oldest first; an empty list when there is no file.

        Raises:
            RecordError: a line is not a record; the message has file and line.
        """
        return read_lines(self._path(scenario), StackRun)

    def scenarios(self) -> list[str]:
        """Return the names of all files of records."""
        return sorted(path.stem for path in self.folder.glob("*.jsonl"))

    def prune(self, scenario: str, keep: Sequence[StackRun]) -> int:
        """Delete all other records of a scenario; return their number. Only on the user's request."""
        return keep_lines(self._path(scenario), StackRun, keep)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"


def append_record(records: Path, file: str | Path, record: Record) -> Path:
    """Add a record to a file of a folder of records; return the file's path."""
    append_line(records / file, record)
    return records / file


def append_line(path: Path, record: object) -> None:
    """Add a dataclass to a file of records and wait until it is on disk.

    Writers lock the file. A killed writer's partial line is moved to a file beside it, and reported.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path) as file:
        end = file.seek(0, os.SEEK_END)
        torn = _torn(path.read_bytes())
        if torn:
            _keep_aside(path, torn)
            file.truncate(end - len(torn))
        elif end and not path.read_bytes().endswith(b"\n"):  # whole, and an editor took its newline
            file.write(b"\n")
        file.write((to_json(record) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path, cls: type[T]) -> list[T]:
    """Return the records of a file, oldest first; an empty list when there is no file.

    A partial last line is ignored: its writer is still running, or was killed and the run is repeated.

    Raises:
        RecordError: a complete line is not a record; the message has file and line.
    """
    if not path.exists():
        return []
    return list(_records(path.read_bytes(), path, cls))  # type: ignore[arg-type]  # a class has a hash


@lru_cache(maxsize=64)
def _records(content: bytes, path: Path, cls: type) -> tuple[Any, ...]:
    """Return the records of a file's content, which a report asks for many times."""
    lines = content[: len(content) - len(_torn(content))].removesuffix(b"\n").split(b"\n")
    return tuple(_decode(path, number, line, cls) for number, line in enumerate(lines, 1) if lines != [b""])


def keep_lines(path: Path, cls: type[T], keep: Sequence[T]) -> int:
    """Delete all other records of a file; return their number."""
    records = read_lines(path, cls)
    kept = [record for record in records if record in keep]
    if len(kept) < len(records):
        with _locked(path):
            replace_file(path, "".join(to_json(record) + "\n" for record in kept).encode())
    return len(records) - len(kept)


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Open a file to append to; no other process has it open so until the end."""
    while True:
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield file
                return  # else it was rewritten while this process waited: open what stands there now


def _keep_aside(path: Path, torn: bytes) -> None:
    """Report an unfinished line, and keep it in a file beside the records."""
    aside = path.with_name(f"{path.name}.torn")
    with aside.open("ab") as file:
        file.write(torn + b"\n")
        file.flush()
        os.fsync(file.fileno())
    sys.stderr.write(f"{path}: an incomplete record of {len(torn)} bytes was moved to {aside}\n")


def _torn(content: bytes) -> bytes:
    """Return the text behind the last newline, if it is no complete JSON value."""
    last = content[content.rfind(b"\n") + 1 :]
    try:
        json.loads(last)
    except (ValueError, RecursionError):
        return last
    return b""


def _decode(path: Path, number: int, line: bytes, cls: type[T]) -> T:
    try:
        return decode(cls, json.loads(line), source=f"{path}:{number}")
    except (ValueError, ConfigError, RecursionError) as error:
        raise RecordError(
            f"{path}:{number}: not a record of this version ({error}). Every line must be one complete record; "
            f"restore the line from version control, or delete it."
        ) from error
