"""Decisions from recorded times: regressions against a card's baseline, and the choice of an op's provider.

Baselines are by card, op, shape and provider. A choice is written only if one correct provider with enough samples
beats all others in every deciding case. Otherwise the op keeps its default order.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from hybridkernels.provider import _choices
from hybridtrain.atomic_write import replace_file
from hybridtrain.units import format_seconds
from hybridvalidation.gate import baseline_file
from hybridvalidation.gate.gate import GateExit
from hybridvalidation.kernel_bench.case import Mode
from hybridvalidation.kernel_bench.record import KernelRecord, newest_kernels
from hybridvalidation.kernel_bench.timing import WANTED_ROUNDS, Times

TOLERANCE = 0.10
"""Relative tolerance of the median; beyond it quantiles 0.2 to 0.8 must also not overlap."""
CHOICES = Path(str(files("hybridkernels").joinpath("choices.toml")))
_HEAD = """\
# The fastest implementation of each op by card, written by `hybridtrain bench kernels --choose` from measurements:
# [[choice]] op, card (as CUDA names it), provider. An op without a row for a card takes its stated order.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedBaseline:
    """The baseline file of one card."""

    card: str
    torch: str
    """Versions of the newest rows."""
    triton: str
    cases: Mapping[str, Mapping[str, Times]]
    """Times by case and provider."""


@dataclass(frozen=True, slots=True)
class SpeedFinding:
    """One provider that changed by more than the tolerance, or a card without a baseline."""

    case: str
    provider: str
    exit: GateExit
    message: str


@dataclass(slots=True)
class SpeedCheck:
    """Findings of a comparison."""

    findings: list[SpeedFinding] = field(default_factory=list)
    num_compared: int = 0
    num_new: int = 0
    """New times that are not in the baseline."""

    @property
    def exit_code(self) -> GateExit:
        """Regressed takes precedence over not measured; faster is fine."""
        codes = {finding.exit for finding in self.findings}
        faults = (code for code in (GateExit.REGRESSED, GateExit.COULD_NOT_MEASURE) if code in codes)
        return next(faults, GateExit.OK)

    def compare(self, record: KernelRecord, rows: Mapping[str, Times]) -> None:
        """Add the findings on a record's times by provider."""
        for result, now in record.timed():
            old = rows.get(result.provider)
            if old is None:
                self.num_new += 1
                continue
            self.num_compared += 1
            change = now.q50_s / old.q50_s - 1
            is_slower = change > TOLERANCE and old.is_faster_than(now)
            if is_slower or (change < -TOLERANCE and now.is_faster_than(old)):
                message = f"{format_seconds(old.q50_s)} -> {format_seconds(now.q50_s)}, {100 * change:+.1f} %"
                code = GateExit.REGRESSED if is_slower else GateExit.IMPROVED
                self.findings.append(SpeedFinding(record.name, result.provider, code, message))


def baseline_path(folder: Path, card: str) -> Path:
    """Return the file of a card, for example ``kernels-nvidia-h200.json``."""
    return folder / f"kernels-{re.sub('[^a-z0-9]+', '-', card.lower()).strip('-')}.json"


def read_baseline(folder: Path, card: str) -> SpeedBaseline | None:
    """Return the baseline of a card, None without one; raises ``RecordError`` for a damaged file."""
    return baseline_file.read_baseline(baseline_path(folder, card), SpeedBaseline)


def check_speed(records: Sequence[KernelRecord], folder: Path) -> SpeedCheck:
    """Compare records with the baselines of their cards."""
    check = SpeedCheck()
    reasons = [] if records else ["no case was run: nothing was compared"]
    for card, of_card in _by_card(records).items():
        baseline, before = read_baseline(folder, card), check.num_compared
        for record in of_card:
            check.compare(record, {} if baseline is None else baseline.cases.get(record.name, {}))
        if check.num_compared == before:
            why = "there is no baseline" if baseline is None else "the baseline has none of these cases"
            reasons.append(f"{why} for {card}: nothing was compared; bench kernels --accept records the new times")
    check.findings += [SpeedFinding("", "", GateExit.COULD_NOT_MEASURE, reason) for reason in reasons]
    return check


