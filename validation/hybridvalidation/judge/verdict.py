"""Verdict on a stated figure for one stack: status, sentence and evidence."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from types import MappingProxyType

from hybridtrain.config.rules import added_field
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.judge.case import RATE_METRICS, Case, Decider, Metric, joined
from hybridvalidation.judge.metrics import compute_metric
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.stack_run import RunKind
from hybridvalidation.scenario import BASELINE_STACK, ScenarioTarget, Target

_EQUAL_TOLERANCE = 0.01
"""Tolerance of recomputed figures, which are stated to two or three digits."""
_LARGEST_MARGIN = 1000.0
_KINDS: dict[Evidence, RunKind] = {Evidence.EXECUTED: "accuracy", Evidence.MEASURED: "measured"}
"""Kind of the record behind a figure by evidence; default: the dry run."""


class Status(StrEnum):
    """Verdict by the evidence, the best first."""

    HOLDS = "holds"
    BY_DEFINITION = "by definition"
    """True of any program: the figure follows from how the recipe is defined."""
    UNDECIDED = "undecided"
    """The difference is within the time model's error, or GB and GiB give different verdicts."""
    UNPROVEN = "unproven"
    """No record, or an interval on both sides of the bound."""
    MISLEADING = "misleading"
    """The stated figure is met as an average or a part, but the deciding figure misses the bound."""
    REFUTED = "refuted"

    @property
    def is_met(self) -> bool:
        """Whether the statement is met."""
        return self in {Status.HOLDS, Status.BY_DEFINITION}

    @property
    def is_missed(self) -> bool:
        """Whether the statement is missed."""
        return self in {Status.MISLEADING, Status.REFUTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One target on one stack."""

    target: str
    description: str
    stack: str
    status: Status
    reason: str
    """A sentence with the figure and the bound."""
    because: str
    """The reason in at most twelve words."""
    evidence: Evidence | None
    value: float | None
    unit: str = ""
    fits: bool = True
    """Whether the stack fits the scenario's card."""
    margin: float = 0.0
    """Ratio by which the value beats its bound, at most 1000; below 1: misses; 0: no value."""
    decider: Decider | None = None
    """The deciding figure, if ``value`` is an average or a part."""
    record: str = ""
    """File, kind and key of its record."""
    is_outside: bool = False
    """Whether the value meets its bound but is outside of the stated range."""
    is_untested: bool = False
    """Whether it rests on an estimate that no recorded run tests."""
    is_blunt: bool = False
    """Whether a harmful control also meets the bound, or does not clearly miss it."""
    is_of_scenario: bool = False
    """Whether it is a row of the scenario, judged on the stack that is best over all such rows."""
    place: str = added_field("")
    """Scenario, study or page of the verdict."""
    is_registered: bool = added_field(False)
    """Whether a preregistered study judges it."""
    alone: str = added_field("")
    """Stacks that do better on this row than the stack that is best over all rows, by status."""
    is_missed_too: bool = added_field(False)
    """Whether one stack meets it while another judged stack does not."""

    @property
    def shown_by(self) -> str:
        """Return the kind of evidence, and the deciding figure's if different."""
        own, decides = self.evidence or "", self.decider.evidence if self.decider else ""
        return own if decides in {"", own} else f"{own}; {decides} decides"

    @property
    def has_remark(self) -> bool:
        """Whether a remark qualifies the verdict."""
        return self.is_outside or self.is_missed_too or self.is_untested or self.is_blunt


Elsewhere = Mapping[tuple[str, str], Verdict]
"""Verdicts from elsewhere, by target and stack: a quality ladder's."""
NOWHERE_ELSE: Elsewhere = MappingProxyType({})


def judge(
    run: ScenarioRun, target: Target, stack: str, item: ScenarioTarget, elsewhere: Elsewhere = NOWHERE_ELSE
) -> Verdict:
    """Return the verdict of a scenario's row on one stack."""
    if (target.id, stack) in elsewhere:
        return elsewhere[target.id, stack]
    baselines = run.scenario.rate_baselines if target.metric in RATE_METRICS else (BASELINE_STACK,)
    baseline = item.baseline or run.scenario.baseline_of(stack, baselines)
    case = Case(run=run, target=target, stack=stack, baseline=baseline)
    metric = compute_metric(case)
    kind = "dry_run" if metric is None else _KINDS.get(metric.evidence, "dry_run")
    record = run.get(kind, stack)
    shown_by = "" if record is None else f"{run.scenario.name} {kind} {record.key}"
    return judge_metric(target, stack, metric, missing=case.missing, record=shown_by)


def judge_metric(
    target: Target, stack: str, metric: Metric | None, *, missing: str = "no record", record: str = ""
) -> Verdict:
    """Return the verdict on a computed figure.

    Args:
        target: The stated target.
        stack: The stack.
        metric: The figure; None without evidence.
        missing: The missing evidence, in words.
        record: File, kind and key of the record.
    """
    unknown = Verdict(
        target=target.id, description=target.description, stack=stack, status=Status.UNPROVEN,
        reason=f"{stack}: {missing}.", because=missing,
        evidence=None, value=None,
    )  # fmt: skip
    if metric is None:
        return unknown
    status, reason = _compare(target, stack, metric)
    holds = status is Status.HOLDS
    return replace(
        unknown, status=status, reason=reason, because=_because(target, metric, status), evidence=metric.evidence,
        value=metric.value, unit=metric.unit, fits=metric.fits, margin=_margin(target, metric.value),
        decider=metric.decider, record=record,
        is_outside=holds and _is_outside(target, metric.value), is_untested=holds and metric.is_untested,
        is_blunt=holds and bool(metric.blunt),
    )  # fmt: skip


def _compare(target: Target, stack: str, metric: Metric) -> tuple[Status, str]:
    status, reason = _sure_of(target, stack, metric)
    if metric.decimal is not None and (met := _keeps(target, metric.decimal)) is not _keeps(target, metric.value):
        status, word = Status.UNDECIDED, "meets" if met else "misses"
        reason += (
            f"; in GB of 10^9 bytes {short_number(metric.decimal)}, which {word} it, so the verdict depends on the unit"
        )
    if not metric.fits and not target.metric.endswith("_reduction_pct"):
        if not status.is_missed and not _states_need(target):
            status = Status.REFUTED
        reason += "; this stack runs out of memory"
    if (decider := metric.decider) is not None:
        if status is Status.HOLDS and not _is_met(target, decider):
            status = Status.MISLEADING
        shown = f"{short_number(decider.value)} {metric.unit}, {decider.evidence}"
        reason += f", but {decider.stated_is}; the deciding figure, {decider.decides}: {shown}"
    if target.by_definition and status in {Status.HOLDS, Status.MISLEADING}:
        status = Status.BY_DEFINITION if status is Status.HOLDS else status
        reason += f"; met by definition: {target.by_definition}"
    if status is Status.HOLDS and _is_outside(target, metric.value):
        reason += f"; outside of the stated {target.low:g} to {target.high:g}"
    return status, joined(reason, metric.remark, metric.blunt if status is Status.HOLDS else "") + "."


def _sure_of(target: Target, stack: str, metric: Metric) -> tuple[Status, str]:
    """Return the status of a value against its bound, by its interval or an estimate's error."""
    low, high = _bounds(target)
    shown, sure = f"{stack}: {short_number(metric.value)} {metric.unit}", metric.interval or metric.error
    sure_low, sure_high = (metric.value, metric.value) if sure is None else (sure.low, sure.high)
    if metric.interval is not None:
        shown += f" ({100 * metric.interval.level:g} % interval {sure_low:.2f} to {sure_high:.2f})"
    elif sure is not None:
        shown += f" ({short_number(sure_low)} to {short_number(sure_high)} by the time model's own error)"
    if low <= sure_low and sure_high <= high:
        status, word = Status.HOLDS, "meets"
    elif sure_high < low or sure_low > high:
        status, word = Status.REFUTED, "misses"
    else:
        status = Status.UNDECIDED if metric.interval is None else Status.UNPROVEN
        word = "is not distinguishable from"
    return status, f"{shown} {word} {_wanted(target)}, {metric.evidence}"


def _because(target: Target, metric: Metric, status: Status) -> str:
    """Return the figure and the bound, or what overrules them."""
    shown = f"{short_number(metric.value)} {metric.unit}"
    if status is Status.MISLEADING and metric.decider is not None:
        return f"{shown} as stated, but {short_number(metric.decider.value)} {metric.unit} decides"
    if status is Status.REFUTED and _keeps(target, metric.value):
        return f"{shown}, but it runs out of memory"
    word = {Status.UNDECIDED: "may meet or miss", Status.UNPROVEN: "may meet or miss", Status.REFUTED: "misses"}
    return f"{shown} {word.get(status, 'meets')} {_wanted(target)}"


def _keeps(target: Target, value: float) -> bool:
    low, high = _bounds(target)
    return low <= value <= high


def _is_outside(target: Target, value: float) -> bool:
    """Return whether the value lies outside a stated range."""
    return target.low is not None and target.high is not None and not target.low <= value <= target.high


def _states_need(target: Target) -> bool:
    """Return whether the statement is about a run's need, so that a card too small does not refute it."""
    return target.metric.startswith("peak_vram_g") and target.direction in {"min", "equal"}


def is_about_most_frugal_stack(target: Target) -> bool:
    """Return whether the target is a lower bound on memory, which the most frugal stack decides."""
    return _states_need(target) and target.direction == "min"


def _is_met(target: Target, decider: Decider) -> bool:
    """Return whether the figure that decides keeps the bound; a saving may be larger than a stated equality."""
    low, _ = _bounds(target)
    is_larger = target.direction == "equal" and decider.is_saving
    return _keeps(target, decider.value) or (is_larger and low <= decider.value)


def _bounds(target: Target) -> tuple[float, float]:
    if target.direction == "range":
        assert target.low is not None, "checked in TargetFile"
        assert target.high is not None, "checked in TargetFile"
        return target.low, target.high
    assert target.value is not None, "checked in TargetFile"
    if target.direction == "max":
        return -inf, target.value
    if target.direction == "min":
        return target.value, inf
    return target.value * (1 - _EQUAL_TOLERANCE), target.value * (1 + _EQUAL_TOLERANCE)


def _wanted(target: Target) -> str:
    if target.direction == "range":
        return f"{target.low:g} to {target.high:g}"
    word = {"max": "at most", "min": "at least", "equal": "the stated"}[target.direction]
    return f"{word} {target.value:g}"


def _margin(target: Target, value: float) -> float:
    """Return the ratio by which a value is better than the nearer of its bounds."""
    low, high = _bounds(target)
    below = _LARGEST_MARGIN if value <= 0 else high / value
    above = value / low if low > 0 else _LARGEST_MARGIN
    return max(0.0, min(below, above, _LARGEST_MARGIN))


def short_number(value: float) -> str:
    """Return a figure with significant digits."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2g}" if 0 < abs(value) < 0.01 else f"{value:.2f}"
