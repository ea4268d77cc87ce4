"""Quality of stacks by ladders: verdicts at the most informative model size, and on stated figures."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from hybridtrain.units import format_count
from hybridvalidation.judge.case import Metric
from hybridvalidation.judge.statistics import Interval
from hybridvalidation.judge.verdict import Status, Verdict, judge_metric
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.scenario import Target
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.study.equivalence import Comparison, Finding, confidence_level, judge_size, last_analysis
from hybridvalidation.study.protocol import LadderFile, LadderMade, LadderTarget, check_targets, ladders, read_study

Quality = Mapping[str, tuple[str, ...]]
"""Cells by stack: configuration, parameters, tokens per parameter, seeds, against, difference of loss, top-1 kept,
verdict."""
NO_QUALITY: Quality = MappingProxyType({})


def all_judged(files: ScenarioFiles, results: Path) -> Iterator[tuple[LadderFile, Comparison]]:
    """Yield every configuration at every model size of every ladder, with its reference."""
    for ladder in ladders(files.folder):
        made = read_study(results, ladder)
        yield from ((ladder, judged) for size in ladder.rungs for judged in judge_size(ladder, made, size))


def weight_of(judged: Comparison) -> tuple[float, float, float]:
    """Return the rank of a comparison: decided ones, then undecided ones, by size; then others by number of seeds."""
    params, tokens = judged.scale
    if judged.finding is Finding.UNFINISHED:
        return 0.0, len(judged.pairs), -params
    return 1.0 + (judged.finding is not Finding.INCONCLUSIVE), params, tokens


def stack_quality(files: ScenarioFiles, results: Path) -> dict[str, tuple[str, ...]]:
    """Return ``most_informative_comparisons`` as table cells."""
    return {stack: _cells(judged) for stack, judged in most_informative_comparisons(files, results).items()}


def most_informative_comparisons(files: ScenarioFiles, results: Path) -> dict[str, Comparison]:
    """Return each stack's most informative comparison, without the baseline."""
    telling = dict[str, Comparison]()
    for _, judged in all_judged(files, results):
        for stack in judged.configuration.stacks if judged.pairs else ():
            telling[stack] = max(telling.get(stack, judged), judged, key=weight_of)
    return telling


def short_verdict(judged: Comparison | None) -> str:
    """Return a verdict with mean and model size; a dash for none."""
    if judged is None or judged.interval is None:
        return "-"
    size = format_count(judged.scale[0])
    return f"{judged.finding}, {judged.interval.mean:+.4f} nats at {size}{judged.diverged_text}"


def _cells(judged: Comparison) -> tuple[str, ...]:
    own, (params, tokens) = judged.configuration, judged.scale
    return (
        own.name, format_count(params), f"{tokens:.0f}{', fine-tuned' if own.fine_tunes else ''}",
        f"{len(judged.pairs)} of {len(judged.seeds)}", judged.reference.name, range_text(judged.interval, "+.4f"),
        range_text(judged.retention(), ".2f"), f"{judged.finding}{judged.diverged_text}",
    )  # fmt: skip


def range_text(interval: Interval | None, form: str) -> str:
    """Return a mean with its interval; a dash for none."""
    return "-" if interval is None else f"{interval.mean:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def judge_ladder(ladder: LadderFile, made: LadderMade, targets: Mapping[str, Target]) -> list[Verdict]:
    """Return a verdict per target and stack, at the largest finished model size; unproven without one."""
    check_targets(ladder, targets)
    return [
        _judge(ladder, made, targets[stated.id], stated, stack) for stated in ladder.targets for stack in stated.stacks
    ]


def ladder_verdicts(files: ScenarioFiles, results: Path) -> dict[tuple[str, str], Verdict]:
    """Return the ladders' verdicts for every stack that trains all weights, by target and stack."""
    found, targets = dict[tuple[str, str], Verdict](), files.targets()
    for ladder in ladders(files.folder):
        made = read_study(results, ladder)
        for stated in ladder.targets:
            for stack in (stack for own in ladder.arms if not own.fine_tunes for stack in own.stacks):
                found[stated.id, stack] = _judge(ladder, made, targets[stated.id], stated, stack)
    return found


