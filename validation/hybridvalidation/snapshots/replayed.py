"""``hybridtrain snapshots``: replay what cards recorded and say where the model differs; the page of others' cards."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tabulate import tabulate

from hybridtrain.config.encode import encode
from hybridtrain.errors import DataError
from hybridtrain.reports.tables import MARKDOWN, TERMINAL, write_page
from hybridtrain.run.environment import read_environment
from hybridtrain.run.program import program_digest
from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.allocator.recorded_snapshot import read_snapshot
from hybridtrain.virtual_gpu.allocator.snapshot_replay import SnapshotReplay, lawful_blocks, replay_device
from hybridvalidation.records.makers import made_by
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import append_record, read_lines
from hybridvalidation.snapshots.moves import moves_text, newest_moves
from hybridvalidation.snapshots.public import PublicSnapshot, blob_of, read_public

_FILE = "snapshots.jsonl"
_LEAST_EVENTS = 2
"""A history that keeps the newest event alone, torch's default without a size, has nothing to replay."""
_NEAR = 0.01
"""Share of the recorded reserved bytes within which a replay with addresses of our own is to end."""
_HOW = (
    "Recorded: by torch's allocator on CUDA cards of others, who published the snapshot. Nobody made these for us: "
    "they are training steps, inference and tests of {repositories} repositories. From the last state of a snapshot "
    "its events are undone to the state before the first one; from there the same requests go to our model. "
    "**Events**: recorded, and of them those that the model repeats with the same action, address, size and stream "
    "when the driver puts its segments where it did. **Reserved**: recorded at the end; what was taken since the "
    "first event; the largest error, at the end or at its peak, of the model with addresses of its own, rising (as "
    "plans have it) and falling. When cached memory went back is taken from the record. A snapshot without segments "
    "taken shows that blocks are chosen right, not that segments are. Files that hold no events show the sizes of "
    "blocks alone: in use, and of them those that have the size the model gives their request."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedDevice:
    """One device of one snapshot."""

    blob: str
    name: str
    """The repository and path, or the file's name."""
    device: int
    num_blocks: int
    """In use at the end."""
    num_lawful: int
    """Of them, those of the size that the model gives their request."""
    replay: SnapshotReplay | None = None
    """None: no events."""
    refused: str = ""
    """Why the events cannot be replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotsRecord(Record):
    """All snapshots that were at hand."""

    devices: tuple[ReplayedDevice, ...]
    evidence: Evidence = Evidence.PLANNED


def replay_files(paths: Sequence[Path], scenarios: Path) -> SnapshotsRecord:
    """Return the replay of files, or of all ``*.pickle`` and ``*.pkl`` below folders.

    Raises:
        DataError: a file that is no snapshot, or nothing to replay; of a folder only listed files are taken.
    """
    public = read_public(scenarios)
    devices, begin, started = list[ReplayedDevice](), time.perf_counter(), datetime.now(UTC)
    for path in paths:
        found = sorted([*path.rglob("*.pickle"), *path.rglob("*.pkl")]) if path.is_dir() else [path]
        for file in found:
            listed = public.get(blob_of(file))
            if not path.is_dir() or (listed is not None and not listed.left_out):
                devices += _replay_file(file, listed)
    if not devices:
        raise DataError(
            f"{', '.join(map(str, paths))}: no snapshot; name .pickle files of torch.cuda.memory._dump_snapshot, or "
            "folders with files of scenarios/snapshots/public.toml."
        )
    unique = {(device.blob, device.device): device for device in devices}
    return SnapshotsRecord(
        key="snapshots", devices=tuple(sorted(unique.values(), key=lambda each: (each.name, each.blob, each.device))),
        started_at=started.isoformat(timespec="seconds"), duration_s=round(time.perf_counter() - begin, 3),
        environment=read_environment(), program=program_digest(),
    )  # fmt: skip


def append_snapshots(records: Path, record: SnapshotsRecord) -> None:
    """Add a record and wait until it is on disk."""
    append_record(records, _FILE, record)


def snapshots_text(record: SnapshotsRecord, style: str = TERMINAL) -> str:
    """Return the sum and a row for each device."""
    replayed = [each for each in record.devices if each.replay is not None]
    others = [each for each in record.devices if each.replay is None]
    parts = [headline(record)]
    if replayed:
        headers = ("snapshot", "allocations", "segments", "events", "same", "reserved", "since", "rising", "falling")
        parts.append(tabulate(map(_row, replayed), headers=headers, tablefmt=style, disable_numparse=True))
    if others:
        rows = [[_name(each), each.num_blocks, each.num_lawful, each.refused] for each in others]
        titles = ("snapshot without events", "blocks in use", "of the model's size", "remark")
        parts.append(tabulate(rows, headers=titles, tablefmt=style, disable_numparse=True))
    return "\n\n".join(parts)


def headline(record: SnapshotsRecord) -> str:
    """Return in sentences what was met."""
    runs = [(each, each.replay) for each in record.devices if each.replay is not None]
    same = sum(_is_same(replay) for _, replay in runs)
    whole = sum(not replay.start_reserved_bytes for _, replay in runs)
    growing = [replay for _, replay in runs if replay.num_segments]
    events = sum(replay.num_events for _, replay in runs)
    near = sum(abs(_errors(replay)[0]) <= _NEAR for _, replay in runs)
    blocks, lawful = (sum(getattr(each, name) for each in record.devices) for name in ("num_blocks", "num_lawful"))
    return (
        f"{same} of {len(runs)} recorded histories ({len({each.blob for each, _ in runs})} files, {events:,} events) "
        f"are repeated event by event, to the same segments and blocks at the end. {whole} begin with nothing "
        f"reserved, and in {len(growing)} segments were taken, "
        f"{sum(replay.num_segments for replay in growing):,} in all. With addresses of our own, as plans have them, "
        f"allocated bytes are equal in {sum(_allocates_same(replay) for _, replay in runs)}, and reserved bytes "
        f"stay within {100 * _NEAR:g} % in {near}. {lawful:,} of {blocks:,} blocks in use have the size that the "
        f"model gives their request."
    )


def write_reserved(scenarios: Path, results: Path) -> list[Path]:
    """Write ``tables/reserved.md`` from the newest records; nothing without snapshots."""
    found = read_lines(results / "records" / _FILE, SnapshotsRecord)
    if not found:
        return []
    record, public, moves = found[-1], read_public(scenarios), newest_moves(results / "records")
    repositories = {public[each.blob].repository for each in record.devices if each.blob in public}
    parts = [
        "# Reserved bytes: snapshots of real cards, replayed",
        snapshots_text(record, MARKDOWN),
        _HOW.format(repositories=len(repositories)),
        _left_out(public),
    ]
    parts += ["## By how much plans move", moves_text(moves, MARKDOWN)] if moves else []
    parts.append(made_by([("of snapshots", record), *(("of plans", each) for each in moves)]))
    return [write_page(results, "reserved", "\n\n".join(parts))]


def differs(record: SnapshotsRecord) -> bool:
    """Return whether anything recorded is not repeated."""
    replays = [each.replay for each in record.devices if each.replay is not None]
    return any(each.num_lawful < each.num_blocks or each.refused for each in record.devices) or not all(
        map(_is_same, replays)
    )


def as_mapping(record: SnapshotsRecord) -> Mapping[str, object]:
    """Return the plain figures."""
    return {"headline": headline(record), "devices": [encode(each) for each in record.devices]}


def _replay_file(file: Path, listed: PublicSnapshot | None) -> list[ReplayedDevice]:
    name = file.name if listed is None else f"{listed.repository} {listed.path}"
    blob, found = blob_of(file), list[ReplayedDevice]()
    for number, device in enumerate(read_snapshot(file)):
        lawful, total = lawful_blocks(device)
        replay, refused = None, ""
        if len(device.events) >= _LEAST_EVENTS:
            try:
                replay = replay_device(device)
            except ValueError as error:
                refused = str(error)
        found.append(
            ReplayedDevice(
                blob=blob, name=name, device=number, num_blocks=total, num_lawful=lawful, replay=replay, refused=refused
            )
        )
    return found


def _is_same(replay: SnapshotReplay) -> bool:
    return replay.same_end and replay.num_same_events == replay.num_events


def _errors(replay: SnapshotReplay) -> tuple[float, float]:
    """Return the largest relative error of reserved bytes, rising and falling, with its sign."""
    recorded = replay.recorded
    pairs = [
        (
            outcome.reserved_bytes / (recorded.reserved_bytes or 1) - 1,
            outcome.peak_reserved_bytes / (recorded.peak_reserved_bytes or 1) - 1,
        )
        for outcome in (replay.rising, replay.falling)
    ]
    rising, falling = (max(pair, key=abs) for pair in pairs)
    return rising, falling


def _allocates_same(replay: SnapshotReplay) -> bool:
    return replay.rising.allocated_bytes == replay.recorded.allocated_bytes


def _name(each: ReplayedDevice) -> str:
    return f"{each.name} ({each.blob[:8]}{f', card {each.device}' if each.device else ''})"


def _row(each: ReplayedDevice) -> list[str]:
    replay = each.replay
    assert replay is not None, "only those with events have a row here"
    return [
        _name(each), f"{replay.num_allocs:,}", f"{replay.num_segments:,}", f"{replay.num_events:,}",
        "all" if _is_same(replay) else f"{replay.num_same_events:,}",
        format_bytes(replay.recorded.reserved_bytes),
        format_bytes(replay.recorded.peak_reserved_bytes - replay.start_reserved_bytes),
        *(f"{100 * error:+.2f} %" for error in _errors(replay)),
    ]  # fmt: skip


def _left_out(public: Mapping[str, PublicSnapshot]) -> str:
    reasons = [snapshot.left_out for snapshot in public.values() if snapshot.left_out]
    told = "; ".join(f"{reasons.count(reason)} {reason}" for reason in dict.fromkeys(reasons))
    licences = [snapshot.licence for snapshot in public.values()]
    kinds = ", ".join(f"{licences.count(licence)} {licence}" for licence in dict.fromkeys(licences))
    return (
        f"{len(public)} files are known (scenarios/snapshots/public.toml), by their content's digest; licence of their "
        f"repositories: {kinds}. None of them stands here. Not replayed: {told}. What is attached to "
        "threads of issues could not be had at all. To repeat it, put the files "
        "anywhere and run `hybridtrain snapshots FOLDER`; a snapshot of your own is replayed by its path."
    )
