"""Writing a file so that a reader sees the old content or the new one, never a part, also after a power cut."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced_file(path: Path, *, keep: Path | None = None) -> Iterator[Path]:
    """Give a path beside ``path`` to write to, and move it there in one step at the end.

    Missing folders are made. An error inside, or an interruption, leaves ``path`` as it was. Content and names have
    reached the disk when this ends.

    Args:
        path: The file.
        keep: Where the old file goes, in the same folder; between the two moves there is this one only.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        _sync(partial)  # ext4 may else move the name first, and a power cut leaves an empty file under it
        if keep is not None and path.exists():
            path.replace(keep)
        partial.replace(path)
        _sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` in one step."""
    with replaced_file(path) as partial:
        partial.write_bytes(content)


def remove_partials(path: Path) -> None:
    """Remove what killed processes left of writing ``path``; nobody may be writing it now."""
    for partial in path.parent.glob(f".{path.name}.*.partial"):
        partial.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Wait until the disk has a file's content, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
