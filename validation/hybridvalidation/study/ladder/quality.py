"""What ladders say of an arm, on the rung that tells most, and so of the stacks that share its runs."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from hybridtrain.units import format_count
from hybridvalidation.judge.statistics import Interval
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.study.ladder.equivalence import Finding, Judged, judge_rung
from hybridvalidation.study.ladder.protocol import LadderFile, ladder_names, read_ladder_file
from hybridvalidation.study.ladder.runner import read_ladder

Quality = Mapping[str, tuple[str, ...]]
"""Cells by stack: arm, parameters, tokens a parameter, seeds, against, difference of loss, top-1 kept, verdict."""
NO_QUALITY: Quality = MappingProxyType({})
_Weight = tuple[float, float, float]


def all_judged(files: ScenarioFiles, results: Path) -> Iterator[tuple[LadderFile, Judged]]:
    """Yield every arm on every rung of every ladder, beside what it is compared with."""
    for name in ladder_names(files.folder):
        ladder, made = read_ladder_file(files.folder, name), read_ladder(results, name)
        yield from ((ladder, judged) for rung in ladder.rungs for judged in judge_rung(ladder, made, rung))


def weight_of(judged: Judged) -> _Weight:
    """Return how much a comparison tells: finished ones first, the largest of them; of others, that of most seeds."""
    params, tokens = judged.comparison.size
    if judged.finding is not Finding.UNFINISHED:
        return 1.0, params, tokens
    return 0.0, len(judged.comparison.pairs), -params


def stack_quality(files: ScenarioFiles, results: Path) -> dict[str, tuple[str, ...]]:
    """Return ``telling_of_stacks`` as a table's cells."""
    return {stack: _cells(judged) for stack, judged in telling_of_stacks(files, results).items()}


def telling_of_stacks(files: ScenarioFiles, results: Path) -> dict[str, Judged]:
    """Return what tells most of every stack that shares an arm's runs; the baseline's own have nothing to be told."""
    telling = dict[str, Judged]()
    for _, judged in all_judged(files, results):
        for stack in judged.comparison.arm.stacks if judged.comparison.pairs else ():
            telling[stack] = max(telling.get(stack, judged), judged, key=weight_of)
    return telling


def told_in_short(judged: Judged | None) -> str:
    """Return a verdict with the mean it is about and the size it was executed at; a dash for none."""
    if judged is None or judged.comparison.interval is None:
        return "-"
    size = format_count(judged.comparison.size[0])
    return f"{judged.finding}, {judged.comparison.interval.mean:+.4f} nats at {size}{judged.comparison.diverged_text}"


def _cells(judged: Judged) -> tuple[str, ...]:
    comparison, (params, tokens) = judged.comparison, judged.comparison.size
    return (
        comparison.arm.name, format_count(params), f"{tokens:.0f}{', fine-tuned' if comparison.arm.fine_tunes else ''}",
        f"{len(comparison.pairs)} of {len(comparison.seeds)}", comparison.other.name,
        range_text(comparison.interval, "+.4f"), range_text(comparison.retention, ".2f"),
        f"{judged.finding}{comparison.diverged_text}",
    )  # fmt: skip


def range_text(interval: Interval | None, form: str) -> str:
    """Return a mean with its interval, a dash where there is none."""
    return "-" if interval is None else f"{interval.mean:{form}} [{interval.low:{form}}, {interval.high:{form}}]"
