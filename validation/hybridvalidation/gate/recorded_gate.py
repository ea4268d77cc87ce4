"""The gate of recorded figures: how far committed plans are off what others measured, against the baseline.

Nothing is planned here; the records are read. So it takes no time, and needs no trainer of others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridvalidation.gate.baseline_file import read_baseline
from hybridvalidation.gate.gate import Finding, GateExit
from hybridvalidation.recorded.planned import Row, read_planned, rows_of
from hybridvalidation.recorded.source import Role, read_sources

NAME = "recorded"
"""What stands for all recorded figures where scenarios are named, and the baseline's file name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBaseline:
    """The baseline file: errors, planned over recorded less one, by source, run and quantity."""

    errors: Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGateResult:
    """All findings, and the baseline that today's records would make."""

    findings: tuple[Finding, ...]
    replacement: RecordedBaseline
    num_errors: int


def run_recorded_gate(scenarios: Path, records: Path, baselines: Path) -> RecordedGateResult | None:
    """Compare the errors of committed plans with the baseline; None where there are no sources.

    Args:
        scenarios: Folder of scenario files.
        records: Folder of records.
        baselines: Folder of ``recorded.json``.
    """
    sources = read_sources(scenarios)
    if not sources:
        return None
    rows = [row for row in rows_of(sources, read_planned(records)) if row.role is not Role.LEFT_OUT]
    recorded = read_baseline(baselines / f"{NAME}.json", RecordedBaseline)
    errors: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if row.error is not None:
            errors.setdefault(row.source, {}).setdefault(row.id, {})[row.quantity] = row.error
    findings = tuple(_compare({} if recorded is None else recorded.errors, rows))
    num_errors = sum(row.error is not None for row in rows)
    return RecordedGateResult(findings=findings, replacement=RecordedBaseline(errors=errors), num_errors=num_errors)


def _compare(old: Mapping[str, Mapping[str, Mapping[str, float]]], rows: list[Row]) -> Iterator[Finding]:
    """Yield what changed: plans are deterministic, so any change of an error is one of the code or of a peer."""
    known = {(s, i, q): error for s, runs in old.items() for i, figures in runs.items() for q, error in figures.items()}
    for row in rows:
        before = known.pop((row.source, row.id, row.quantity), None)
        if before is None and row.error is None:
            continue
        if before is None:
            yield _finding(row.source, row.id, GateExit.COULD_NOT_MEASURE, f"{row.quantity}: there is no baseline")
        elif row.error is None:
            yield _finding(
                row.source, row.id, GateExit.COULD_NOT_MEASURE, f"{row.quantity}: planned no more: {row.why}"
            )
        elif abs(row.error) != abs(before):
            code = GateExit.REGRESSED if abs(row.error) > abs(before) else GateExit.IMPROVED
            moved = f"{row.quantity}: error {100 * before:+.3f} % -> {100 * row.error:+.3f} %"
            yield _finding(row.source, row.id, code, moved)
    for source, run, quantity in known:
        gone = f"{quantity}: stands in the baseline but is not recorded any more"
        yield _finding(source, run, GateExit.COULD_NOT_MEASURE, gone)


def _finding(source: str, run: str, code: GateExit, message: str) -> Finding:
    return Finding(scenario=f"{NAME} {source}", stack=run, exit=code, message=message)