def _judge(ladder: LadderFile, made: LadderMade, target: Target, stated: LadderTarget, stack: str) -> Verdict:
    metric = _metric(ladder, made, target, stated, stack)
    record, missing = f"studies/{ladder.name}", f"{ladder.name} has no finished model size with it"
    return judge_metric(target, stack, metric, missing=missing, record="" if metric is None else record)


def _metric(ladder: LadderFile, made: LadderMade, target: Target, stated: LadderTarget, stack: str) -> Metric | None:
    own, reference = ladder.configuration_of(stack), ladder.configuration_of(stated.baseline)
    assert own is not None and reference is not None, "an unknown configuration"  # noqa: PT018  one reason
    found = [
        last_analysis(ladder, made, size, own, reference)
        for size in ladder.rungs
        if {own.name, reference.name} <= {one.name for one in ladder.configurations_at(size)}
    ]
    done = sorted((one for one in found if one.is_finished and one.retention() is not None), key=lambda one: one.scale)
    if not done:
        return None
    largest = done[-1]
    values = [_value(target, one, confidence_level(ladder, one.size, own)) for one in done]
    smaller = "; ".join(
        f"{_named(one)}: {value.mean:.2f}, {100 * value.level:g} % interval {value.low:.2f} to {value.high:.2f}, "
        f"{_status(target, value)}"
        for one, value in zip(done[:-1], values[:-1], strict=True)
    )
    remark = (
        f"top-1 accuracy against {stated.baseline}, {_named(largest)}, {len(largest.pairs)} seeds, not the stated size"
    )
    remark += f" (smaller ones: {smaller})" if smaller else ""
    if largest.num_diverged:
        remark += f"; {largest.num_diverged} seeds diverged, which the mean omits"
    told, blunt = _of_controls(ladder, made, target, largest, values[-1].level)
    return Metric(values[-1].mean, Evidence.EXECUTED, "%", interval=values[-1], remark=f"{remark}{told}", blunt=blunt)


def _of_controls(
    ladder: LadderFile, made: LadderMade, target: Target, shown: Comparison, level: float
) -> tuple[str, str]:
    """Return the controls' losses by the same metric, and those that meet the bound or may meet it."""
    told, blunt = "", list[str]()
    for own in ladder.configurations_at(shown.size):
        is_control = own.family == "control" and own is not shown.configuration
        if not is_control or own.fine_tunes != shown.configuration.fine_tunes:
            continue
        found = last_analysis(ladder, made, shown.size, own, shown.reference)
        if not found.is_finished or found.retention() is None:
            continue
        value = _value(target, found, level)
        status = _status(target, value)
        if status is Status.HOLDS and not found.num_diverged:
            blunt.append(
                f"{own.name}, a harmful control, meets the bound too, so the bound is not informative at this size"
            )
        elif not status.is_missed and not found.num_diverged:
            blunt.append(f"{own.name}, a harmful control, does not clearly miss the bound either")
        interval = f"{value.mean:.2f} % ({value.low:.2f} to {value.high:.2f} at the same level)"
        told += f"; the control {own.name}: {interval}{found.diverged_text}"
    return told, "; ".join(blunt)


def _status(target: Target, value: Interval) -> Status:
    return judge_metric(target, "", Metric(value.mean, Evidence.EXECUTED, "%", interval=value)).status


def _value(target: Target, comparison: Comparison, level: float) -> Interval:
    kept = comparison.retention(level)
    assert kept is not None, "others were left out"
    if target.metric == "accuracy_retention_pct":
        return kept
    return replace(kept, mean=100 - kept.mean, low=100 - kept.high, high=100 - kept.low)


def _named(comparison: Comparison) -> str:
    params, tokens = comparison.scale
    return f"{params / 1e6:.2f}M parameters and {tokens:.0f} tokens per parameter"
