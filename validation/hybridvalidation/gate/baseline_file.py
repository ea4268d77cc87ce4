"""Baseline files: JSON that is readable in a diff, read whole or refused."""

import json
from pathlib import Path
from typing import TypeVar

from hybridtrain.atomic_write import replace_file
from hybridtrain.config.decode import decode
from hybridtrain.config.encode import to_json
from hybridtrain.errors import ConfigError, RecordError

T = TypeVar("T")


def read_baseline(path: Path, cls: type[T]) -> T | None:
    """Return the dataclass in a baseline file, None where there is none.

    Raises:
        RecordError: the file is damaged; it is named.
    """
    if not path.exists():
        return None
    try:
        return decode(cls, json.loads(path.read_text(encoding="utf-8")), source=str(path))
    except (ValueError, RecursionError, ConfigError) as error:
        raise RecordError(f"{path}: not a whole baseline ({error}); restore it from version control.") from error


def write_baseline(path: Path, baseline: object) -> None:
    """Write a dataclass, one value a line, sorted; the file is replaced at once or not at all."""
    replace_file(path, (json.dumps(json.loads(to_json(baseline)), indent=1, sort_keys=True) + "\n").encode())
