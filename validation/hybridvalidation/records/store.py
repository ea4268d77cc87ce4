"""Records on disk: one JSON line each, appended and never changed."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hybridtrain.config.decode import decode
from hybridtrain.config.encode import to_json
from hybridtrain.errors import ConfigError, RecordError
from hybridvalidation.records.record import Record

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecordStore:
    """A folder with one ``.jsonl`` file per scenario."""

    folder: Path

    def append(self, record: Record) -> None:
        """Add a record and wait until it is on disk.

        Raises:
            RecordError: the file's last line was cut short; nothing is appended behind it.
        """
        append_line(self._path(record.scenario), record)

    def read(self, scenario: str) -> list[Record]:
        """Return all records of a scenario, oldest first; an empty list when there is no file.

        Raises:
            RecordError: a line is no record; names file and line.
        """
        return read_lines(self._path(scenario), Record)

    def scenarios(self) -> list[str]:
        """Return the scenarios that have records."""
        return sorted(path.stem for path in self.folder.glob("*.jsonl"))

    def find(self, scenario: str, key: str) -> Record | None:
        """Return the newest record with this key."""
        return next((record for record in reversed(self.read(scenario)) if record.key == key), None)

    def _path(self, scenario: str) -> Path:
        return self.folder / f"{scenario}.jsonl"


def append_line(path: Path, record: object) -> None:
    """Add a record, a dataclass, to a file of records and wait until it is on disk.

    Raises:
        RecordError: the file's last line was cut short; nothing is appended behind it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        raise RecordError(_half_written(path, path.read_bytes().count(b"\n") + 1))
    with path.open("ab") as file:
        file.write((to_json(record) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path, cls: type[T]) -> list[T]:
    """Return the records of a file, oldest first; an empty list when there is no file.

    Raises:
        RecordError: a line is no record; names file and line.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    if lines.pop():
        raise RecordError(_half_written(path, len(lines) + 1))
    return [_decode(path, number, line, cls) for number, line in enumerate(lines, 1)]


def _decode(path: Path, number: int, line: bytes, cls: type[T]) -> T:
    try:
        return decode(cls, json.loads(line), source=f"{path}:{number}")
    except (ValueError, RecursionError, ConfigError) as error:
        raise RecordError(
            f"{path}:{number}: not a record of this version ({error}). Every line must be one whole record; "
            f"restore the line from version control or delete it, the other records stay."
        ) from error


def _half_written(path: Path, line: int) -> str:
    return (
        f"{path}:{line}: the last record is cut short, as after a crash while writing. Every line must end in a "
        f"newline; delete line {line}, its run will be repeated, the other records stay."
    )
