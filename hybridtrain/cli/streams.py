"""Standard streams that do not end what writes to them: a run of days outlives its terminal and its encoding."""

import errno
import io
import os
import sys
from typing import Final

_GONE: Final = {errno.EPIPE, errno.EIO, errno.EBADF}
"""The reader ended, the terminal hung up, the stream was closed before."""


class LastingFile(io.FileIO):
    """A stream's file; once nobody can read it any more, what is written is dropped."""

    is_gone = False

    def write(self, content: object, /) -> int:
        """Write bytes, or drop them where nobody can take them."""
        try:
            return super().write(content)  # type: ignore[arg-type]  # bytes or what looks like them
        except OSError as error:
            if error.errno not in _GONE:
                raise
            self.is_gone = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # children inherit it
            os.close(nowhere)
            return super().write(content)  # type: ignore[arg-type]  # as above


def make_streams_last() -> None:
    """Make standard output and error accept any character, and survive a closed pipe or descriptor."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115  to the end of the process
            continue
        if not isinstance(stream, io.TextIOWrapper):
            continue  # somebody else's, which takes what it takes
        stream.reconfigure(errors="backslashreplace")  # a sample may hold what the terminal cannot show
        if type(getattr(stream.buffer, "raw", None)) is io.FileIO and _is(stream, number):
            stream.flush()
            lasting = io.TextIOWrapper(
                io.BufferedWriter(LastingFile(number, "w", closefd=False)), encoding=stream.encoding,
                errors="backslashreplace", line_buffering=stream.line_buffering,
            )  # fmt: skip
            setattr(sys, name, lasting)


def _is(stream: io.TextIOWrapper, number: int) -> bool:
    try:
        return stream.fileno() == number
    except (OSError, ValueError):
        return False


def nobody_reads() -> bool:
    """Whether standard output lost its reader; what it took is flushed."""
    if not isinstance(sys.stdout, io.TextIOWrapper):
        return False
    sys.stdout.flush()
    return getattr(getattr(sys.stdout.buffer, "raw", None), "is_gone", False)
