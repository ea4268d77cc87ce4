"""The folder of a run's checkpoints: listing them, finding the newest intact one, removing old ones."""

import shutil
from collections.abc import Callable
from pathlib import Path

from hybridtrain.checkpoint.manifest import Generation, read_generation, verify
from hybridtrain.errors import ConfigError, DiskSpaceError
from hybridtrain.units import format_bytes

_PREFIX, _DAMAGED = "step-", "damaged-"
_HOUR_S = 3600

Say = Callable[[str], None]


def generation_folder(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint after ``step``."""
    return folder / f"{_PREFIX}{step:08d}"


def generations(folder: Path) -> list[Path]:
    """Return the folders of all checkpoints, the oldest first, without verifying them."""
    steps = ((path.name.removeprefix(_PREFIX), path) for path in folder.glob(f"{_PREFIX}*"))
    return [path for _, path in sorted((int(step), path) for step, path in steps if step.isdecimal())]


def newest_generation(folder: Path, say: Say) -> Generation:
    """Return the newest checkpoint whose checksums match; raises ``ConfigError`` if there is none.

    Newer damaged ones are renamed to ``damaged-*``, each reported to ``say``.
    """
    faults: list[tuple[Path, str]] = []
    for path in reversed(generations(folder)):
        try:
            generation = read_generation(path)
            verify(generation)
        except (ConfigError, OSError, ValueError) as error:
            faults.append((path, str(error).replace("\n", " ")))
            continue
        for damaged, fault in faults:
            aside = damaged.with_name(f"{_DAMAGED}{damaged.name}")
            shutil.rmtree(aside, ignore_errors=True)
            damaged.replace(aside)
            say(f"{damaged}: the checkpoint is damaged ({fault}); renamed to {aside.name}")
        if faults:
            say(f"resuming from {path.name}, the newest intact checkpoint")
        return generation
    if faults:
        told = [
            f"{path.name}: the checkpoint is damaged ({fault}); restore a copy of it, or start a new run"
            for path, fault in faults
        ]
        raise ConfigError(str(folder), told)
    if (old := folder.parent / "state.pt").is_file():
        fault = (
            "is a single-file checkpoint of an earlier version; this version reads folders in {folder.name}/ only: "
            "finish the run with the earlier version, or start a new run in another --out"
        )
        raise ConfigError(str(old), [fault])
    raise ConfigError(str(folder), ["there is no checkpoint to resume from; start without --resume"])


def thin_out(folder: Path, *, keep_last: int, keep_hourly: int, spare_bytes: int) -> None:
    """Remove old checkpoints but the ``keep_last`` (at least 1) newest and the first of ``keep_hourly`` hours.

    With less than ``spare_bytes`` of free space hourly ones are removed too, the oldest first.
    """
    older = generations(folder)[:-keep_last]
    hours: dict[int, Path] = {}
    for path in older:
        hours.setdefault(_hour(path), path)
    kept = [hours[hour] for hour in sorted(hours)][-keep_hourly:] if keep_hourly else []
    for path in older:
        if path not in kept:
            remove_generation(path)
    for path in kept:
        if shutil.disk_usage(folder).free < spare_bytes:
            remove_generation(path)


def remove_generation(path: Path) -> None:
    """Remove a checkpoint; after an interruption the next run removes the rest."""
    leaving = path.with_name(f".{path.name}.leaving.partial")
    path.replace(leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def require_room(folder: Path, num_bytes: int, need: str, advice: str) -> None:
    """Raise ``DiskSpaceError`` unless the folder's disk has that many bytes free."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise DiskSpaceError(
            f"{folder}: {need} need {format_bytes(num_bytes)} ({num_bytes} bytes), {format_bytes(free)} ({free} bytes) "
            f"are free; {advice}"
        )


def _hour(path: Path) -> int:
    """Return the hour since 1970 in which a checkpoint was saved; of a damaged one, that of its folder."""
    try:
        return int(read_generation(path).manifest.saved_at // _HOUR_S)
    except (OSError, ValueError):
        return int(path.stat().st_mtime // _HOUR_S)
