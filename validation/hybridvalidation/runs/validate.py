"""The verb ``validate``: read what is there, run what is missing, judge, show; and which records still hold.

Committed results change only when that is asked for: what a run finds goes into a folder of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridtrain.errors import ConfigError
from hybridvalidation.records.environment import uncommitted_files
from hybridvalidation.records.store import PROGRAMS, RecordStore
from hybridvalidation.runs.runner import ScenarioRun, jobs_of, run_from_records, run_scenario
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.report import write_report
from hybridvalidation.study.ladder.protocol import ladder_names
from hybridvalidation.study.ladder.quality import stack_quality
from hybridvalidation.study.ladder.targets import ladder_verdicts

_SHOWN_FILES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """A scenario with all of its records."""

    run: ScenarioRun
    written: tuple[Path, ...]
    """Tables and plots; empty where all records were the committed ones, whose tables are there."""


def validate(
    files: ScenarioFiles,
    name: str,
    results: Path,
    *,
    fresh: bool,
    record: bool,
    out: Path | None,
    progress: bool,
    planned: bool = False,
) -> Validation:
    """Make the runs of a scenario that have no valid record, and write tables and plots beside the new records.

    Args:
        files: Scenarios and stacks.
        name: Of the scenario.
        results: Committed results.
        fresh: Make every run again.
        record: Write into ``results``.
        out: Write there instead; None: ``runs/validate-NAME`` of the working folder.
        progress: Whether a bar is shown.
        planned: Make dry runs alone, which take seconds.

    Raises:
        ConfigError: ``record`` from a checkout with changes that are not committed.
    """
    scenario = files.scenario(name)
    committed = RecordStore(results / "records")
    folder = results if record else out or Path("runs", f"validate-{scenario.name}")
    if record:
        _check_committed()
    own = RecordStore(folder / "records")
    known = [] if fresh else [committed] if record else [committed, own]
    run = run_scenario(
        scenario,
        [files.stack(stack) for stack in scenario.stacks],
        known,
        own,
        progress=progress,
        planned_only=planned,
    )
    stored = committed.read(scenario.name)
    is_committed = not record and all(found in stored for found in run.records.values())
    if is_committed:
        return Validation(run=run, written=())
    elsewhere, quality = ladder_verdicts(files, results), stack_quality(files, results)
    written = write_report(run, files.targets(), folder, elsewhere, quality)
    return Validation(run=run, written=tuple(written))


def stale_records(files: ScenarioFiles, names: Sequence[str], results: Path, *, planned: bool = False) -> list[str]:
    """Return a sentence for every record that a table shows and that does not hold for the program as it is.

    A dry run or a proxy that has no record at all is one too; only a card has measured ones. ``planned``: of dry runs
    alone.
    """
    store, faults = RecordStore(results / "records"), []
    for name in names:
        scenario = files.scenario(name)
        stacks = [files.stack(stack) for stack in scenario.stacks]
        shown = run_from_records(scenario, stacks, store).records
        faults += [
            f"{scenario.name} {job.stack.name}: {job.kind}: there is no record"
            for job in jobs_of(scenario, stacks, ("dry_run",) if planned else ("dry_run", "accuracy"))
            if (job.kind, job.stack.name) not in shown
        ]
        told = zip(shown, store.faults(list(shown.values())), strict=True)
        faults += [
            f"{scenario.name} {stack}: {kind}: {fault}"
            for (kind, stack), fault in told
            if fault and (kind == "dry_run" or not planned)
        ]
    return faults


def other_records(files: ScenarioFiles, results: Path) -> list[str]:
    """Return a sentence for every file of records that is not a scenario's: how many still hold, and what changed.

    They are told and not judged: what was executed or planned by an earlier program stays evidence of it. A ladder's
    records hold by their replay probes.
    """
    store, ladders = RecordStore(results / "records"), {f"studies/{name}" for name in ladder_names(files.folder)}
    paths = sorted(store.folder.rglob("*.jsonl"))
    names = [path.relative_to(store.folder).with_suffix("").as_posix() for path in paths]
    others = [name for name in names if name not in {PROGRAMS, *files.scenario_names()} | ladders]
    told = list[str]()
    for name, changes in store.changes(others).items():
        first = next(filter(None, changes), "")
        told.append(f"{name}: {changes.count('')} of {len(changes)} hold" + (f"; {first}" if first else ""))
    return told


def prune_records(files: ScenarioFiles, names: Sequence[str], results: Path) -> int:
    """Drop every record that no table shows, for a newer one stands for it; return how many."""
    store, count = RecordStore(results / "records"), 0
    for name in names:
        scenario = files.scenario(name)
        run = run_from_records(scenario, [files.stack(stack) for stack in scenario.stacks], store)
        count += store.prune(scenario.name, list(run.records.values()))
    return count


def _check_committed() -> None:
    """A record is made by the program that is committed with it."""
    changed = uncommitted_files()
    if changed:
        more = f" and {len(changed) - _SHOWN_FILES} more" if len(changed) > _SHOWN_FILES else ""
        fault = (
            f"{', '.join(changed[:_SHOWN_FILES])}{more}: not committed; a record names the commit that made it, so "
            "commit or stash first, or leave --record out to write into a folder of its own"
        )
        raise ConfigError("--record", [fault])
