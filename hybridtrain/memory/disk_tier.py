"""The disk tier: files without a name, their space really reserved, which the system frees when the process ends.

A file is opened and has no name from the start (O_TMPFILE), or loses it at once where the file system lacks that: it is
gone with its last descriptor, after SIGKILL too. A forked child that lives on holds it as well.

Reads and writes at offsets, no mmap: a failing disk gives an error, not a SIGBUS. Dropping pages from the cache after
each write (posix_fadvise) brought no speed for 30 GiB on a machine of 23 GiB: the cache is left alone.
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
from types import TracebackType
from typing import Self

from hybridtrain.errors import DiskSpaceError, DiskTierError
from hybridtrain.units import MIB, format_bytes

_CHUNK_BYTES = 64 * MIB  # of one system call: signals are handled between calls
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskFile:
    """A file of fixed size that begins as zeros; made by ``DiskArena.allocate``.

    Threads may read and write disjoint ranges at once.
    """

    def __init__(self, where: str, nbytes: int, file: io.FileIO, on_close: "Callable[[DiskFile], None]") -> None:
        self.where = where
        """Folder and purpose, for messages."""
        self.nbytes = nbytes
        self._file = file
        self._on_close = on_close

    def read(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` (contiguous, writable, any item type) with the file's bytes from ``offset`` on.

        Raises:
            ValueError: the range is not inside the file, or ``target`` cannot be filled.
            DiskTierError: the file is closed, or the disk failed.
        """
        if target.readonly:
            raise ValueError(f"{self.where}: the target is read-only; give writable memory.")
        self._move(os.preadv, offset, target, "reading")

    def write(self, offset: int, source: memoryview) -> None:
        """Write ``source`` (contiguous, any item type) at ``offset``; the page cache takes it, see ``flush``.

        Raises:
            ValueError: the range is not inside the file, or ``source`` is not contiguous.
            DiskTierError: the file is closed, or the disk failed.
            DiskSpaceError: the disk is full although the space was reserved (file systems that copy on write).
        """
        self._move(os.pwritev, offset, source, "writing")

    def flush(self) -> None:
        """Wait until the disk has everything written so far.

        Raises:
            DiskTierError: the disk lost some of it; only here does the system say so.
        """
        self._require_open()
        with _explained(self.where, "flushing"):
            os.fdatasync(self._file.fileno())

    def close(self) -> None:
        """Give the space back; a second time nothing happens."""
        if not self._file.closed:
            self._on_close(self)
            with _explained(self.where, "closing the file"):
                self._file.close()

    def _move(
        self, call: Callable[[int, list[memoryview], int], int], offset: int, memory: memoryview, action: str
    ) -> None:
        """Repeat ``call`` until all of ``memory`` has been moved; each may do less than it is asked for."""
        view = self._span(offset, memory)
        done = 0
        while done < len(view):
            start = offset + done
            with _explained(self.where, f"{action} at byte {start}"):
                count = call(self._file.fileno(), [view[done : done + _CHUNK_BYTES]], start)
                if count == 0:
                    raise OSError(errno.EIO, f"the file ends there, {self.nbytes} bytes were reserved")
            done += count

    def _span(self, offset: int, memory: memoryview) -> memoryview:
        """Return ``memory`` as bytes, once it is known to fit into the file."""
        self._require_open()
        end = offset + memory.nbytes
        if offset < 0 or end > self.nbytes:
            raise ValueError(
                f"{self.where}: bytes {offset} to {end} are not inside the file; allowed: 0 to {self.nbytes}; "
                f"allocate a larger file."
            )
        if not memory.c_contiguous:
            raise ValueError(f"{self.where}: the memory is strided; give contiguous memory.")
        return memory.cast("B") if memory.nbytes else memoryview(b"")

    def _require_open(self) -> None:
        if self._file.closed:
            raise DiskTierError(f"{self.where}: the file is closed; use it before it or its arena is closed.")


class DiskArena:
    """All files of one run, in a folder that the user named, where they are never seen.

    Args:
        folder: On a local disk; made if it is missing, and never removed.

    Raises:
        DiskTierError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._files: set[DiskFile] = set()
        self._is_open = True
        self._lock = threading.Lock()
        with _explained(str(self.folder), "making files in this folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
            _nameless(self.folder).close()

    def allocate(self, nbytes: int, name: str) -> DiskFile:
        """Return a new file of ``nbytes`` zeros whose space is reserved.

        Args:
            nbytes: Size, 0 or more.
            name: What the file is for; part of messages. Need not be unique.

        Raises:
            DiskSpaceError: the disk has less free; nothing was written.
            DiskTierError: the file cannot be made, or the arena is closed.
        """
        if nbytes < 0:
            raise ValueError(f"{name}: {nbytes} bytes; allowed: 0 or more; give a size.")
        with self._lock:
            if not self._is_open:
                raise DiskTierError(f"{self.folder}: the arena is closed; allocate before that.")
            self._require_free(nbytes, name)
            where = f"{self.folder}: '{name}'"
            with _explained(where, f"reserving {format_bytes(nbytes)}"):
                content = _nameless(self.folder)
                try:
                    if nbytes:
                        os.posix_fallocate(content.fileno(), 0, nbytes)
                except BaseException:
                    content.close()
                    raise
            file = DiskFile(where, nbytes, content, self._forget)
            self._files.add(file)
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return file

    def close(self) -> None:
        """Free every file; a second time nothing happens. No read or write may be under way.

        Raises:
            DiskTierError: a file cannot be closed.
        """
        self._is_open = False
        for file in tuple(self._files):
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_free(self, nbytes: int, name: str) -> None:
        with _explained(str(self.folder), "asking for the free space"):
            free_bytes = shutil.disk_usage(self.folder).free
        if nbytes > free_bytes:
            raise DiskSpaceError(
                f"{self.folder}: '{name}' needs {format_bytes(nbytes)} ({nbytes} bytes), {format_bytes(free_bytes)} "
                f"({free_bytes} bytes) are free; free some, name a folder on a larger disk, or move less to disk."
            )

    def _forget(self, file: DiskFile) -> None:
        with self._lock:
            self._files.discard(file)
            self.live_bytes -= file.nbytes


def _nameless(folder: Path) -> io.FileIO:
    """Return an open file in a folder that no name leads to."""
    file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115  the arena closes it
    assert isinstance(file, io.FileIO), "unbuffered"
    return file


@contextmanager
def _explained(where: str, action: str) -> Iterator[None]:
    """Turn the system's errors into ours."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _NO_SPACE:
            raise DiskSpaceError(
                f"{where}: {action} failed: {reason}; free some space or raise the limit, name a folder on a larger "
                f"disk, or move less to disk."
            ) from error
        advice = "the disk may be failing, see the system log" if error.errno == errno.EIO else "mend that"
        raise DiskTierError(f"{where}: {action} failed: {reason}; {advice}, or name another folder.") from error
