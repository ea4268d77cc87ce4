"""Baseline files: JSON that is readable in diffs; damaged files are rejected."""

import json
from pathlib import Path
from typing import TypeVar

from hybridtrain.atomic_write import replace_file
from hybridtrain.config.decode import decode
from hybridtrain.config.encode import to_json
from hybridtrain.errors import ConfigError, RecordError

T = TypeVar("T")


def read_baseline(path: Path, cls: type[T]) -> T | None:
    """Return the dataclass in a baseline file; None without a file.

    Raises:
        RecordError: the file is damaged.
    """
    if not path.exists():
        return None
    try:
        return decode(cls, json.loads(path.read_text(encoding="utf-8")), source=str(path))
    except (ValueError, RecursionError, ConfigError) as error:
        raise RecordError(f"{path}: damaged baseline ({error}); restore it from version control.") from error


def write_baseline(path: Path, baseline: object) -> None:
    """Write a dataclass atomically, one value per line, sorted."""
    replace_file(path, (json.dumps(json.loads(to_json(baseline)), indent=1, sort_keys=True) + "\n").encode())
