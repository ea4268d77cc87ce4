"""What ladders say of an arm, of the run of all rungs that tells most, and of the stacks that share its runs."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from hybridtrain.units import format_count
from hybridvalidation.judge.statistics import Interval
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.study.ladder.equivalence import Finding, Judged, judge_rung
from hybridvalidation.study.ladder.protocol import LadderFile, Made, ladder_names, read_ladder_file
from hybridvalidation.study.ladder.runner import read_ladder

Quality = Mapping[str, tuple[str, ...]]
"""Cells by stack: arm, parameters, tokens a parameter, seeds, against, difference of loss, top-1 kept, verdict."""
NO_QUALITY: Quality = MappingProxyType({})
Weight = tuple[float, float, float]


def weight_of(judged: Judged) -> Weight:
    """Return how much a comparison tells: finished ones first, the largest of them; of others, that of most seeds."""
    params, tokens = size_of(judged)
    if judged.finding is not Finding.UNFINISHED:
        return 1.0, params, tokens
    return 0.0, len(judged.comparison.pairs), -params


def size_of(judged: Judged) -> tuple[float, float]:
    """Return parameters, and tokens a parameter."""
    rung = judged.comparison.rung
    return rung.model.num_params, rung.tokens_per_param


def stack_quality(files: ScenarioFiles, results: Path) -> dict[str, tuple[str, ...]]:
    """Return what is known of every stack that shares an arm's runs; the baseline's own have nothing to be told."""
    found = dict[str, tuple[str, ...]]()
    for name in ladder_names(files.folder):
        ladder, made = read_ladder_file(files.folder, name), read_ladder(results, name)
        for judged in _telling(ladder, made).values():
            found |= dict.fromkeys(judged.comparison.arm.stacks, _cells(judged))
    return found


def _telling(ladder: LadderFile, made: Made) -> dict[str, Judged]:
    """Return by arm the comparison that tells most; none where no pair of seeds was run."""
    found = dict[str, Judged]()
    for judged in (one for rung in ladder.rungs for one in judge_rung(ladder, made, rung)):
        best = found.get(judged.comparison.arm.name)
        if judged.comparison.interval is not None and (best is None or weight_of(judged) > weight_of(best)):
            found[judged.comparison.arm.name] = judged
    return found


def _cells(judged: Judged) -> tuple[str, ...]:
    comparison, (params, tokens) = judged.comparison, size_of(judged)
    diverged = f", {comparison.num_diverged} diverged" if comparison.num_diverged else ""
    return (
        comparison.arm.name, format_count(int(params)), f"{tokens:.0f}",
        f"{len(comparison.pairs)} of {len(comparison.seeds)}", comparison.other.name,
        range_text(comparison.interval, "+.4f"), range_text(comparison.retention, ".2f"), f"{judged.finding}{diverged}",
    )  # fmt: skip


def range_text(interval: Interval | None, form: str) -> str:
    """Return a mean with its interval, a dash where there is none."""
    return "-" if interval is None else f"{interval.mean:{form}} [{interval.low:{form}}, {interval.high:{form}}]"
