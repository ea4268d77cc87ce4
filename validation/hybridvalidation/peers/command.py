"""``hybridtrain peers``: run every recipe that has no record, and show all beside each other."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridtrain.reports.tables import TERMINAL
from hybridvalidation.peers.figures import (
    PeerFigures,
    PeerRecord,
    Row,
    append_peer_record,
    read_peer_records,
    rows_of,
)
from hybridvalidation.peers.scenario import PeerJob, PeerRun, PeerScenario, jobs_of, read_peers
from hybridvalidation.peers.table import peer_table, row_mapping
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.store import RecordStore
from hybridvalidation.runs.child import ONE_THREAD, Child, Ended
from hybridvalidation.runs.foreign import header, missing_package, run_jobs, versions_of
from hybridvalidation.scenario_files import ScenarioFiles

_LIMIT_S = 1800.0
_EAGER = {"TORCHDYNAMO_DISABLE": "1"}
"""torchao compiles its update for minutes, for a step of a tiny model, and a virtual card runs eager code anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersReport:
    """Every scenario with its rows."""

    scenarios: tuple[tuple[PeerScenario, tuple[Row, ...]], ...]
    made: int
    notes: tuple[str, ...]

    def as_list(self) -> list[dict[str, object]]:
        """Return the rows as plain data."""
        return [row_mapping(scenario.name, row) for scenario, rows in self.scenarios for row in rows]

    def as_text(self) -> str:
        """Return a table for each scenario, and what could not be run."""
        tables = [f"{scenario.title}\n\n{peer_table(rows, TERMINAL)}\n" for scenario, rows in self.scenarios]
        return "\n".join([*tables, *self.notes, f"{self.made} runs made now"])


def peers_command(
    *, files: ScenarioFiles, results: Path, scenario: str | None, planned: bool, record: bool, jobs: int,
    say: Callable[[str], None],
) -> PeersReport:  # fmt: skip
    """Run what has no record that holds, and return all rows.

    Args:
        files: Scenario files.
        results: Folder of results; records are read from it.
        scenario: One only.
        planned: Plan alone; nothing is executed or measured.
        record: Append what is made to the records.
        jobs: Processes at a time; on a card one.
        say: Told what is done.

    Raises:
        ConfigError: No such scenario, or a faulty file.
    """
    scenarios = read_peers(files, scenario)
    store = RecordStore(results / "records")
    known = read_peer_records(store.folder)
    valid = {found.key for found in known if not found.why_repeat()}
    has_card = torch.cuda.is_available()
    real = [Evidence.EXECUTED, *([Evidence.MEASURED] if has_card else [])]
    kinds = [Evidence.PLANNED, *([] if planned else real)]
    wanted = [pair for found in scenarios.values() for pair in jobs_of(found, files, kinds) if pair[1].key not in valid]
    notes = [
        f"{job.scenario} {run.id}: not {job.evidence.value} now, for {absent} is not installed "
        "(pip install hybridtrain[peers])"
        for run, job in wanted
        if (absent := missing_package(run.packages))
    ]
    made = []
    for (_, job), found in run_jobs(
        [pair for pair in wanted if not missing_package(pair[0].packages)], start_run, run_record,
        1 if has_card else jobs,
        (lambda found: append_peer_record(store.folder, found)) if record else None,
    ):  # fmt: skip
        made.append(found)
        say(
            f"{job.scenario} {job.run}: {job.evidence.value}, {found.outcome.value} {found.message} "
            f"in {found.duration_s:.0f} s"
        )
    rows = [(one, tuple(rows_of(one, files, [*known, *made]))) for one in scenarios.values()]
    return PeersReport(scenarios=tuple(rows), made=len(made), notes=tuple(notes))


def start_run(pair: tuple[PeerRun, PeerJob]) -> Child[PeerFigures]:
    """Run one row in a process of its own."""
    eager = {} if pair[1].evidence is Evidence.MEASURED else _EAGER
    environment = ONE_THREAD | eager
    return Child("hybridvalidation.peers.run:work", pair[1], PeerFigures, limit_s=_LIMIT_S, environment=environment)


def run_record(pair: tuple[PeerRun, PeerJob], ended: Ended[PeerFigures]) -> PeerRecord:
    """Return the record of a row that ended."""
    run, job = pair
    return PeerRecord(
        **header(job.key, job.evidence, ended), scenario=job.scenario, run=job.run, figures=ended.answer,
        packages=versions_of(run.packages),
    )  # fmt: skip
