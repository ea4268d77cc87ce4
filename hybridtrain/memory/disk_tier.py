"""The disk tier: files of one run, their space really reserved, gone when the run is.

Reads and writes at offsets, no mmap: a file that someone cuts short gives an error, not a SIGBUS. Dropping pages from
the cache after each write (posix_fadvise) brought no speed for 30 GiB on a machine of 23 GiB: the cache is left alone.
"""

import errno
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from hybridtrain.errors import DiskSpaceError, DiskTierError, HybridTrainError
from hybridtrain.memory.run_folder import RunFolder
from hybridtrain.units import MIB, format_bytes

_CHUNK_BYTES = 64 * MIB  # of one system call: signals are handled between calls
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskFile:
    """A file of fixed size that begins as zeros; made by ``DiskArena.allocate``.

    Threads may read and write disjoint ranges at once.
    """

    def __init__(self, path: Path, nbytes: int, descriptor: int, on_close: "Callable[[DiskFile], None]") -> None:
        self.path = path
        self.nbytes = nbytes
        self._descriptor = descriptor
        self._on_close = on_close

    def read(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` (contiguous, writable, any item type) with the file's bytes from ``offset`` on.

        Raises:
            ValueError: the range is not inside the file, or ``target`` cannot be filled.
            DiskTierError: the file was cut short or closed, or the disk failed.
        """
        if target.readonly:
            raise ValueError(f"{self.path}: the target is read-only; give writable memory.")
        self._move(os.preadv, offset, target, "reading")

    def write(self, offset: int, source: memoryview) -> None:
        """Write ``source`` (contiguous, any item type) at ``offset``; the page cache takes it, see ``flush``.

        Raises:
            ValueError: the range is not inside the file, or ``source`` is not contiguous.
            DiskTierError: the file was cut short or closed, or the disk failed.
            DiskSpaceError: the disk is full although the space was reserved (file systems that copy on write).
        """
        self._require_open()
        if os.fstat(self._descriptor).st_size < self.nbytes:  # a write behind the end would leave zeros before it
            raise self._cut_short()
        self._move(os.pwritev, offset, source, "writing")

    def flush(self) -> None:
        """Wait until the disk has everything written so far.

        Raises:
            DiskTierError: the disk lost some of it; only here does the system say so.
        """
        self._require_open()
        with _explained(self.path, "flushing"):
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Remove the file and give its space back; a second time nothing happens."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        self._on_close(self)
        with _explained(self.path, "removing the file"):
            os.close(descriptor)
            self.path.unlink(missing_ok=True)

    def _move(
        self, call: Callable[[int, list[memoryview], int], int], offset: int, memory: memoryview, action: str
    ) -> None:
        """Repeat ``call`` until all of ``memory`` has been moved; each may do less than it is asked for."""
        view = self._span(offset, memory)
        done = 0
        while done < len(view):
            start = offset + done
            with _explained(self.path, f"{action} at byte {start}"):
                count = call(self._descriptor, [view[done : done + _CHUNK_BYTES]], start)
            if count == 0:
                raise self._cut_short()
            done += count

    def _span(self, offset: int, memory: memoryview) -> memoryview:
        """Return ``memory`` as bytes, once it is known to fit into the file."""
        self._require_open()
        end = offset + memory.nbytes
        if offset < 0 or end > self.nbytes:
            raise ValueError(
                f"{self.path}: bytes {offset} to {end} are not inside the file; allowed: 0 to {self.nbytes}; "
                f"allocate a larger file."
            )
        if not memory.c_contiguous:
            raise ValueError(f"{self.path}: the memory is strided; give contiguous memory.")
        return memory.cast("B") if memory.nbytes else memoryview(b"")

    def _require_open(self) -> None:
        if self._descriptor < 0:
            raise DiskTierError(f"{self.path}: the file is closed; use it before it or its arena is closed.")

    def _cut_short(self) -> DiskTierError:
        size = os.fstat(self._descriptor).st_size
        return DiskTierError(
            f"{self.path}: the file ends at byte {size}, {self.nbytes} were reserved: another program cut it short. "
            f"Leave the folder to this run, and start it again."
        )


class DiskArena:
    """All files of one run, in a folder of their own that goes when the run ends, however it ends (``RunFolder``).

    Args:
        folder: Where the user wants the files, on a local disk; made if it is missing.

    Raises:
        DiskTierError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._files: set[DiskFile] = set()
        self._num_made = 0
        self._lock = threading.Lock()
        with _explained(self.folder, "making a folder for this run"):
            self._run_folder = RunFolder(self.folder)

    def allocate(self, nbytes: int, name: str) -> DiskFile:
        """Return a new file of ``nbytes`` zeros whose space is reserved.

        Args:
            nbytes: Size, 0 or more.
            name: What the file is for; part of its name and of messages. Need not be unique.

        Raises:
            DiskSpaceError: the disk has less free; nothing was written.
            DiskTierError: the file cannot be made, or the arena is closed.
        """
        if nbytes < 0:
            raise ValueError(f"{name}: {nbytes} bytes; allowed: 0 or more; give a size.")
        with self._lock:
            if not self._run_folder.is_open:
                raise DiskTierError(f"{self._run_folder.path}: the arena is closed; allocate before that.")
            self._require_free(nbytes, name)
            file_name = f"{self._num_made:04d}-{re.sub(r'[^A-Za-z0-9._-]', '_', name)[:100]}"
            self._num_made += 1
            file = self._make(self._run_folder.path / file_name, nbytes)
            self._files.add(file)
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return file

    def close(self) -> None:
        """Remove every file; a second time nothing happens. No read or write may be under way.

        Raises:
            DiskTierError: something cannot be removed.
        """
        if not self._run_folder.is_open:
            return
        for file in tuple(self._files):
            with suppress(HybridTrainError):  # the folder goes as a whole below
                file.close()
        if not self._run_folder.remove():
            raise DiskTierError(f"{self._run_folder.path}: the folder cannot be removed; remove it by hand.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make(self, path: Path, nbytes: int) -> DiskFile:
        with _explained(path, f"reserving {format_bytes(nbytes)}"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                if nbytes:
                    os.posix_fallocate(descriptor, 0, nbytes)
            except BaseException:
                os.close(descriptor)
                path.unlink(missing_ok=True)
                raise
        return DiskFile(path, nbytes, descriptor, self._forget)

    def _require_free(self, nbytes: int, name: str) -> None:
        with _explained(self._run_folder.path, "asking for the free space"):
            free_bytes = shutil.disk_usage(self._run_folder.path).free
        if nbytes > free_bytes:
            raise DiskSpaceError(
                f"{self.folder}: '{name}' needs {format_bytes(nbytes)} ({nbytes} bytes), {format_bytes(free_bytes)} "
                f"({free_bytes} bytes) are free; free some, name a folder on a larger disk, or move less to disk."
            )

    def _forget(self, file: DiskFile) -> None:
        with self._lock:
            self._files.discard(file)
            self.live_bytes -= file.nbytes


@contextmanager
def _explained(path: Path, action: str) -> Iterator[None]:
    """Turn the system's errors into ours."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _NO_SPACE:
            raise DiskSpaceError(
                f"{path}: {action} failed: {reason}; free some space or raise the limit, name a folder on a larger "
                f"disk, or move less to disk."
            ) from error
        advice = "the disk may be failing, see the system log" if error.errno == errno.EIO else "mend that"
        raise DiskTierError(f"{path}: {action} failed: {reason}; {advice}, or name another folder.") from error
