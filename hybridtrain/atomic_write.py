"""Writing a file so that a reader sees the old content or the new one, never a part."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Give a path beside ``path`` to write to, and move it there in one step at the end.

    Missing folders are made. An error inside, or an interruption, leaves ``path`` as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` in one step."""
    with replaced_file(path) as partial:
        partial.write_bytes(content)
