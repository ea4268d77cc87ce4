"""Stated figures of quality, judged by a ladder: on the largest rung that is finished, told with its size."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hybridtrain.errors import ConfigError, unknown_name
from hybridvalidation.judge.case import Metric
from hybridvalidation.judge.statistics import Interval
from hybridvalidation.judge.verdict import Status, Verdict, judge_metric
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.scenario import Target
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.study.ladder.equivalence import Comparison, last_look, level_of
from hybridvalidation.study.ladder.protocol import LadderFile, LadderTarget, Made, ladder_names, read_ladder_file
from hybridvalidation.study.ladder.runner import read_ladder

_RETENTION, _LOSS = "accuracy_retention_pct", "accuracy_loss_pct"


def check_ladder_targets(ladder: LadderFile, targets: Mapping[str, Target]) -> None:
    """Refuse a ladder with a target that is unknown, or about something else; raises ``ConfigError``."""
    faults = []
    for stated in ladder.targets:
        if stated.id not in targets:
            faults.append(f"$.targets: {unknown_name('target', stated.id, targets)}")
        elif (metric := targets[stated.id].metric) not in {_RETENTION, _LOSS}:
            faults.append(f"$.targets: '{stated.id}' is about {metric}; a ladder judges {_RETENTION}, {_LOSS}")
    if faults:
        raise ConfigError(ladder.name, faults)


def judge_ladder(ladder: LadderFile, made: Made, targets: Mapping[str, Target]) -> list[Verdict]:
    """Return a verdict per target and stack; unproven before a first rung is finished."""
    check_ladder_targets(ladder, targets)
    return [
        _judge(ladder, made, targets[stated.id], stated, stack) for stated in ladder.targets for stack in stated.stacks
    ]


def ladder_verdicts(files: ScenarioFiles, results: Path) -> dict[tuple[str, str], Verdict]:
    """Return what ladders say on their targets for every stack that trains all weights, by target and stack."""
    found = dict[tuple[str, str], Verdict]()
    for name in ladder_names(files.folder):
        targets = files.targets()
        ladder, made = read_ladder_file(files.folder, name), read_ladder(results, name)
        for stated in ladder.targets:
            for stack in (stack for arm in ladder.arms if not arm.fine_tunes for stack in arm.stacks):
                found[stated.id, stack] = _judge(ladder, made, targets[stated.id], stated, stack)
    return found


def _judge(ladder: LadderFile, made: Made, target: Target, stated: LadderTarget, stack: str) -> Verdict:
    metric = _metric(ladder, made, target, stated, stack)
    record, missing = f"studies/{ladder.name}", f"{ladder.name} has not finished a rung of it"
    return judge_metric(target, stack, metric, missing=missing, record="" if metric is None else record)


def _metric(ladder: LadderFile, made: Made, target: Target, stated: LadderTarget, stack: str) -> Metric | None:
    arm, other = ladder.arm_of(stack), ladder.arm_of(stated.baseline)
    assert arm is not None and other is not None, "checked with the file"  # noqa: PT018  one reason
    rungs = [rung for rung in ladder.rungs if {arm.name, other.name} <= {each.name for each in ladder.arms_of(rung)}]
    found = [last_look(ladder, made, rung, arm, other) for rung in rungs]
    done = sorted((one for one in found if one.is_finished and one.retention is not None), key=lambda one: one.size)
    if not done:
        return None
    largest = done[-1]
    kept = (one.retention_at(level_of(ladder, one.rung, arm)) for one in done)
    values = [_value(target, interval) for interval in kept if interval is not None]
    smaller = "; ".join(
        f"{_named(one)}: {value.mean:.2f}, {100 * value.level:g} % interval {value.low:.2f} to {value.high:.2f}, "
        f"{_status(target, arm.name, value)}"
        for one, value in zip(done[:-1], values[:-1], strict=True)
    )
    remark = (
        f"top-1 accuracy against {stated.baseline}, {_named(largest)}, {len(largest.pairs)} seeds, not the stated size"
    )
    remark += f" (smaller ones: {smaller})" if smaller else ""
    if largest.num_diverged:
        remark += f"; {largest.num_diverged} seeds diverged, which no mean holds"
    told, blunt = _of_controls(ladder, made, target, largest, values[-1].level)
    return Metric(values[-1].mean, Evidence.EXECUTED, "%", interval=values[-1], remark=f"{remark}{told}", blunt=blunt)


def _of_controls(ladder: LadderFile, made: Made, target: Target, shown: Comparison, level: float) -> tuple[str, str]:
    """Say what the arms that must fail lose by the same ruler, and which of them meet the bound or do not miss it."""
    controls = [
        arm for arm in ladder.arms_of(shown.rung)
        if arm.family == "control" and arm is not shown.arm and arm.fine_tunes == shown.arm.fine_tunes
    ]  # fmt: skip
    told, blunt = "", list[str]()
    for found in (last_look(ladder, made, shown.rung, arm, shown.other) for arm in controls):
        kept = found.retention_at(level)
        if not found.is_finished or kept is None:
            continue
        value = _value(target, kept)
        status = _status(target, found.arm.name, value)
        if status is Status.HOLDS and not found.num_diverged:
            blunt.append(f"{found.arm.name}, known to do harm, meets the bound too: nothing fails by it at this size")
        elif not status.is_missed and not found.num_diverged:
            blunt.append(f"{found.arm.name}, known to do harm, does not clearly miss the bound either")
        interval = f"{value.mean:.2f} % ({value.low:.2f} to {value.high:.2f} at the same level)"
        told += f"; the control {found.arm.name}: {interval}{found.diverged_text}"
    return told, "; ".join(blunt)


def _status(target: Target, arm: str, value: Interval) -> Status:
    return judge_metric(target, arm, Metric(value.mean, Evidence.EXECUTED, "%", interval=value)).status


def _value(target: Target, kept: Interval) -> Interval:
    return (
        kept
        if target.metric == _RETENTION
        else replace(kept, mean=100 - kept.mean, low=100 - kept.high, high=100 - kept.low)
    )


def _named(comparison: Comparison) -> str:
    rung = comparison.rung
    return f"{rung.model.num_params / 1e6:.2f}M parameters and {rung.tokens_per_param:.0f} tokens a parameter"
