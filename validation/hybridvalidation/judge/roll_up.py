"""Final verdict on every stated figure, over all places where it was judged."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hybridvalidation.judge.verdict import Status, Verdict, judge_metric
from hybridvalidation.scenario import Target

_BEST_FIRST = list(Status)
_WORDS = {
    Status.BY_DEFINITION: "met by definition", Status.UNDECIDED: "undecided",
    Status.UNPROVEN: "unproven", Status.MISLEADING: "misleading", Status.REFUTED: "refuted",
}  # fmt: skip


def roll_up(targets: Mapping[str, Target], found: Iterable[Verdict]) -> list[Verdict]:
    """Return one verdict per target: the least favourable that counts, with the others listed."""
    by_target: dict[str, list[Verdict]] = {name: [] for name in targets}
    for verdict in found:
        if verdict.target in by_target:
            by_target[verdict.target].append(verdict)
    return [_standing(targets[name], verdicts) for name, verdicts in by_target.items()]


def counts(rows: Sequence[Verdict]) -> str:
    """Return the number of figures by verdict, those that hold without a remark first, and remarks on the others."""
    of_status = Counter(row.status for row in rows)
    held = [row for row in rows if row.status is Status.HOLDS]
    clean = sum(not row.has_remark for row in held)
    told = ", ".join([
        f"{clean} hold without a remark", f"{len(held) - clean} hold with one",
        *(f"{count} {_WORDS[status]}" for status in _WORDS if (count := of_status[status])),
    ])  # fmt: skip
    remarks = (
        ("Better than the stated range", sum(row.is_outside for row in rows)),
        ("By one stack, while another judged stack misses it", sum(row.is_missed_too for row in rows)),
        ("By an estimate that no recorded run tests", sum(row.is_untested for row in rows)),
        ("By a bound that a harmful control meets, or does not clearly miss", sum(row.is_blunt for row in rows)),
    )
    also = "".join(f"\n- {description}: {number}." for description, number in remarks if number)
    kinds = Counter(row.shown_by for row in held)
    by_kind = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    of_these = f"\n\nOf those that hold:\n\n- By evidence: {by_kind}.{also}" if held else ""
    return f"{len(rows)} stated targets: {told}.{of_these}"


def by_status(found: Mapping[Status, Sequence[str]]) -> str:
    """Return names by status, the best first."""
    return "; ".join(f"{status}: {', '.join(found[status])}" for status in Status if status in found)


def _weight(verdict: Verdict) -> int:
    """Return the precedence of a verdict: a registered study, then a scenario, then one stack."""
    return 2 if verdict.is_registered else int(verdict.is_of_scenario)


def _says_something(verdict: Verdict) -> bool:
    """Return whether a verdict counts: without a record only where a study owes it."""
    return verdict.evidence is not None or (verdict.is_registered and verdict.is_of_scenario)


def _standing(target: Target, verdicts: Sequence[Verdict]) -> Verdict:
    known = [verdict for verdict in verdicts if _says_something(verdict)] or verdicts
    if not known:
        return replace(judge_metric(target, "", None), reason="judged nowhere.", because="judged nowhere")
    weight = max(map(_weight, known))
    counting = [verdict for verdict in known if _weight(verdict) == weight]
    worst = max(counting, key=lambda verdict: _BEST_FIRST.index(verdict.status))
    others, places = [verdict for verdict in known if verdict is not worst], dict[Status, list[str]]()
    for other in others:
        places.setdefault(other.status, []).append(f"{other.stack} in {other.place}")
    alone = f" On this row alone {worst.alone}." if worst.alone else ""
    also = f" Also {by_status(places)}." if places else ""
    is_missed_too = worst.status is Status.HOLDS and any(other.status.is_missed for other in others)
    return replace(worst, reason=f"{worst.reason}{alone}{also}", is_missed_too=is_missed_too)
