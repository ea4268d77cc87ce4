"""The verb ``validate``: read records, run missing ones, judge, show; and the list of other records.

Committed results change only when that is asked for: what a run finds goes into a folder of its own.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridtrain.errors import ConfigError, RecordError
from hybridtrain.run.environment import uncommitted_files
from hybridvalidation.experiments.atlas import prune_atlas
from hybridvalidation.experiments.stack_runs import ScenarioRun, run_from_records, run_scenario
from hybridvalidation.records.store import RecordStore
from hybridvalidation.records.verification import VERIFIED
from hybridvalidation.scenario_files import ScenarioFiles

_SHOWN_FILES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """A scenario with all of its records."""

    run: ScenarioRun
    folder: Path | None
    """Where the tables and plots belong; None where all records were the committed ones, whose tables are there."""


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
    """Make the runs of a scenario that have no valid record, and return it with its records.

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
        scenario, [files.stack(stack) for stack in scenario.stacks], known, own, progress=progress, planned_only=planned
    )
    stored = committed.read(scenario.name)
    is_committed = not record and all(found in stored for found in run.records.values())
    return Validation(run=run, folder=None if is_committed else folder)


def other_records(files: ScenarioFiles, results: Path) -> list[str]:
    """Return a sentence for every file of records that is not replanned: their number, and their program.

    What was executed stays evidence of the program that did it. A ladder's records hold by their replay probes.
    """
    folder = results / "records"
    told = list[str]()
    for path in sorted(folder.rglob("*.jsonl")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        if name in {VERIFIED, *files.scenario_names()} or name.endswith("/planned"):
            continue
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")  # a writer may be at work behind it
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise RecordError(f"{path}: a line is no JSON ({error}); restore the file from version control.") from error
        if not lines:
            continue
        newest = max(lines, key=lambda line: str(line["started_at"]))
        commits = {line["environment"]["commit"] for line in lines}
        made = f"{newest['started_at'][:10]}, commit {newest['environment']['commit'][:8] or 'of no checkout'}"
        told.append(f"{name}: {len(lines)} records, of {len(commits)} commits, the newest of {made}")
    return told


def prune_records(files: ScenarioFiles, names: Sequence[str], results: Path) -> int:
    """Drop every record of scenarios and of the atlas that a newer one replaces in all tables; return their number."""
    store, count = RecordStore(results / "records"), 0
    for name in names:
        scenario = files.scenario(name)
        run = run_from_records(scenario, [files.stack(stack) for stack in scenario.stacks], store)
        count += store.prune(scenario.name, list(run.records.values()))
    return count + prune_atlas(results / "records")


def _check_committed() -> None:
    """Check that records are made by the program committed with them."""
    changed = uncommitted_files()
    if changed:
        more = f" and {len(changed) - _SHOWN_FILES} more" if len(changed) > _SHOWN_FILES else ""
        fault = (
            f"{', '.join(changed[:_SHOWN_FILES])}{more}: not committed; a record names the commit that made it, so "
            "commit or stash first, or leave --record out to write into a folder of its own"
        )
        raise ConfigError("--record", [fault])
