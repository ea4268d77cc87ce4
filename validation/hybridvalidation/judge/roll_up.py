"""Every stated figure in a line: of all places where it was judged, the verdict that stands."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hybridvalidation.judge.verdict import Status, Verdict
from hybridvalidation.scenario import Target

_BEST_FIRST = list(Status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One verdict, and where it was reached."""

    place: str
    """Scenario, study or page."""
    verdict: Verdict
    is_registered: bool = False
    """Whether a study was registered to judge it."""
    alone: Mapping[Status, Sequence[str]] = field(default_factory=dict)
    """Stacks that do better on the row than the one that does best on all rows together."""

    @property
    def weight(self) -> int:
        """Which verdicts count: a registered study's before those on a scenario, these before those on one stack."""
        return 2 if self.is_registered else int(self.verdict.is_of_scenario)

    @property
    def says_something(self) -> bool:
        """Whether it says something: a place without any record does not, but where a study owes the record."""
        return self.verdict.evidence is not None or (self.is_registered and self.verdict.is_of_scenario)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One stated figure."""

    target: str
    says: str
    status: Status
    evidence: str
    stack: str
    place: str
    record: str
    reason: str
    is_outside: bool = False
    """Whether it is met from outside of the range that is stated."""
    is_untested: bool = False
    """Whether it holds by an estimate that no recorded run tests."""
    is_blunt: bool = False
    """Whether what must fail meets the bound, or does not clearly miss it."""
    is_missed_too: bool = False
    """Whether it holds by one stack, and another one that it is asked of does not meet it."""

    @property
    def has_remark(self) -> bool:
        """Whether something is to be said of how it holds."""
        return self.is_outside or self.is_missed_too or self.is_untested or self.is_blunt


def roll_up(targets: Mapping[str, Target], found: Iterable[Judged]) -> list[Row]:
    """Return one row per target: the least favourable verdict of those that count, and what others say."""
    by_target: dict[str, list[Judged]] = {name: [] for name in targets}
    for item in found:
        if item.verdict.target in by_target:
            by_target[item.verdict.target].append(item)
    return [_row(targets[name], items) for name, items in by_target.items()]


def counts(rows: Sequence[Row]) -> str:
    """Return how many figures have which verdict, in a sentence."""
    of_status = Counter(row.status for row in rows)
    told = ", ".join(f"{of_status[status]} {_WORDS[status]}" for status in Status if of_status[status])
    held = [row for row in rows if row.status is Status.HOLDS]
    remarks = (
        ("Outside of the range that is stated, on its good side", sum(row.is_outside for row in rows)),
        ("By one stack, where another that is asked does not meet it", sum(row.is_missed_too for row in rows)),
        ("By an estimate that no recorded run tests", sum(row.is_untested for row in rows)),
        ("By a bound that what must fail meets, or does not clearly miss", sum(row.is_blunt for row in rows)),
        ("Without any of these remarks", sum(not row.has_remark for row in held)),
    )
    also = "".join(f" {says}: {number}." for says, number in remarks if number)
    kinds = Counter(row.evidence for row in held)
    by_kind = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    of_these = f" Of those that hold, by evidence: {by_kind}.{also}" if held else ""
    return f"{len(rows)} stated targets: {told}.{of_these}"


_WORDS = {
    Status.HOLDS: "hold", Status.BY_DEFINITION: "met by definition", Status.UNDECIDED: "undecided",
    Status.UNPROVEN: "unproven", Status.MISLEADING: "misleading", Status.REFUTED: "refuted",
}  # fmt: skip
_MISSED = (Status.MISLEADING, Status.REFUTED)


def _row(target: Target, items: Sequence[Judged]) -> Row:
    known = [item for item in items if item.says_something] or items
    if not known:
        return Row(
            target=target.id, says=target.says, status=Status.UNPROVEN, evidence="", stack="", place="", record="",
            reason="judged nowhere.",
        )  # fmt: skip
    weight = max(item.weight for item in known)
    counting = [item for item in known if item.weight == weight]
    worst = max(counting, key=lambda item: _BEST_FIRST.index(item.verdict.status))
    verdict, others = worst.verdict, [item for item in known if item is not worst]
    alone = f" By this row alone {_by_status(worst.alone)}." if worst.alone else ""
    return Row(
        target=target.id, says=target.says, status=verdict.status, evidence=verdict.shown_by, stack=verdict.stack,
        place=worst.place, record=verdict.record, reason=f"{verdict.reason}{alone}{_told(others)}",
        is_outside=verdict.is_outside, is_untested=verdict.is_untested, is_blunt=verdict.is_blunt,
        is_missed_too=verdict.status is Status.HOLDS and any(item.verdict.status in _MISSED for item in others),
    )  # fmt: skip


def _told(others: Sequence[Judged]) -> str:
    places: dict[Status, list[str]] = {}
    for item in others:
        places.setdefault(item.verdict.status, []).append(f"{item.verdict.stack} in {item.place}")
    return f" Also {_by_status(places)}." if places else ""


def _by_status(found: Mapping[Status, Sequence[str]]) -> str:
    return "; ".join(f"{status}: {', '.join(found[status])}" for status in Status if status in found)
