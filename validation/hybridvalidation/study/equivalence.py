"""Paired differences of validation loss, and their verdicts: equivalent, no harm, worse, better, inconclusive.

Equivalence is tested by two one-sided t tests (TOST, Schuirmann 1987) against a registered margin. A difference is
tested two-sided. The p-values of either are adjusted over the configurations of a family at a model size (Holm 1979),
unfinished ones included.

Harm is tested one-sided against the margin, at several numbers of seeds (``spent_levels``). The error rate is divided
by the number of configurations that a model size compares; a control has all of it. Only pairs of one processor count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean, stdev
from typing import get_args

import numpy as np
from scipy.special import stdtr, stdtrit  # Student's t: importing scipy.stats takes half a second, which fit would wait

from hybridvalidation.judge.statistics import Interval, mean_interval, spent_levels
from hybridvalidation.study.protocol import (
    Configuration,
    Family,
    LadderFile,
    LadderMade,
    LadderRecord,
    ModelSize,
    ladder_record,
)


class Finding(StrEnum):
    """Verdict on a configuration over its seeds."""

    EQUIVALENT = "equivalent"
    NO_HARM = "no harm"
    """Its loss is above the reference's by less than the margin."""
    WORSE = "worse"
    BETTER = "better"
    INCONCLUSIVE = "inconclusive"
    UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Verdict on a configuration at one model size, compared with its reference by seed."""

    size: ModelSize
    configuration: Configuration
    reference: Configuration
    seeds: tuple[int, ...]
    """Seeds registered for this analysis."""
    pairs: tuple[tuple[LadderRecord, LadderRecord], ...]
    """Pairs of runs with the same seed: equal initial weights and batches. Either may have diverged."""
    p_equivalent: float = 1.0
    """Adjusted p-values; 1 if unfinished. Of a test of harm those of a mean below and above the margin, unadjusted."""
    p_different: float = 1.0
    level: float = 0.0
    """Error rate of a test of harm at this number of seeds; 0: none was made."""
    finding: Finding = Finding.UNFINISHED

    @property
    def differences(self) -> list[float]:
        """Validation loss minus the reference's, nats per token, if neither diverged."""
        return [
            own.validation_loss - other.validation_loss
            for own, other in self.pairs
            if own.validation_loss is not None and other.validation_loss is not None
        ]

    @property
    def num_diverged(self) -> int:
        """Seeds at which the configuration diverged and its reference did not."""
        return sum(own.validation_loss is None and other.validation_loss is not None for own, other in self.pairs)

    @property
    def diverged_text(self) -> str:
        """Number of diverged seeds as the end of a sentence; empty for none."""
        return f", {self.num_diverged} diverged" if self.num_diverged else ""

    @property
    def scale(self) -> tuple[int, float]:
        """Parameters, and tokens per parameter, pre-training included for fine-tuned ones."""
        return self.size.model.num_params, self.size.tokens_per_param

    @property
    def is_finished(self) -> bool:
        """Whether all seeds were run."""
        return len(self.pairs) == len(self.seeds)

    @property
    def interval(self) -> Interval | None:
        """Mean difference with its 95 % confidence interval, not adjusted; None with fewer than two seeds."""
        return mean_interval(self.differences) if len(self.differences) > 1 else None

    @property
    def largest_harm(self) -> float | None:
        """Upper bound of the mean difference at ``level``, nats per token; None without a test of harm."""
        if not self.level:
            return None
        samples = self.differences
        quantile = float(stdtrit(len(samples) - 1, 1 - self.level))
        return fmean(samples) + quantile * stdev(samples) / math.sqrt(len(samples))

    def retention(self, level: float = 0.95) -> Interval | None:
        """Return top-1 accuracy over the reference's in percent, as ``interval``."""
        ratios = [
            100 * own.validation_accuracy / other.validation_accuracy
            for own, other in self.pairs
            if own.validation_accuracy is not None and other.validation_accuracy
        ]
        return mean_interval(ratios, level) if len(ratios) > 1 else None


def judge_size(ladder: LadderFile, made: LadderMade, size: ModelSize) -> list[Comparison]:
    """Return a verdict for every compared configuration: the first conclusive analysis's, else the last's.

    Each of two interim analyses has half of the error rate, adjusted over the whole family.
    """
    if size.analyses:
        return [_judge_harm(ladder, made, size, *pair) for pair in _compared_at(ladder, made, size)]
    judged = []
    for first in _first_analysis(ladder, made, size):
        again = [last_analysis(ladder, made, size, c.configuration, c.reference) if _is_open(c) else c for c in first]
        judged += [b if _is_open(a) else a for a, b in zip(first, _judge(again, ladder), strict=True)]
    return judged


