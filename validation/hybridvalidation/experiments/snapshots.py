"""``hybridtrain snapshots``: allocator histories of real cards, replayed in the model; and sensitivity of plans.

Public snapshots are identified by a digest of their content, and not stored here (``scenarios/snapshots``).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path

from hybridtrain.config.decode import load_toml
from hybridtrain.config.encode import encode
from hybridtrain.errors import DataError
from hybridtrain.planning.dry_runs import DryRunInputs
from hybridtrain.reports.tables import MARKDOWN, TERMINAL, table, write_page
from hybridtrain.units import format_bytes, to_gib
from hybridtrain.virtual_gpu.allocator.recorded_snapshot import read_snapshot
from hybridtrain.virtual_gpu.allocator.reserved_range import DRIVER, EVALUATION, LENGTHS, MORE_STEPS, reserved_range
from hybridtrain.virtual_gpu.allocator.snapshot_replay import Outcome, SnapshotReplay, matching_blocks, replay_device
from hybridvalidation.experiment import begin_header
from hybridvalidation.records.makers import made_by
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import read_lines
from hybridvalidation.scenario import Scenario
from hybridvalidation.scenario_files import ScenarioFiles

SNAPSHOTS_FILE, MOVES_FILE = "snapshots.jsonl", "reserved.jsonl"
_LEAST_EVENTS = 2
"""Fewest events of a history; torch's default of one event cannot be replayed."""
_NEAR = 0.01
"""Largest relative error of reserved bytes with our own addresses."""
_HOW = (
    "Recorded by torch's allocator on other people's CUDA cards, in snapshots published in {repositories} "
    "repositories: training steps, inference and tests, not made for this project. Events are undone from the final "
    "state; then the same requests are replayed in our model. **Events**: recorded events. **Same**: events with "
    "equal action, address, size and stream, given the driver's segment addresses. **Reserved**: recorded at the end. "
    "**Since**: reserved since the first event. **Rising**, **falling**: the largest error, at the end or at the "
    "peak, with the model's own addresses; plans use rising ones. Releases of cached memory are taken from the "
    "record. A snapshot without new segments tests only the choice of blocks. Files without events show only block "
    "sizes: blocks in use, and those with the model's size."
)
_CHANGES = (DRIVER, EVALUATION, MORE_STEPS, LENGTHS)
_HOW_PLANS = (
    "Planned: the events of a scenario's dry run, replayed in the allocator model without and with one change. "
    "Reserved: peak of the dry run's steps, without a cap. **Driver**: segments at falling addresses. "
    "**Evaluation**: a forward pass alone before the first step. **More steps**: the last step four more times. "
    "**Lengths**: steps of 1/2 to 7/8 of the length before and between, which this project's trainer does not make. "
    "A dash: the plan's last step leaks, or has no such change. `hybridtrain dry-run` prints these for any plan; "
    "`recommend` leaves the largest of the first three free. A full card frees cached segments before an "
    "out-of-memory error, so a plan above the card's memory may still run, at the cost of repeated allocations."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicSnapshot:
    """One file in a public repository."""

    blob: str
    """Git blob hash of its content."""
    repository: str
    """Repository on github.com."""
    path: str
    licence: str
    """Licence of the repository."""
    left_out: str = ""
    """Reason for not replaying it; empty: it is replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicSnapshots:
    """The whole file."""

    snapshots: tuple[PublicSnapshot, ...]


def read_public(scenarios: Path) -> dict[str, PublicSnapshot]:
    """Return all snapshots by blob hash; raises ``ConfigError`` for an invalid file."""
    found = load_toml(PublicSnapshots, scenarios / "snapshots" / "public.toml").snapshots
    return {snapshot.blob: snapshot for snapshot in found}


def blob_of(path: Path) -> str:
    """Return a file's git blob hash."""
    content = path.read_bytes()
    return sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedDevice:
    """One device of one snapshot."""

    blob: str
    name: str
    """The repository and path, or the file's name."""
    device: int
    num_blocks: int
    """Blocks in use at the end."""
    num_lawful: int
    """Blocks whose size equals the model's for their request."""
    replay: SnapshotReplay | None = None
    """Replay of the events; None: there are none."""
    refused: str = ""
    """Reason why the events cannot be replayed; empty: they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotsRecord(Record):
    """All available snapshots."""

    devices: tuple[ReplayedDevice, ...]
    evidence: Evidence = Evidence.PLANNED


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMoves:
    """Reserved bytes of one stack's plan, by change."""

    stack: str
    planned_bytes: int
    """Peak of the reserved bytes of the dry run's steps, without a cap."""
    by_change: Mapping[str, int]
    """Peak with each change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovesRecord(Record):
    """Reserved bytes of all stacks of a scenario."""

    scenario: str
    plans: tuple[PlanMoves, ...]
    evidence: Evidence = Evidence.PLANNED


def replay_files(paths: Sequence[Path], scenarios: Path) -> SnapshotsRecord:
    """Return the replay of files, or of all ``*.pickle`` and ``*.pkl`` below folders.

    Raises:
        DataError: a file is not a snapshot, or there is nothing to replay; in folders only listed files are used.
    """
    public = read_public(scenarios)
    devices, header = list[ReplayedDevice](), begin_header()
    for path in paths:
        files = sorted([*path.rglob("*.pickle"), *path.rglob("*.pkl")]) if path.is_dir() else [path]
        for file in files:
            listed = public.get(blob_of(file))
            if not path.is_dir() or (listed is not None and not listed.left_out):
                devices += _replay_file(file, listed)
    if not devices:
        raise DataError(
            f"{', '.join(map(str, paths))}: no snapshot found; give .pickle files of "
            f"torch.cuda.memory._dump_snapshot, or folders with files listed in scenarios/snapshots/public.toml."
        )
    unique = {(device.blob, device.device): device for device in devices}
    found = sorted(unique.values(), key=lambda each: (each.name, each.blob, each.device))
    return SnapshotsRecord(key="snapshots", devices=tuple(found), **header())


def snapshots_text(record: SnapshotsRecord, style: str = TERMINAL) -> str:
    """Return the summary and a row for each device."""
    replayed = [each for each in record.devices if each.replay is not None]
    others = [each for each in record.devices if each.replay is None]
    parts = [headline(record)]
    if replayed:
        headers = ("snapshot", "same", "reserved", "rising", "falling", "allocations", "segments", "events", "since")
        parts.append(table(headers, list(map(_row, replayed)), style))
    if others:
        rows = [[_name(each), str(each.num_blocks), str(each.num_lawful), each.refused] for each in others]
        titles = ("snapshot without events", "blocks in use", "of the model's size", "remark")
        parts.append(table(titles, rows, style))
    return "\n\n".join(parts)


def headline(record: SnapshotsRecord) -> str:
    """Return the summary in sentences."""
    runs = [(each, each.replay) for each in record.devices if each.replay is not None]
    same = sum(_is_same(replay) for _, replay in runs)
    whole = sum(not replay.start_reserved_bytes for _, replay in runs)
    growing = [replay for _, replay in runs if replay.num_segments]
    events = sum(replay.num_events for _, replay in runs)
    near = sum(abs(_error(replay.rising, replay.recorded)) <= _NEAR for _, replay in runs)
    equal = sum(replay.rising.allocated_bytes == replay.recorded.allocated_bytes for _, replay in runs)
    blocks, lawful = (sum(getattr(each, name) for each in record.devices) for name in ("num_blocks", "num_lawful"))
    return (
        f"{same} of {len(runs)} recorded histories ({len({each.blob for each, _ in runs})} files, {events:,} events) "
        f"are reproduced event by event, with equal segments and blocks at the end. {whole} start with nothing "
        f"reserved; in {len(growing)} new segments were reserved, "
        f"{sum(replay.num_segments for replay in growing):,} in all. With our own addresses, as in plans, allocated "
        f"bytes are equal in {equal}, and reserved bytes are within {100 * _NEAR:g} % in {near}. {lawful:,} of "
        f"{blocks:,} blocks in use have the model's size for their request."
    )


def write_reserved(scenarios: Path, results: Path) -> list[Path]:
    """Write ``tables/reserved.md`` from the newest records; nothing without snapshots."""
    found = read_lines(results / "records" / SNAPSHOTS_FILE, SnapshotsRecord)
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
    parts += ["## Sensitivity of planned reserved bytes", moves_text(moves, MARKDOWN)] if moves else []
    parts.append(made_by([("of snapshots", record), *(("of plans", each) for each in moves)]))
    return [write_page(results, "reserved", "\n\n".join(parts))]


def differs(record: SnapshotsRecord) -> bool:
    """Return whether any recorded event differs in the replay."""
    replays = [each.replay for each in record.devices if each.replay is not None]
    is_wrong = any(each.num_lawful < each.num_blocks or each.refused for each in record.devices)
    return is_wrong or not all(map(_is_same, replays))


def as_mapping(record: SnapshotsRecord) -> Mapping[str, object]:
    """Return the plain figures."""
    return {"headline": headline(record), "devices": [encode(each) for each in record.devices]}


def _replay_file(file: Path, listed: PublicSnapshot | None) -> list[ReplayedDevice]:
    name = file.name if listed is None else f"{listed.repository} {listed.path}"
    blob, found = blob_of(file), list[ReplayedDevice]()
    for number, device in enumerate(read_snapshot(file)):
        lawful, total = matching_blocks(device)
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


def _error(found: Outcome, recorded: Outcome) -> float:
    """Return the larger relative error of reserved bytes, at the end or at the peak, with its sign."""
    pairs = (
        (found.reserved_bytes, recorded.reserved_bytes), (found.peak_reserved_bytes, recorded.peak_reserved_bytes)
    )  # fmt: skip
    return max((own / (its or 1) - 1 for own, its in pairs), key=abs)


def _name(each: ReplayedDevice) -> str:
    return f"{each.name} ({each.blob[:8]}{f', card {each.device}' if each.device else ''})"


def _row(each: ReplayedDevice) -> list[str]:
    replay = each.replay
    assert replay is not None, "only files with events have a row"
    return [
        _name(each), "all" if _is_same(replay) else f"{replay.num_same_events:,}",
        format_bytes(replay.recorded.reserved_bytes),
        *(f"{100 * _error(outcome, replay.recorded):+.2f} %" for outcome in (replay.rising, replay.falling)),
        f"{replay.num_allocs:,}", f"{replay.num_segments:,}", f"{replay.num_events:,}",
        format_bytes(replay.recorded.peak_reserved_bytes - replay.start_reserved_bytes),
    ]  # fmt: skip


def _left_out(public: Mapping[str, PublicSnapshot]) -> str:
    reasons = Counter(snapshot.left_out for snapshot in public.values() if snapshot.left_out)
    told = "; ".join(f"{count} {reason}" for reason, count in reasons.items())
    licences = Counter(snapshot.licence for snapshot in public.values())
    kinds = ", ".join(f"{count} {licence}" for licence, count in licences.items())
    return (
        f"{len(public)} files are listed (scenarios/snapshots/public.toml) by a digest of their content; licences of "
        f"their repositories: {kinds}. None is stored here. Not replayed: {told}. Attachments of issue threads could "
        f"not be downloaded. To repeat, download the files and run `hybridtrain snapshots FOLDER`; give the path to "
        f"replay your own snapshot."
    )


def plan_moves(files: ScenarioFiles, scenario: Scenario, say: Callable[[str], None]) -> MovesRecord:
    """Dry-run every stack of a scenario and replay it with each change."""
    header, plans, card = begin_header(), list[PlanMoves](), scenario.card.resolve()
    for name in scenario.stacks:
        say(f"{scenario.name}, {name}")
        stack = files.stack(name)
        setup = DryRunInputs(
            model=scenario.model.resolve(), plan=stack.plan(), card=card, host=scenario.host, config=stack.training(),
            workload=scenario.workload_of(name).micro_batch(stack.plan()),
        )  # fmt: skip
        found = reserved_range(setup.dry_run().trace, workspace_bytes=card.cublas_workspace_bytes)
        plans.append(PlanMoves(stack=name, planned_bytes=found.planned_bytes, by_change=found.by_change))
    return MovesRecord(key=scenario.name, scenario=scenario.name, plans=tuple(plans), **header())


def newest_moves(records: Path) -> list[MovesRecord]:
    """Return the newest record of each scenario, by its name."""
    newest = {record.scenario: record for record in read_lines(records / MOVES_FILE, MovesRecord)}
    return [newest[name] for name in sorted(newest)]


def moves_text(records: Sequence[MovesRecord], style: str) -> str:
    """Return the summary, a row for each plan, and the method."""
    plans = [(record.scenario, plan) for record in records for plan in record.plans]
    later = [share for _, plan in plans if (share := _share(plan, MORE_STEPS)) is not None and share > 0]
    headline = (
        f"{len(later)} of {len(plans)} plans reserve more in later steps than in the two of their dry run"
        + (f", at most {100 * max(later):+.1f} %" if later else "")
        + ". A plan's reserved bytes are therefore those of its repeated last step."
    )  # fmt: skip
    rows = []
    for scenario, plan in plans:
        shares = [_share(plan, change) for change in _CHANGES]
        cells = ["-" if share is None else f"{100 * share:+.1f} %" for share in shares]
        rows.append([scenario, plan.stack, f"{to_gib(plan.planned_bytes):.2f}", *cells])
    headers = ("scenario", "stack", "reserved GiB", *_CHANGES)
    return f"{headline}\n\n{table(headers, rows, style, keys=2)}\n\n{_HOW_PLANS}"


def _share(plan: PlanMoves, change: str) -> float | None:
    """Return the relative change of the planned bytes, None where it was not tried."""
    size = plan.by_change.get(change)
    return None if size is None else size / plan.planned_bytes - 1
