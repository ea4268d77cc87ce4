"""Reading of user-given files; pipes and devices are rejected, because a read might never end."""

import errno
import os
import stat
from pathlib import Path


def read_plain(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: it cannot be read, or is a folder, pipe or device.
    """
    with os.fdopen(open_plain(path), "rb") as file:
        return file.read()


def open_plain(path: Path) -> int:
    """Return a descriptor of a file to read; raises as ``read_plain``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer blocks else
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "is a pipe or a device; save its content to a file", str(path))
