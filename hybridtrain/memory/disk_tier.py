"""The disk tier: unnamed files with reserved space, which the system frees when the process ends.

A file is opened without a name (O_TMPFILE), or unlinked at once: its space is freed with the last descriptor, after
SIGKILL too. A forked child keeps it open.

Reads and writes use offsets instead of mmap, so that a failing disk raises an error, not SIGBUS. Dropping pages from
the cache after each write (posix_fadvise) was not faster for 30 GiB on a machine with 23 GiB.
"""

import errno
import io
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakSet

import torch
from torch import Tensor

from hybridtrain.errors import DiskSpaceError, DiskTierError
from hybridtrain.units import MIB, format_bytes

_CHUNK_BYTES = 64 * MIB  # of one system call: signals are handled between calls
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskFile:
    """Unnamed file of fixed size, zero at first; made by ``DiskArena.allocate``.

    Threads may read and write disjoint ranges at once.
    """

    def __init__(self, where: str, num_bytes: int, file: io.FileIO) -> None:
        self.where = where
        """Folder and purpose, for error messages."""
        self.num_bytes = num_bytes
        self._file = file

    def read(self, offset: int, target: Tensor) -> None:
        """Fill ``target``, contiguous on the CPU, with the file's bytes from ``offset`` on.

        Raises:
            ValueError: the range is not inside the file.
            DiskTierError: the file is closed, or the disk failed.
        """
        self._move(os.preadv, offset, target, "reading")

    def write(self, offset: int, source: Tensor) -> None:
        """Write ``source``, contiguous on the CPU, at ``offset``; the page cache takes it.

        Raises:
            ValueError: the range is not inside the file.
            DiskTierError: the file is closed, or the disk failed.
            DiskSpaceError: the disk is full although the space was reserved (file systems that copy on write).
        """
        self._move(os.pwritev, offset, source, "writing")

    def close(self) -> None:
        """Free the space; no read or write may be in progress. A second call does nothing."""
        with _explained(self.where, "closing the file"):
            self._file.close()

    def _move(self, call: Callable[[int, list[memoryview], int], int], offset: int, data: Tensor, action: str) -> None:
        """Repeat ``call`` until all of ``data`` has been moved; each may do less than it is asked for."""
        if self._file.closed:
            raise DiskTierError(f"{self.where}: the file is closed; use it before closing it or its arena.")
        if offset < 0 or offset + data.nbytes > self.num_bytes:
            raise ValueError(
                f"{self.where}: bytes {offset} to {offset + data.nbytes} are not inside the file; allowed: 0 to "
                f"{self.num_bytes}; allocate a larger file."
            )
        view = data.view(-1).view(torch.uint8).numpy().data
        done = 0
        while done < len(view):
            start = offset + done
            with _explained(self.where, f"{action} at byte {start}"):
                count = call(self._file.fileno(), [view[done : done + _CHUNK_BYTES]], start)
                if count == 0:
                    raise OSError(errno.EIO, f"the file ends there, {self.num_bytes} bytes were reserved")
            done += count


class DiskArena:
    """All files of one run, as unnamed files in a folder of the user's.

    Args:
        folder: On a local disk; created if missing, never removed.

    Raises:
        DiskTierError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._files: WeakSet[DiskFile] = WeakSet()
        self._is_open = True
        self._lock = threading.Lock()
        with _explained(str(self.folder), "making files in this folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
            _nameless(self.folder).close()

    def allocate(self, num_bytes: int, name: str) -> DiskFile:
        """Return a new file of ``num_bytes`` zeros whose space is reserved; messages have its name.

        Raises:
            DiskSpaceError: too little free space; nothing was written.
            DiskTierError: the file cannot be made, or the arena is closed.
        """
        if num_bytes < 0:
            raise ValueError(f"{name}: {num_bytes} bytes; allowed: 0 or more.")
        with self._lock:
            if not self._is_open:
                raise DiskTierError(f"{self.folder}: the arena is closed; allocate before closing it.")
            with _explained(str(self.folder), "asking for the free space"):
                free_bytes = shutil.disk_usage(self.folder).free
            if num_bytes > free_bytes:
                raise DiskSpaceError(
                    f"{self.folder}: '{name}' needs {format_bytes(num_bytes)} ({num_bytes} bytes), "
                    f"{format_bytes(free_bytes)} ({free_bytes} bytes) are free; free disk space, choose a folder on a "
                    f"larger disk, or offload less to disk."
                )
            where = f"{self.folder}: '{name}'"
            with _explained(where, f"reserving {format_bytes(num_bytes)}"):
                content = _nameless(self.folder)
                try:
                    if num_bytes:
                        os.posix_fallocate(content.fileno(), 0, num_bytes)
                except BaseException:
                    content.close()
                    raise
            file = DiskFile(where, num_bytes, content)
            self._files.add(file)
        return file

    def close(self) -> None:
        """Free every file; a second call does nothing. No read or write may be in progress.

        Raises:
            DiskTierError: a file cannot be closed.
        """
        self._is_open = False
        for file in tuple(self._files):
            file.close()


def _nameless(folder: Path) -> io.FileIO:
    file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115  the arena closes it
    assert isinstance(file, io.FileIO), "unbuffered"
    return file


@contextmanager
def _explained(where: str, action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _NO_SPACE:
            raise DiskSpaceError(
                f"{where}: {action} failed: {reason}; free disk space or raise the limit, choose a folder on a larger "
                f"disk, or offload less to disk."
            ) from error
        advice = "check the disk and the system log" if error.errno == errno.EIO else "fix that"
        raise DiskTierError(f"{where}: {action} failed: {reason}; {advice}, or choose another folder.") from error