def undecided(ladder: LadderFile, made: LadderMade, size: ModelSize) -> list[Comparison]:
    """Return the comparisons that are inconclusive after the first interim analysis and have a second one."""
    return [one for family in _first_analysis(ladder, made, size) for one in family if _is_open(one)]


def last_analysis(
    ladder: LadderFile, made: LadderMade, size: ModelSize, own: Configuration, reference: Configuration
) -> Comparison:
    """Return the comparison over the seeds of both analyses if they were run, else of the first; of harm the last."""
    if size.analyses:
        return _judge_harm(ladder, made, size, own, reference)
    second = _compare(ladder, made, size, own, reference, (*size.seeds, *size.more_seeds))
    return second if second.is_finished else _compare(ladder, made, size, own, reference, size.seeds)


def _compared_at(ladder: LadderFile, made: LadderMade, size: ModelSize) -> list[tuple[Configuration, Configuration]]:
    """Return the compared configurations of a model size: of a test of harm the controls, and what passed below it."""
    place = ladder.rungs.index(size)
    pairs = ladder.pairs_at(size)
    if not size.analyses or place == 0:
        return pairs
    passed = {
        one.configuration.name
        for one in judge_size(ladder, made, ladder.rungs[place - 1])
        if one.finding is Finding.NO_HARM or one.configuration.family == "control"
    }
    return [pair for pair in pairs if pair[0].name in passed]


def harm_levels(ladder: LadderFile, size: ModelSize, own: Configuration) -> list[float]:
    """Return the error rate of each analysis of a test of harm of one configuration."""
    compared = sum(pair[0].family != "control" for pair in ladder.pairs_at(size))
    return spent_levels(size.analyses, ladder.alpha / (1 if own.family == "control" else compared))


def confidence_level(ladder: LadderFile, size: ModelSize, own: Configuration) -> float:
    """Return the confidence level of an unadjusted interval."""
    return 1 - _alpha(ladder, size, [own])


def largest_deviation(ladder: LadderFile, size: ModelSize, num_seeds: int) -> float:
    """Return the largest deviation of paired differences, in nats, for which equivalence is possible.

    Computed for a mean of zero and the first configuration in Holm's order; later ones may deviate slightly more.
    """
    family = [own for own, _ in ladder.pairs_at(size) if own.family == "stack"]
    if not family:
        return 0.0
    quantile = float(stdtrit(num_seeds - 1, _alpha(ladder, size, family) / len(family)))
    return ladder.margin_nats * math.sqrt(num_seeds) / -quantile


def tost(differences: Sequence[float], margin: float) -> float:
    """Return the p-value of equivalence: the larger of two one-sided tests against the margin on either side."""
    return max(_p_above(differences, -margin), _p_above([-value for value in differences], -margin))


