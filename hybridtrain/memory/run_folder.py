"""A folder that lives as long as one run: removed at its end however that comes, or by the next run after a SIGKILL."""

import atexit
import fcntl
import os
import re
import secrets
import shutil
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

_RUN_FOLDER = re.compile(r"hybridtrain-(\d{1,9})-[0-9a-f]{8}")
_LOCK_NAME = "lock"
_REMOVE_ATTEMPTS = 3  # another thread may be making a file meanwhile


class RunFolder:
    """A new folder ``hybridtrain-<pid>-<random>`` below ``parent``.

    It is removed by ``remove``, at the interpreter's exit and on SIGTERM. The handler for that is installed only in the
    main thread and only where the program has none; it lets the process die of the signal. Folders left by killed
    processes are removed when the next one is made beside them: a lock, which the system drops when a process ends,
    tells them from folders in use. A forked child leaves the folder to its parent.

    Args:
        parent: Made if it is missing, and never removed.

    Raises:
        OSError: the folder cannot be made; nothing is left.
    """

    def __init__(self, parent: Path) -> None:
        self.path = parent.absolute() / f"hybridtrain-{os.getpid()}-{secrets.token_hex(4)}"
        self._lock_descriptor = -1
        _register(self)
        try:
            parent.mkdir(parents=True, exist_ok=True)
            remove_left_folders(parent)
            self.path.mkdir(mode=0o700)
            self._lock_descriptor = _lock_folder(self.path)
        except BaseException:
            self.remove()
            raise

    @property
    def is_open(self) -> bool:
        """Whether it is there and this process has to remove it."""
        return self in _open_folders

    def remove(self) -> bool:
        """Remove the folder with all files; return whether it is gone."""
        if self.is_open:
            _remove_tree(self.path)
            _unregister(self)
            self._release_lock()
        return not os.path.lexists(self.path)

    def _release_lock(self) -> None:
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1


_open_folders: set[RunFolder] = set()


def remove_left_folders(parent: Path) -> None:
    """Remove run folders below ``parent`` whose processes are dead; what belongs to another user stays."""
    for entry in parent.iterdir():
        found = _RUN_FOLDER.fullmatch(entry.name)
        if found:
            with suppress(OSError):  # not ours to remove, or BlockingIOError: locked, in use
                _remove_if_left(entry, int(found[1]))


def _remove_if_left(path: Path, pid: int) -> None:
    """Remove a folder that no process holds: its lock is free, or was never taken and its maker is dead."""
    if path.is_symlink() or not path.is_dir():
        return
    try:
        descriptor = os.open(path / _LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        if not _is_alive(pid):
            _remove_tree(path)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_size or not _is_alive(pid):
            _remove_tree(path)
    finally:
        os.close(descriptor)


def _lock_folder(path: Path) -> int:
    """Return the descriptor that holds the folder's lock."""
    descriptor = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, f"{os.getpid()}\n".encode())  # any content means: the lock was taken
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _remove_tree(path: Path) -> None:
    for _ in range(_REMOVE_ATTEMPTS):
        with suppress(OSError):
            shutil.rmtree(path)
        if not os.path.lexists(path):
            return


def _register(folder: RunFolder) -> None:
    _open_folders.add(folder)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _unregister(folder: RunFolder) -> None:
    _open_folders.discard(folder)
    if not _open_folders:
        _restore_sigterm()


def _restore_sigterm() -> None:
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) == _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _remove_open_folders() -> None:
    """Remove what is open, and let threads make nothing more; closes no file that one of them may be using."""
    for folder in tuple(_open_folders):
        _open_folders.discard(folder)
        _remove_tree(folder.path)


def _on_sigterm(number: int, _frame: FrameType | None) -> None:
    _remove_open_folders()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _disown_in_child() -> None:
    """Leave the folders to the parent: a forked child neither removes them nor keeps their locks."""
    for folder in tuple(_open_folders):
        folder._release_lock()
    _open_folders.clear()
    _restore_sigterm()


atexit.register(_remove_open_folders)
os.register_at_fork(after_in_child=_disown_in_child)
