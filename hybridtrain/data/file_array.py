"""Arrays in files, read part by part on demand, so that a changed file gives an error message.

Reading a memory-mapped page beyond the end of a truncated file raises SIGBUS, which kills the process. So small parts
are read by offset; larger ones stay views.
"""

import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hybridtrain.errors import DataError
from hybridtrain.plain_file import open_plain

_READ_BYTES: Final = 2**25
"""Largest read at a time: more than a batch, and more than a check reads at a time."""


class _Opened:
    """A file as it was when it was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = open_plain(path)
        self._seen = self.state()

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def state(self) -> tuple[int, int]:
        """Return size and time of the last change."""
        status = os.fstat(self.descriptor)
        return status.st_size, status.st_mtime_ns

    def read(self, values: npt.NDArray[Any], offset: int) -> None:
        """Fill an array from an offset of the file; raises ``DataError`` if the file has changed."""
        rest = values.reshape(-1).view(np.uint8).data
        try:
            while rest and (count := os.preadv(self.descriptor, [rest], offset)):
                rest, offset = rest[count:], offset + count
        except OSError as error:
            raise DataError(f"{self.path} cannot be read ({error.strerror}); check the disk it is on") from error
        if rest or self.state() != self._seen:
            raise DataError(
                f"{self.path} changed or shrank while in use; the data of a run must not change: restore the file, "
                f"then resume"
            )


class FileArray(np.memmap[Any, Any]):
    """A flat, read-only array in a file."""

    _opened: _Opened
    _begin: int
    """Address and offset of the array's first element."""
    _offset: int

    def __array_finalize__(self, owner: Any) -> None:
        """Pass the file on to views."""
        super().__array_finalize__(owner)
        for name in ("_opened", "_begin", "_offset"):
            if hasattr(owner, name):
                setattr(self, name, getattr(owner, name))

    def __getitem__(self, key: Any) -> Any:
        """Return a part: its values, or a view where it is large."""
        is_stored = self._mmap is not None and hasattr(self, "_opened")  # type: ignore[attr-defined]  # of memmap
        if not is_stored or not isinstance(key, int | np.integer | slice):
            return super().__getitem__(key)
        part = super().__getitem__(slice(key, key + 1 or None) if not isinstance(key, slice) else key)
        if not isinstance(part, FileArray) or part.nbytes > _READ_BYTES or part.strides != (part.itemsize,):
            return part
        values = np.empty(part.shape, dtype=part.dtype)
        if values.size:
            self._opened.read(values, self._offset + part.ctypes.data - self._begin)
        values.flags.writeable = False
        return values if isinstance(key, slice) else values[0]


def open_array(path: Path, dtype: npt.DTypeLike, *, offset: int = 0) -> npt.NDArray[Any]:
    """Return the values of a file from a byte offset to its end; raises ``OSError`` if it cannot be read."""
    opened = _Opened(path)
    size = (opened.state()[0] - offset) // np.dtype(dtype).itemsize
    if not size:
        return np.empty(0, dtype=dtype)
    array = FileArray(path, dtype=dtype, mode="r", offset=offset, shape=(size,))
    array._opened, array._begin, array._offset = opened, array.ctypes.data, offset
    whole: npt.NDArray[Any] = array[:]
    return whole