def t_test(differences: Sequence[float]) -> float:
    """Return the p-value of a difference from zero, two-sided."""
    return 2 * min(0.5, _p_above(differences, 0.0), _p_above([-value for value in differences], 0.0))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return adjusted p-values in the order given (Holm 1979)."""
    order, count = np.argsort(p_values, kind="stable"), len(p_values)
    adjusted = np.empty(count)
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, np.arange(count, 0, -1) * np.array(p_values)[order]))
    return list(adjusted.tolist())


def extrapolate(
    comparisons: Sequence[Comparison], num_params: float, tokens_per_param: float
) -> tuple[Interval, str] | None:
    """Extrapolate the mean difference, nats per token, far beyond the run model sizes; return it with the line's terms.

    difference = a + b log10 parameters + c log10 tokens per parameter, by least squares over all pairs of seeds, with
    the terms in which sizes differ. The 95 % interval assumes that the line continues. None unless there are more
    finished sizes than terms.
    """
    done = [one for one in comparisons if one.is_finished and not one.num_diverged]
    points = {one.size.name: (one.scale[0], float(f"{one.scale[1]:.2g}")) for one in done}
    columns = [at for at in (0, 1) if len({point[at] for point in points.values()}) > 1]
    if not columns or len(points) < len(columns) + 2:
        return None

    def row(point: tuple[float, float]) -> list[float]:
        return [1.0, *(math.log10(point[at]) for at in columns)]

    design_SF = np.array([row(points[one.size.name]) for one in done for _ in one.differences])
    target_S = np.array([value for one in done for value in one.differences])
    fit_F = np.linalg.lstsq(design_SF, target_S, rcond=None)[0]
    freedom, at_F = len(target_S) - len(fit_F), np.array(row((num_params, tokens_per_param)))
    variance = float(((target_S - design_SF @ fit_F) ** 2).sum()) / freedom
    error = math.sqrt(variance * float(at_F @ np.linalg.inv(design_SF.T @ design_SF) @ at_F))
    mean, half = float(at_F @ fit_F), float(stdtrit(freedom, 0.975)) * error
    terms = " and ".join(("parameters", "tokens per parameter")[at] for at in columns)
    return Interval(mean, mean - half, mean + half), terms


def _compare(
    ladder: LadderFile, made: LadderMade, size: ModelSize, own: Configuration, reference: Configuration,
    seeds: tuple[int, ...],
) -> Comparison:  # fmt: skip
    records = [[ladder_record(ladder, made, size, one, seed) for one in (own, reference)] for seed in seeds]
    pairs = tuple(
        (a, b)
        for a, b in records
        if a is not None and b is not None and (not size.analyses or a.processor == b.processor)
    )
    return Comparison(size=size, configuration=own, reference=reference, seeds=seeds, pairs=pairs)


def _judge_harm(
    ladder: LadderFile, made: LadderMade, size: ModelSize, own: Configuration, reference: Configuration
) -> Comparison:
    """Test at one number of seeds after the other, until one decides."""
    margin = ladder.margin_nats
    for count, level in zip(size.analyses, harm_levels(ladder, size, own), strict=True):
        one = _compare(ladder, made, size, own, reference, size.seeds[:count])
        if not one.is_finished or one.num_diverged:
            return replace(one, finding=Finding.WORSE if one.is_finished else Finding.UNFINISHED)
        finding, below, above = Finding.INCONCLUSIVE, 1.0, 1.0
        if len(one.differences) == count:  # else the reference diverged
            below, above = _p_above([-value for value in one.differences], -margin), _p_above(one.differences, margin)
            finding = Finding.NO_HARM if below <= level else Finding.WORSE if above <= level else finding
        one = replace(one, p_equivalent=below, p_different=above, level=level, finding=finding)
        if finding is not Finding.INCONCLUSIVE:
            break
    return one


def _first_analysis(ladder: LadderFile, made: LadderMade, size: ModelSize) -> list[list[Comparison]]:
    """Return the verdicts of the first interim analysis, a list for each family."""
    pairs = ladder.pairs_at(size)
    return [
        _judge([_compare(ladder, made, size, *pair, size.seeds) for pair in pairs if pair[0].family == name], ladder)
        for name in get_args(Family)
    ]


def _is_open(first: Comparison) -> bool:
    return first.finding is Finding.INCONCLUSIVE and _has_second_analysis(first.configuration, first.size)


def _has_second_analysis(own: Configuration, size: ModelSize) -> bool:
    return bool(size.more_seeds) and own.family == "stack"


def _alpha(ladder: LadderFile, size: ModelSize, family: Sequence[Configuration]) -> float:
    """Return the error rate of one interim analysis of a family."""
    return ladder.alpha / 2 if any(_has_second_analysis(own, size) for own in family) else ladder.alpha


def _judge(family: Sequence[Comparison], ladder: LadderFile) -> list[Comparison]:
    """Test complete configurations only: after the last seed, and with all seeds converged."""
    tested = [one.differences if len(one.differences) == len(one.seeds) else None for one in family]
    equivalent = holm([1.0 if values is None else tost(values, ladder.margin_nats) for values in tested])
    different = holm([1.0 if values is None else t_test(values) for values in tested])
    alpha = _alpha(ladder, family[0].size, [one.configuration for one in family]) if family else 0.0
    return [
        replace(one, p_equivalent=p, p_different=q, finding=_finding(one, p, q, alpha))
        for one, p, q in zip(family, equivalent, different, strict=True)
    ]


def _finding(comparison: Comparison, p_equivalent: float, p_different: float, alpha: float) -> Finding:
    if not comparison.is_finished:
        return Finding.UNFINISHED
    if comparison.num_diverged:
        return Finding.WORSE
    if p_equivalent <= alpha:
        return Finding.EQUIVALENT
    if p_different <= alpha:
        return Finding.WORSE if fmean(comparison.differences) > 0 else Finding.BETTER
    return Finding.INCONCLUSIVE


def _p_above(samples: Sequence[float], bound: float) -> float:
    """Return the p-value of a mean above a bound (Student's t, one-sided)."""
    distance, error = fmean(samples) - bound, stdev(samples) / math.sqrt(len(samples))
    if error == 0:  # configurations that compute the same
        return float(distance <= 0)
    return float(stdtr(len(samples) - 1, -distance / error))
