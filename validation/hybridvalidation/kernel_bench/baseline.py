"""The speed gate: a run's times against the committed ones of the same card, op, shape and provider."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hybridtrain.units import format_seconds
from hybridvalidation.gate import baseline_file
from hybridvalidation.gate.gate import GateExit
from hybridvalidation.kernel_bench.record import KernelRecord
from hybridvalidation.kernel_bench.timing import Times

TOLERANCE = 0.10
"""Relative, of the median; beyond it the quantiles 0.2 to 0.8 must not overlap either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedBaseline:
    """The baseline file of one card."""

    card: str
    torch: str
    """Versions that the newest rows come from."""
    triton: str
    cases: Mapping[str, Mapping[str, Times]]
    """Times by case and provider."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFinding:
    """One provider that changed by more than the tolerance, or a card without a baseline."""

    case: str
    provider: str
    exit: GateExit
    message: str


@dataclass(slots=True)
class SpeedCheck:
    """What the comparison found."""

    findings: list[SpeedFinding] = field(default_factory=list)
    num_compared: int = 0
    num_new: int = 0
    """Timed today, not in the baseline."""

    @property
    def exit_code(self) -> GateExit:
        """Regressed before not measured; being faster is no fault."""
        found = {finding.exit for finding in self.findings}
        if GateExit.REGRESSED in found:
            return GateExit.REGRESSED
        return GateExit.COULD_NOT_MEASURE if GateExit.COULD_NOT_MEASURE in found else GateExit.OK


def baseline_path(folder: Path, card: str) -> Path:
    """Return the file of a card, as ``kernels-nvidia-h200.json``."""
    return folder / f"kernels-{re.sub('[^a-z0-9]+', '-', card.lower()).strip('-')}.json"


def check_speed(records: Sequence[KernelRecord], folder: Path) -> SpeedCheck:
    """Compare records with the baselines of their cards."""
    check = SpeedCheck()
    for card in dict.fromkeys(record.card for record in records):
        baseline = read_baseline(folder, card)
        of_card = [record for record in records if record.card == card]
        before = check.num_compared
        for record in of_card:
            _compare(record, {} if baseline is None else baseline.cases.get(record.name, {}), check)
        if check.num_compared == before:
            why = "there is no baseline" if baseline is None else "the baseline has none of today's cases"
            message = f"{why} for {card}: nothing was compared; bench kernels --accept records today's times"
            check.findings.append(SpeedFinding(case="", provider="", exit=GateExit.COULD_NOT_MEASURE, message=message))
    if not records:
        message = "no case was run: nothing was compared"
        check.findings.append(SpeedFinding(case="", provider="", exit=GateExit.COULD_NOT_MEASURE, message=message))
    return check


def accept_speed(records: Iterable[KernelRecord], folder: Path) -> list[Path]:
    """Write today's times into the baselines of their cards; rows that were not run stay."""
    by_card: dict[str, list[KernelRecord]] = {}
    for record in records:
        by_card.setdefault(record.card, []).append(record)
    paths = []
    for card, found in by_card.items():
        old = read_baseline(folder, card)
        cases = {} if old is None else {name: dict(rows) for name, rows in old.cases.items()}
        for record in found:
            rows = {result.provider: times for result, times in record.timed()}
            if rows:
                cases[record.name] = {**cases.get(record.name, {}), **rows}
        last = found[-1]
        baseline = SpeedBaseline(card=card, torch=last.environment.torch, triton=last.triton, cases=cases)
        path = baseline_path(folder, card)
        baseline_file.write_baseline(path, baseline)
        paths.append(path)
    return paths


def read_baseline(folder: Path, card: str) -> SpeedBaseline | None:
    """Return the baseline of a card, None without one; raises ``RecordError`` for a damaged file."""
    return baseline_file.read_baseline(baseline_path(folder, card), SpeedBaseline)


def _compare(record: KernelRecord, rows: Mapping[str, Times], check: SpeedCheck) -> None:
    for result, now in record.timed():
        old = rows.get(result.provider)
        if old is None:
            check.num_new += 1
            continue
        check.num_compared += 1
        change = now.q50_s / old.q50_s - 1
        is_slower, is_faster = change > TOLERANCE and old.is_faster_than(now), now.is_faster_than(old)
        if is_slower or (change < -TOLERANCE and is_faster):
            message = f"{format_seconds(old.q50_s)} -> {format_seconds(now.q50_s)}, {100 * change:+.1f} %"
            code = GateExit.REGRESSED if is_slower else GateExit.IMPROVED
            check.findings.append(SpeedFinding(case=record.name, provider=result.provider, exit=code, message=message))
