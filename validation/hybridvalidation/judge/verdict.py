"""A stated figure, judged on one stack: a status, a sentence, and the kind of evidence."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from types import MappingProxyType

from hybridtrain.config.rules import young
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.judge.case import RATE_METRICS, Case, Decider, Metric, joined
from hybridvalidation.judge.metrics import compute_metric
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.stack_run import RunKind
from hybridvalidation.scenario import BASELINE_STACK, ScenarioTarget, Target

_EQUAL_TOLERANCE = 0.01
"""Figures stated to two or three digits are re-derived within one percent."""
_LARGEST_MARGIN = 1000.0
_KINDS: dict[Evidence, RunKind] = {Evidence.EXECUTED: "accuracy", Evidence.MEASURED: "measured"}
"""Of the record that shows a figure; of all others its dry run."""


class Status(StrEnum):
    """Verdict by the evidence, the best first."""

    HOLDS = "holds"
    BY_DEFINITION = "by definition"
    """It holds whatever a program does: the figure is how the recipe is written down."""
    UNDECIDED = "undecided"
    """The difference is smaller than the time model's own error, or GB and GiB decide differently."""
    UNPROVEN = "unproven"
    """There is no record, or its interval lies on both sides."""
    MISLEADING = "misleading"
    """The figure is right as it was got, but is an average or a part; what decides misses the bound."""
    REFUTED = "refuted"

    @property
    def is_met(self) -> bool:
        """Whether the figure stands."""
        return self in {Status.HOLDS, Status.BY_DEFINITION}

    @property
    def is_missed(self) -> bool:
        """Whether the figure falls."""
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
    """Whether the stack runs on the scenario's card."""
    margin: float = 0.0
    """Ratio by which the value is better than its bound, at most 1000; below 1 it misses, 0 without a value."""
    decider: Decider | None = None
    """The figure that decides, where ``value`` is an average or a part."""
    record: str = ""
    """File, kind and key of the record that shows it."""
    is_outside: bool = False
    """Whether the value keeps its bound from outside of the range that is stated."""
    is_untested: bool = False
    """Whether it holds by an estimate that no recorded run tests."""
    is_blunt: bool = False
    """Whether it holds by a bound that what must fail meets, or does not clearly miss."""
    is_of_scenario: bool = False
    """Whether it is about the scenario: on that stack which does best on all such rows together."""
    place: str = young("")
    """Scenario, study or page where it was reached."""
    is_registered: bool = young(False)
    """Whether a study was registered to judge it."""
    alone: str = young("")
    """Stacks that do better on the row than the one that does best on all rows together, by status."""
    is_missed_too: bool = young(False)
    """Whether it holds by one stack, and another one that it is asked of does not meet it."""

    @property
    def shown_by(self) -> str:
        """Return the kind of evidence, and that of the figure which decides where it is another one."""
        own, decides = self.evidence or "", self.decider.evidence if self.decider else ""
        return own if decides in {"", own} else f"{own}; {decides} decides"

    @property
    def has_remark(self) -> bool:
        """Whether a remark qualifies that it holds."""
        return self.is_outside or self.is_missed_too or self.is_untested or self.is_blunt


Elsewhere = Mapping[tuple[str, str], Verdict]
"""Verdicts that a scenario does not reach itself, by target and stack: those of a ladder on quality."""
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
    """Return the verdict on a figure, whoever computed it.

    Args:
        target: What is stated.
        stack: What the figure is about.
        metric: None where there is no evidence.
        missing: What would have to be there, if nothing is.
        record: File, kind and key of the record that shows it.
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
        reason += f"; in GB of 10^9 bytes {short_number(metric.decimal)}, which {word} it: the unit decides"
    if not metric.fits and not target.metric.endswith("_reduction_pct"):
        if not status.is_missed and not _states_need(target):
            status = Status.REFUTED
        reason += "; this stack runs out of memory"
    if (decider := metric.decider) is not None:
        if status is Status.HOLDS and not _is_met(target, decider):
            status = Status.MISLEADING
        shown = f"{short_number(decider.value)} {metric.unit}, {decider.evidence}"
        reason += f", but {decider.stated_is}; what decides, {decider.decides}: {shown}"
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


def states_least_need(target: Target) -> bool:
    """Return whether the statement is about every stack's least need: the most frugal one decides."""
    return _states_need(target) and target.direction == "min"


def _is_met(target: Target, decider: Decider) -> bool:
    """Return whether the figure that decides keeps the bound; a saving may be larger than a stated equality."""
    low, _ = _bounds(target)
    is_larger = target.direction == "equal" and decider.is_saving
    return _keeps(target, decider.value) or (is_larger and low <= decider.value)


def _bounds(target: Target) -> tuple[float, float]:
    if target.direction == "range":
        assert target.low is not None, "checked at construction"
        assert target.high is not None, "checked at construction"
        return target.low, target.high
    assert target.value is not None, "checked at construction"
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
    """Return a figure in as many digits as matter."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2g}" if 0 < abs(value) < 0.01 else f"{value:.2f}"
