"""The verb ``validate``: read records, make missing ones, judge and report; and the list of other records.

Committed results change only on request; otherwise new results go into a separate folder.
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
    """Folder of tables and plots; None if all records are committed, whose tables exist."""


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
    """Make the missing runs of a scenario; return it with all records.

    Args:
        files: Scenarios and stacks.
        name: Name of the scenario.
        results: Committed results.
        fresh: Repeat every run.
        record: Write into ``results``.
        out: Write there instead; None: ``runs/validate-NAME`` of the working folder.
        progress: Whether a bar is shown.
        planned: Make dry runs only.

    Raises:
        ConfigError: ``record`` with uncommitted changes in the checkout.
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
    """Return a sentence per file of executed or measured records: their number, and their program.

    Executed records remain evidence of the program that made them; a ladder's are verified by replays.
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
            raise RecordError(
                f"{path}: a line is not JSON ({error}); restore the file from version control."
            ) from error
        if not lines:
            continue
        newest = max(lines, key=lambda line: str(line["started_at"]))
        commits = {line["environment"]["commit"] for line in lines}
        made = f"{newest['started_at'][:10]}, commit {newest['environment']['commit'][:8] or 'of no checkout'}"
        told.append(f"{name}: {len(lines)} records, from {len(commits)} commits, the newest {made}")
    return told


def prune_records(files: ScenarioFiles, names: Sequence[str], results: Path) -> int:
    """Delete all records of scenarios and of the atlas that no table shows any more; return their number."""
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
            f"{', '.join(changed[:_SHOWN_FILES])}{more}: uncommitted; records state their commit, so commit or stash "
            f"first, or omit --record to write into a separate folder"
        )
        raise ConfigError("--record", [fault])