def accept_speed(records: Iterable[KernelRecord], folder: Path) -> list[Path]:
    """Write the new times into their cards' baselines; other rows stay."""
    paths = []
    for card, of_card in _by_card(records).items():
        old = read_baseline(folder, card)
        cases = {} if old is None else {name: dict(rows) for name, rows in old.cases.items()}
        for record in of_card:
            rows = {result.provider: times for result, times in record.timed()}
            if rows:
                cases[record.name] = {**cases.get(record.name, {}), **rows}
        last = of_card[-1]
        baseline = SpeedBaseline(card=card, torch=last.environment.torch, triton=last.triton, cases=cases)
        paths.append(baseline_path(folder, card))
        baseline_file.write_baseline(paths[-1], baseline)
    return paths


def _by_card(records: Iterable[KernelRecord]) -> dict[str, list[KernelRecord]]:
    by_card: dict[str, list[KernelRecord]] = {}
    for record in records:
        by_card.setdefault(record.card, []).append(record)
    return by_card


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """The provider of an op on a card."""

    op: str
    card: str
    provider: str


@dataclass(frozen=True, slots=True)
class UndecidedOp:
    """An op that keeps its default order on a card."""

    op: str
    card: str
    reason: str


def choose(records: Iterable[KernelRecord]) -> tuple[list[Choice], list[UndecidedOp]]:
    """Return choices by the newest records of each case, and undecided ops; CUDA cards only."""
    by_row: dict[tuple[str, str], list[KernelRecord]] = {}
    for record in newest_kernels(records):
        if record.is_on_card and any(result.is_choosable for result in record.results):
            by_row.setdefault((record.choice, record.card), []).append(record)
    chosen, undecided = [], []
    for row, of_row in by_row.items():
        # The whole step decides where there is one: one provider runs forward and backward.
        winner, doubt = _winner([record for record in of_row if record.mode is Mode.BOTH] or of_row)
        if doubt:
            undecided.append(UndecidedOp(*row, doubt))
        else:
            chosen.append(Choice(*row, winner))
    return sorted(chosen), undecided


def write_choices(chosen: Sequence[Choice], undecided: Sequence[UndecidedOp], path: Path) -> None:
    """Rewrite the rows of the judged ops and cards; others stay."""
    judged = {(row.op, row.card) for row in chosen} | {(row.op, row.card) for row in undecided}
    old = [Choice(**row) for row in tomllib.loads(path.read_text(encoding="utf-8")).get("choice", [])]
    rows = sorted([*chosen, *(row for row in old if (row.op, row.card) not in judged)])
    tables = [f'\n[[choice]]\nop = "{row.op}"\ncard = "{row.card}"\nprovider = "{row.provider}"\n' for row in rows]
    replace_file(path, (_HEAD + "".join(tables)).encode())
    _choices.cache_clear()


def _winner(records: Sequence[KernelRecord]) -> tuple[str, str]:
    """Return the provider that wins every case beyond noise, or the reason for none."""
    winners = set()
    for record in records:
        candidates = [
            (result.provider, times)
            for result, times in record.timed()
            if result.is_choosable and times.num_samples >= WANTED_ROUNDS
        ]
        if len(candidates) < 2:
            return "", f"{record.name}: fewer than two providers are correct with enough samples"
        (first, best), *others = candidates
        if not all(best.is_faster_than(times) for _, times in others):
            return "", f"{record.name}: {first} and {others[0][0]} are within noise of each other"
        winners.add(first)
    doubt = f"the shapes disagree: {', '.join(sorted(winners))}" if len(winners) > 1 else ""
    return winners.pop(), doubt
