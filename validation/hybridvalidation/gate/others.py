"""Check of other trainers' plans: planned again if their packages are installed, and compared with the records."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.progress import progress_bar
from hybridvalidation.child import Child, ChildResult, run_side_by_side
from hybridvalidation.experiment import missing_package, versions_of
from hybridvalidation.experiments.peers import (
    PeerFigures,
    append_peer_record,
    jobs_of,
    read_peer_records,
    read_peers,
    run_record,
    start_run,
)
from hybridvalidation.experiments.recorded import (
    PlannedFigures,
    Role,
    append_planned,
    job_of,
    plan_record,
    read_planned,
    read_sources,
    start_plan,
)
from hybridvalidation.gate.compare import is_equal
from hybridvalidation.gate.gate import Comparison, Finding, GateExit, Order
from hybridvalidation.records.asked import differences, values_of
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.records.record import Record
from hybridvalidation.scenario_files import ScenarioFiles

NAMES = ("recorded", "peers")
"""Subject names of other trainers' plans; ``recorded/peft`` for one file."""
F = TypeVar("F")


@dataclass(frozen=True, slots=True, kw_only=True)
class OthersPlan(Generic[F]):
    """A plan of another trainer: its job, and its reference."""

    source: str
    """Source, for example ``recorded/peft``."""
    run: str
    packages: tuple[str, ...]
    planned_with: Mapping[str, str]
    """Package versions of the record."""
    recorded: F | None
    """Recorded figures; None without a valid record."""
    start: Callable[[], Child[F]]
    record_of: Callable[[ChildResult[F]], Record]
    append: Callable[[Record], Path]


def read_others(files: ScenarioFiles, names: Sequence[str], results: Path) -> list[OthersPlan[Any]]:
    """Return the plans of subject names, without planning; raises ``ConfigError`` for an unknown one."""
    if not names:
        return []
    found: list[OthersPlan[Any]] = [*_recorded(files, results / "records"), *_peers(files, results / "records")]
    known = sorted({*NAMES, *(plan.source for plan in found)})
    faults = [unknown_name("source of plans", name, known) for name in names if name not in known]
    if faults:
        raise ConfigError("gate", faults)
    return [plan for plan in found if plan.source in names or plan.source.partition("/")[0] in names]


def compare_others(plans: Sequence[OthersPlan[Any]], order: Order) -> Comparison:
    """Repeat the plans whose packages are installed, each in a new process, and compare."""
    here, absent = list[OthersPlan[Any]](), dict[str, int]()
    for plan in plans:
        if package := missing_package(plan.packages):
            why = f"{plan.source}: {package} is not installed"
            absent[why] = absent.get(why, 0) + 1
        else:
            here.append(plan)
    findings, changed = list[Finding](), list[tuple[OthersPlan[Any], ChildResult[Any]]]()
    with progress_bar(here, desc="plan", unit="run", shown=order.progress) as bar:
        for plan, ended in run_side_by_side(here, lambda plan: plan.start(), order.processes or os.cpu_count() or 1):
            bar.set_postfix_str(f"{plan.source} {plan.run}")
            bar.update()
            finding = _compared(plan, ended)
            findings += [] if finding is None else [finding]
            changed += [(plan, ended)] if finding is not None and finding.settled_by_accept else []
    return Comparison(
        subject=f"{len(here)} plans of other trainers", findings=findings,
        notes=[f"{why}, {count} plans are not verified here" for why, count in absent.items()],
        accept=lambda: _accept(changed, order.reason),
    )  # fmt: skip


def _accept(changed: Sequence[tuple[OthersPlan[Any], ChildResult[Any]]], reason: str) -> list[Path]:
    """Append the new plans to the records, with the reason; return the files."""
    return sorted({
        plan.append(replace(plan.record_of(ended), accepted=reason if plan.recorded is not None else ""))
        for plan, ended in changed
    })  # fmt: skip


def _compared(plan: OthersPlan[Any], ended: ChildResult[Any]) -> Finding | None:
    if ended.answer is None:
        return _finding(plan, GateExit.COULD_NOT_MEASURE, ended.fault, settled=False)
    if plan.recorded is None:
        return _finding(plan, GateExit.COULD_NOT_MEASURE, "there is no record to compare with")
    if is_equal(plan.recorded, ended.answer):
        return None
    old, new = values_of(figures=plan.recorded), values_of(figures=ended.answer)
    changes = "; ".join(
        change.removeprefix("figures.figures.").removeprefix("figures.") for change in differences(old, new)
    )
    now = versions_of(plan.packages)
    others = [f"{name} {was}, now {now[name]}" for name, was in plan.planned_with.items() if now.get(name, was) != was]
    if others:  # as of kernels and another compiler
        why = f"not comparable, planned with {', '.join(others)}: {changes}"
        return _finding(plan, GateExit.COULD_NOT_MEASURE, why)
    worse = any(_is_more(old.get(path, ""), value) for path, value in new.items())
    return _finding(plan, GateExit.REGRESSED if worse else GateExit.IMPROVED, changes)


def _is_more(old: str, new: str) -> bool:
    try:
        return float(new) > float(old)
    except ValueError:
        return old != new


def _finding(plan: OthersPlan[Any], code: GateExit, message: str, *, settled: bool = True) -> Finding:
    return Finding(scenario=plan.source, stack=plan.run, exit=code, message=message, settled_by_accept=settled)


def _recorded(files: ScenarioFiles, records: Path) -> Iterator[OthersPlan[PlannedFigures]]:
    newest = {(record.source, record.run): record for record in read_planned(records)}
    for name, source in read_sources(files.folder).items():
        for run in source.runs:
            if run.role is Role.LEFT_OUT:
                continue
            job, record = job_of(name, source, run), newest.get((name, run.id))
            is_answer = record is not None and record.key == job.key and record.outcome is Outcome.OK
            yield OthersPlan(
                source=f"recorded/{name}", run=run.id, packages=source.packages,
                planned_with=record.packages if record is not None else {},
                recorded=PlannedFigures(figures=record.figures) if record is not None and is_answer else None,
                start=partial(start_plan, job), record_of=partial(plan_record, job, source=source),
                append=partial(append_planned, records),
            )  # fmt: skip


def _peers(files: ScenarioFiles, records: Path) -> Iterator[OthersPlan[PeerFigures]]:
    newest = {
        (record.scenario, record.run): record
        for record in read_peer_records(records)
        if record.evidence is Evidence.PLANNED
    }
    for name, scenario in read_peers(files).items():
        for job in jobs_of(scenario, files, [Evidence.PLANNED]):
            record = newest.get((name, job.run))
            is_answer = record is not None and record.key == job.key and record.outcome is Outcome.OK
            yield OthersPlan(
                source=f"peers/{name}", run=job.run, packages=job.packages,
                planned_with=record.packages if record is not None else {},
                recorded=record.figures if record is not None and is_answer else None,
                start=partial(start_run, job), record_of=partial(run_record, job),
                append=partial(append_peer_record, records),
            )  # fmt: skip
