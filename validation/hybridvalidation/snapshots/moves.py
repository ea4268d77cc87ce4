"""By how much the reserved bytes of a scenario's plans move: the record of its stacks, and their table."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tabulate import tabulate

from hybridtrain.planning.dry_runs import dry_run
from hybridtrain.run.environment import read_environment
from hybridtrain.run.program import program_digest
from hybridtrain.units import to_gib
from hybridtrain.virtual_gpu.allocator.reserved_range import DRIVER, EVALUATION, LENGTHS, MORE_STEPS, reserved_range
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import append_record, read_lines
from hybridvalidation.scenario import Scenario
from hybridvalidation.scenario_files import ScenarioFiles

_FILE = "reserved.jsonl"
_CHANGES = (DRIVER, EVALUATION, MORE_STEPS, LENGTHS)
_HOW = (
    "Planned: the events of a scenario's dry run, replayed in the allocator model as they are and with one change. "
    "Reserved: peak of the dry run's steps, without a cap. **Driver**: segments at falling addresses. "
    "**Evaluation**: a forward pass alone before the first step. **More steps**: the last step four more times. "
    "**Lengths**: steps of 1/2 to 7/8 of the length before and between, which this project's trainer does not make."
    " A dash: the plan's last step does not end as it began, or has no such change. `hybridtrain dry-run` prints "
    "these of any plan, and `recommend` leaves the largest of the first three free. A card that is full gives "
    "cached segments back before it refuses, so a plan whose sum is above the card may still run, at the price of "
    "taking them again."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMoves:
    """One stack."""

    stack: str
    planned_bytes: int
    """Peak of the reserved bytes of the dry run's steps, without a cap."""
    by_change: Mapping[str, int]
    """The same with each change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovesRecord(Record):
    """All stacks of a scenario."""

    scenario: str
    plans: tuple[PlanMoves, ...]
    evidence: Evidence = Evidence.PLANNED


def plan_moves(files: ScenarioFiles, scenario: Scenario, say: Callable[[str], None]) -> MovesRecord:
    """Dry-run every stack of a scenario and replay it otherwise."""
    started, begin = datetime.now(UTC), time.perf_counter()
    plans = tuple(_moves(files, scenario, name, say) for name in scenario.stacks)
    return MovesRecord(
        key=scenario.name, scenario=scenario.name, plans=plans, started_at=started.isoformat(timespec="seconds"),
        duration_s=round(time.perf_counter() - begin, 3), environment=read_environment(),
        program=program_digest(),
    )  # fmt: skip


def append_moves(records: Path, record: MovesRecord) -> None:
    """Add a record and wait until it is on disk."""
    append_record(records, _FILE, record)


def newest_moves(records: Path) -> list[MovesRecord]:
    """Return the newest record of each scenario, by its name."""
    newest = {record.scenario: record for record in read_lines(records / _FILE, MovesRecord)}
    return [newest[name] for name in sorted(newest)]


def moves_text(records: Sequence[MovesRecord], style: str) -> str:
    """Return the sum, a row for each plan, and how they were got."""
    plans = [plan for record in records for plan in record.plans]
    later = [plan for plan in plans if plan.by_change.get(MORE_STEPS, 0) > plan.planned_bytes]
    headline = (
        f"{len(later)} of {len(plans)} plans reserve more in later steps than in the two of their dry run"
        + (f", at most {max(map(_later_share, later)):+.1f} %" if later else "")
        + "; a plan's reserved bytes are therefore those that its last step settles at when it is repeated."
    )  # fmt: skip
    rows = [row for record in records for row in _rows(record)]
    table = tabulate(
        rows, headers=("scenario", "stack", "reserved GiB", *_CHANGES), tablefmt=style, disable_numparse=True
    )
    return f"{headline}\n\n{table}\n\n{_HOW}"


def _moves(files: ScenarioFiles, scenario: Scenario, name: str, say: Callable[[str], None]) -> PlanMoves:
    say(f"{scenario.name}, {name}")
    stack, card = files.stack(name), scenario.card.resolve()
    plan = stack.plan()
    workload = scenario.workload_of(name).micro_batch(plan)
    run = dry_run(scenario.model.resolve(), plan, card, workload, host=scenario.host, config=stack.training())
    found = reserved_range(run.trace, workspace_bytes=card.cublas_workspace_bytes)
    return PlanMoves(stack=name, planned_bytes=found.planned_bytes, by_change=found.by_change)


def _later_share(plan: PlanMoves) -> float:
    return 100 * (plan.by_change[MORE_STEPS] / plan.planned_bytes - 1)


def _rows(record: MovesRecord) -> Iterator[list[str]]:
    for plan in record.plans:
        moves = (plan.by_change.get(change) for change in _CHANGES)
        told = ("-" if size is None else f"{100 * (size / plan.planned_bytes - 1):+.1f} %" for size in moves)
        yield [record.scenario, plan.stack, f"{to_gib(plan.planned_bytes):.2f}", *told]
