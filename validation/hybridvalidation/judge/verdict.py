"""A stated figure, judged: holds, misleading, refuted or unproven, with a sentence and the kind of evidence."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from hybridvalidation.judge.case import Case, Decider, Metric
from hybridvalidation.judge.metrics import compute_metric
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.runs.runner import ScenarioRun
from hybridvalidation.scenario import ANY_STACK, BASELINE_STACK, Target

_EQUAL_TOLERANCE = 0.01
"""Figures stated to two or three digits are re-derived within one percent."""


class Status(StrEnum):
    """What the evidence says."""

    HOLDS = "holds"
    MISLEADING = "misleading"
    """The figure is right as it was got, but is an average or a part; what decides misses the bound."""
    REFUTED = "refuted"
    UNPROVEN = "unproven"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One target on one stack."""

    target: str
    says: str
    stack: str
    status: Status
    reason: str
    """A sentence with the figure and the bound."""
    evidence: Evidence | None
    value: float | None
    fits: bool = True
    """Whether the stack runs on the scenario's card."""
    decider: Decider | None = None
    """The figure that decides, where ``value`` is an average or a part."""


def judge(run: ScenarioRun, target: Target, stack: str, baseline: str = BASELINE_STACK) -> Verdict:
    """Return the verdict; for ``any`` the stack that does best among those that fit the card.

    A figure that says how much must be needed is about every stack: there the most frugal one is shown.
    """
    if stack != ANY_STACK:
        return _judge_stack(run, target, stack, baseline)
    verdicts = [_judge_stack(run, target, name, baseline) for name in run.scenario.stacks]
    order = [Status.HOLDS, Status.UNPROVEN, Status.MISLEADING, Status.REFUTED]
    if _states_least_need(target):
        order.reverse()
    return min(verdicts, key=lambda v: (order.index(v.status), not v.fits, _distance(target, v)))


def judge_all(run: ScenarioRun, targets: Mapping[str, Target]) -> list[Verdict]:
    """Return one verdict per target and stack of the scenario, in file order."""
    return [
        judge(run, targets[item.id], stack, item.baseline) for item in run.scenario.targets for stack in item.stacks
    ]


def _judge_stack(run: ScenarioRun, target: Target, stack: str, baseline: str) -> Verdict:
    return judge_metric(target, stack, compute_metric(Case(run=run, target=target, stack=stack, baseline=baseline)))


def judge_metric(target: Target, stack: str, metric: Metric | None) -> Verdict:
    """Return the verdict on a figure, whoever computed it; ``stack`` names what it is about."""
    if metric is None:
        status, reason = Status.UNPROVEN, f"no record of {target.metric} for stack {stack}"
    else:
        status, reason = _compare(target, stack, metric)
    return Verdict(
        target=target.id, says=target.says, stack=stack, status=status, reason=reason,
        evidence=None if metric is None else metric.evidence, value=None if metric is None else metric.value,
        fits=metric is None or metric.fits, decider=None if metric is None else metric.decider,
    )  # fmt: skip


def _compare(target: Target, stack: str, metric: Metric) -> tuple[Status, str]:
    low, high = _bounds(target)
    shown = f"{stack}: {_number(metric.value)} {metric.unit}"
    if metric.interval is not None:
        shown += f" (95 % interval {metric.interval.low:.2f} to {metric.interval.high:.2f})"
    certain_low, certain_high = metric.value, metric.value
    if metric.interval is not None:
        certain_low, certain_high = metric.interval.low, metric.interval.high
    if low <= certain_low and certain_high <= high:
        status = Status.HOLDS
    elif certain_high < low or certain_low > high:
        status = Status.REFUTED
    else:
        status = Status.UNPROVEN
    wanted = _wanted(target)
    words = {Status.HOLDS: "meets", Status.REFUTED: "misses", Status.UNPROVEN: "cannot be told apart from"}
    reason = f"{shown} {words[status]} {wanted}, {metric.evidence}"
    if not metric.fits and not target.metric.endswith("_reduction_pct"):
        if status is Status.HOLDS and not _states_need(target):
            status = Status.REFUTED
        reason += "; this stack runs out of memory"
    if metric.decider is not None:
        if status is Status.HOLDS and not _is_met(target, metric.decider):
            status = Status.MISLEADING
        reason += _told(metric.decider, metric.unit)
    if metric.remark:
        reason += f"; {metric.remark}"
    return status, f"{reason}."


def _states_need(target: Target) -> bool:
    """Return whether the statement is about what a run takes, so that a card too small does not refute it."""
    return target.metric.startswith("peak_vram_g") and target.direction in {"min", "equal"}


def _states_least_need(target: Target) -> bool:
    return _states_need(target) and target.direction == "min"


def _is_met(target: Target, decider: Decider) -> bool:
    """Return whether the figure that decides keeps the bound; it may save more than a stated equality."""
    low, high = _bounds(target)
    return low <= decider.value and (decider.value <= high or target.direction == "equal")


def _told(decider: Decider, unit: str) -> str:
    what = f"{decider.decides}: {_number(decider.value)} {unit}, {decider.evidence}"
    return f", but {decider.stated_is}; what decides, {what}"


def _bounds(target: Target) -> tuple[float, float]:
    infinity = float("inf")
    if target.direction == "range":
        assert target.low is not None, "checked at construction"
        assert target.high is not None, "checked at construction"
        return target.low, target.high
    assert target.value is not None, "checked at construction"
    if target.direction == "max":
        return -infinity, target.value
    if target.direction == "min":
        return target.value, infinity
    return target.value * (1 - _EQUAL_TOLERANCE), target.value * (1 + _EQUAL_TOLERANCE)


def _wanted(target: Target) -> str:
    if target.direction == "range":
        return f"{target.low:g} to {target.high:g}"
    word = {"max": "at most", "min": "at least", "equal": "the stated"}[target.direction]
    return f"{word} {target.value:g}"


def _distance(target: Target, verdict: Verdict) -> float:
    """Rank equally judged stacks: the smallest value for an upper bound, the largest for a lower one."""
    if verdict.value is None:
        return float("inf")
    return -verdict.value if target.direction == "min" and not _states_least_need(target) else verdict.value


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2g}" if 0 < abs(value) < 0.01 else f"{value:.2f}"
