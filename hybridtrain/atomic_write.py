"""Atomic, durable writing of files and folders: readers see the old or the new content, also after a power cut."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, which replaces ``path`` atomically at the end.

    Missing folders are made. After an error or interruption ``path`` is unchanged. At the end content and names are on
    disk (fsync).
    """
    make_folder(path.parent)
    partial = _partial(path)
    try:
        yield partial
        _sync(partial)  # ext4 may else move the name first, and a power cut leaves an empty file under it
        partial.replace(path)
        _sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` atomically."""
    with replaced_file(path) as partial:
        partial.write_bytes(content)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, which becomes ``path`` (absent or empty) atomically at the end."""
    make_folder(path.parent)
    partial = _partial(path)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for file in partial.iterdir():
            _sync(file)
        _sync(partial)
        partial.replace(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def make_folder(path: Path) -> None:
    """Create a folder and its parents; their names are on disk at the end (fsync)."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        _sync(folder.parent)


def remove_partials(folder: Path) -> None:
    """Remove partial files and folders of killed processes in ``folder``; no other process may write there."""
    for partial in folder.glob(".*.partial"):
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _sync(path: Path) -> None:
    """Wait until the disk has a file's content, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
