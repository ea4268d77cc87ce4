"""File operations of a process in a folder, and the disk images that a power cut may leave of them.

The disk holds a file's content as of its last fsync; of later writes it may hold anything: here nothing, a part, or
zeros. It holds a folder's names as of the folder's last fsync. Of later renames, new and removed names any subset may
be there, in order. POSIX allows all of this, and ext4 less.
"""

import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

_NAMES: Final = {"os.rename": 2, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "shutil.rmtree": 1}
"""Audit events that change names, and how many paths they have."""


@dataclass(frozen=True, slots=True)
class Act:
    """One file operation, in order."""

    kind: str
    """``sync`` of a file, ``sync folder``, ``create``, or an event of ``_NAMES``."""
    path: str
    """Relative to the folder."""
    target: str = ""
    content: bytes = b""
    """Content of a file when it was synced."""


def recorded(folder: Path, log: Path, work: Callable[[], None]) -> Callable[[], None]:
    """Return work that logs every file operation within ``folder`` to ``log``."""

    def watched() -> None:
        with log.open("wb", buffering=0) as file:
            _watch(folder, file)
            work()

    return watched


def _watch(folder: Path, file: BinaryIO) -> None:
    sync, root = os.fsync, f"{folder}{os.sep}"

    def note(kind: str, path: str, target: str = "", content: bytes = b"") -> None:
        line = json.dumps([kind, path.removeprefix(root), target.removeprefix(root), content.hex()])
        file.write(line.encode() + b"\n")

    def listen(event: str, arguments: tuple[object, ...]) -> None:
        paths = [os.fspath(part) for part in arguments[: _NAMES.get(event, 0)] if isinstance(part, str | os.PathLike)]
        if paths and all(isinstance(path, str) and path.startswith(root) for path in paths):
            note(event, str(paths[0]), str(paths[-1]) if len(paths) > 1 else "")
        elif event == "open" and str(arguments[0]).startswith(root) and _creates(arguments):
            note("create", str(arguments[0]))

    def waited(descriptor: int) -> None:
        sync(descriptor)
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if os.path.isdir(path):  # noqa: PTH112  as the system names it
            note("sync folder", path + os.sep)
        elif path.startswith(root):
            note("sync", path, content=Path(path).read_bytes())

    os.fsync = waited  # type: ignore[assignment]  # the project gives descriptors only
    sys.addaudithook(listen)


def _creates(arguments: tuple[object, ...]) -> bool:
    flags = arguments[2]
    return isinstance(flags, int) and bool(flags & os.O_CREAT) and not os.path.exists(str(arguments[0]))  # noqa: PTH110


def read_log(log: Path) -> list[Act]:
    """Read the operations that ``recorded`` logged."""
    found = [json.loads(line) for line in log.read_bytes().splitlines()]
    return [Act(kind, path.rstrip(os.sep), target, bytes.fromhex(content)) for kind, path, target, content in found]


def image_of(acts: Sequence[Act], count: int, seed: int) -> dict[str, bytes]:
    """Return files and contents of a disk image that a power cut left after some operations."""
    draw, done = random.Random(seed), acts[:count]  # noqa: S311  not a secret
    synced = _contents(done)
    names: dict[str, int] = {}
    for number, act in enumerate(done):
        if act.kind not in _NAMES and act.kind != "create":
            continue
        is_kept = all(_is_waited_for(folder, done[number:]) for folder in _folders(act))
        if is_kept or draw.random() < 0.5:
            _apply(act, number, names, draw=None if is_kept else draw)
    return {path: synced.get(inode, _anything(draw)) for path, inode in names.items()}


def _contents(acts: Sequence[Act]) -> dict[int, bytes]:
    """Return the content that is certainly on disk, by the operation that created the file."""
    live: dict[str, int] = {}
    found: dict[int, bytes] = {}
    for number, act in enumerate(acts):
        if act.kind == "sync" and act.path in live:
            found[live[act.path]] = act.content
        else:
            _apply(act, number, live, draw=None)
    return found


def _apply(act: Act, number: int, names: dict[str, int], *, draw: random.Random | None) -> None:
    """Apply an operation to the names; with ``draw`` the removal of a folder is partial."""
    inside = [path for path in names if path == act.path or path.startswith(f"{act.path}{os.sep}")]
    match act.kind:
        case "create":
            names.setdefault(act.path, number)
        case "os.rename":
            moved = {act.target + path[len(act.path) :]: names.pop(path) for path in inside}
            names.update(moved)
        case "os.remove" | "shutil.rmtree":
            for path in inside:
                if draw is None or draw.random() < 0.5:
                    del names[path]


def _folders(act: Act) -> set[str]:
    return {os.path.dirname(path) for path in (act.path, act.target) if path}  # noqa: PTH120  of a plain text


def _is_waited_for(folder: str, later: Sequence[Act]) -> bool:
    return any(act.kind == "sync folder" and act.path == folder for act in later)


def _anything(draw: random.Random) -> bytes:
    return draw.choice((b"", bytes(draw.randint(1, 300)), draw.randbytes(draw.randint(1, 300))))
