"""Paired differences of validation loss, and what they say: equivalent, worse, better, inconclusive.

Equivalence is two one-sided t tests (TOST, Schuirmann 1987) against a margin that was registered; a difference is a
two-sided one. Either is corrected over the arms of a family on a rung (Holm 1979), also those that are not finished.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, stdev
from typing import get_args

import numpy as np
from scipy.special import stdtr, stdtrit

from hybridvalidation.judge.statistics import Interval, mean_interval
from hybridvalidation.study.ladder.protocol import Arm, Family, LadderFile, LadderRecord, Made, Rung, record_of


class Finding(StrEnum):
    """What the seeds of an arm say."""

    EQUIVALENT = "equivalent"
    WORSE = "worse"
    BETTER = "better"
    INCONCLUSIVE = "inconclusive"
    UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """An arm on one rung, beside what it is compared with, seed by seed."""

    rung: Rung
    arm: Arm
    other: Arm
    seeds: tuple[int, ...]
    """Registered for this look."""
    pairs: tuple[tuple[LadderRecord, LadderRecord], ...]
    """Both made, of the same seed: the same first weights, the same batches. Either may have diverged."""

    @property
    def differences(self) -> tuple[float, ...]:
        """Validation loss above the other's, nats per token, where both ended."""
        return tuple(
            own.validation_loss - other.validation_loss
            for own, other in self.pairs
            if own.validation_loss is not None and other.validation_loss is not None
        )

    @property
    def num_diverged(self) -> int:
        """Seeds at which the arm diverged and the other did not."""
        return sum(own.validation_loss is None and other.validation_loss is not None for own, other in self.pairs)

    @property
    def diverged_text(self) -> str:
        """The same as the end of a sentence, empty for none."""
        return f", {self.num_diverged} diverged" if self.num_diverged else ""

    @property
    def size(self) -> tuple[int, float]:
        """Parameters, and tokens a parameter from the start; what is fine-tuned was trained on so many before."""
        return self.rung.model.num_params, self.rung.tokens_per_param

    @property
    def is_finished(self) -> bool:
        """Whether every seed was run."""
        return len(self.pairs) == len(self.seeds)

    @property
    def interval(self) -> Interval | None:
        """Mean difference with its 95 % interval, without correction; None with fewer than two seeds."""
        return mean_interval(self.differences) if len(self.differences) > 1 else None

    @property
    def retention(self) -> Interval | None:
        """Top-1 accuracy over the other's in percent, as ``interval``."""
        return self.retention_at(0.95)

    def retention_at(self, level: float) -> Interval | None:
        """Return the same with an interval of another level."""
        ratios = [
            100 * own.validation_accuracy / other.validation_accuracy
            for own, other in self.pairs
            if own.validation_accuracy is not None and other.validation_accuracy
        ]
        return mean_interval(ratios, level) if len(ratios) > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A comparison with its verdict; odds are corrected, 1 where it is not finished."""

    comparison: Comparison
    p_equivalent: float
    p_different: float
    finding: Finding


def compare(ladder: LadderFile, made: Made, rung: Rung, arm: Arm, other: Arm, seeds: tuple[int, ...]) -> Comparison:
    """Return an arm beside another one at all seeds that both were run with."""
    pairs = []
    for seed in seeds:
        own, base = (record_of(ladder, made, rung, each, seed) for each in (arm, other))
        if own is not None and base is not None:
            pairs.append((own, base))
    return Comparison(rung=rung, arm=arm, other=other, seeds=seeds, pairs=tuple(pairs))


def last_look(ladder: LadderFile, made: Made, rung: Rung, arm: Arm, other: Arm) -> Comparison:
    """Return the comparison at all seeds of both looks if they were run, else at those of the first."""
    second = compare(ladder, made, rung, arm, other, (*rung.seeds, *rung.more_seeds))
    return second if second.is_finished else compare(ladder, made, rung, arm, other, rung.seeds)


def judge_rung(ladder: LadderFile, made: Made, rung: Rung) -> list[Judged]:
    """Return a verdict for every arm that is compared with another: of the first look that decides, else of the last.

    Each of two looks has half of the odds, and corrects them over the whole family: all verdicts together keep them.
    """
    judged: list[Judged] = []
    for first in _first_look(ladder, made, rung):
        again = [
            last_look(ladder, made, rung, one.comparison.arm, one.comparison.other) if _is_open(one) else one.comparison
            for one in first
        ]
        second = _judge(again, ladder, rung)
        judged += [other if _is_open(one) else one for one, other in zip(first, second, strict=True)]
    return judged


def undecided(ladder: LadderFile, made: Made, rung: Rung) -> list[tuple[Arm, Arm]]:
    """Return the arms that the first look leaves inconclusive, with what they are compared with."""
    first = [one for family in _first_look(ladder, made, rung) for one in family]
    return [(one.comparison.arm, one.comparison.other) for one in first if _is_open(one)]


def _is_open(first: Judged) -> bool:
    """Return whether a second look is asked for."""
    return first.finding is Finding.INCONCLUSIVE and _has_second_look(first.comparison.arm, first.comparison.rung)


def level_of(ladder: LadderFile, rung: Rung, arm: Arm) -> float:
    """Return the level of an interval that decides by itself: half of the odds for an arm that has a second look."""
    return 1 - _odds(ladder, rung, [arm])


def _odds(ladder: LadderFile, rung: Rung, arms: Sequence[Arm]) -> float:
    """Return the odds of a wrong verdict that one look at some arms may have."""
    return ladder.alpha / 2 if any(_has_second_look(arm, rung) for arm in arms) else ladder.alpha


def _has_second_look(arm: Arm, rung: Rung) -> bool:
    return bool(rung.more_seeds) and arm.family == "stack"


def _first_look(ladder: LadderFile, made: Made, rung: Rung) -> list[list[Judged]]:
    """Return the verdicts at the first seeds, a list for each family."""
    pairs = [(arm, other) for arm in ladder.arms_of(rung) if (other := ladder.other_of(arm)) is not None]
    return [
        _judge(
            [compare(ladder, made, rung, arm, other, rung.seeds) for arm, other in pairs if arm.family == name],
            ladder, rung,
        )
        for name in get_args(Family)
    ]  # fmt: skip


def _judge(family: Sequence[Comparison], ladder: LadderFile, rung: Rung) -> list[Judged]:
    alpha = _odds(ladder, rung, [one.arm for one in family])
    equivalent = holm([tost(one.differences, ladder.margin_nats) if _counts(one) else 1.0 for one in family])
    different = holm([t_test(one.differences) if _counts(one) else 1.0 for one in family])
    return [
        Judged(comparison=one, p_equivalent=p, p_different=q, finding=_finding(one, p, q, alpha))
        for one, p, q in zip(family, equivalent, different, strict=True)
    ]


def largest_deviation(ladder: LadderFile, rung: Rung, num_seeds: int) -> float:
    """Return above which deviation of paired differences, in nats, no arm of family stack is told equivalent.

    At a mean of zero, for the first arm by Holm's order; each that passes lets the next spread a little more.
    """
    arms = [arm for arm in ladder.arms_of(rung) if arm.family == "stack" and ladder.other_of(arm) is not None]
    alpha = _odds(ladder, rung, arms)
    if not arms:
        return 0.0
    return ladder.margin_nats * math.sqrt(num_seeds) / -float(stdtrit(num_seeds - 1, alpha / len(arms)))


def _counts(comparison: Comparison) -> bool:
    """Return whether a comparison may be tested: not before its last seed, nor without those that diverged."""
    return comparison.is_finished and len(comparison.differences) == len(comparison.seeds)


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


def tost(differences: Sequence[float], margin: float) -> float:
    """Return the odds of means so near to zero if the true one lay at the margin or beyond it."""
    return max(_above(differences, -margin), _above([-value for value in differences], -margin))


def t_test(differences: Sequence[float]) -> float:
    """Return the odds of means so far from zero if the true one were zero."""
    return 2 * min(0.5, _above(differences, 0.0), _above([-value for value in differences], 0.0))


def _above(samples: Sequence[float], bound: float) -> float:
    """Return the odds of a mean so far above a bound if the true one were at it (Student's t, one-sided)."""
    distance, error = fmean(samples) - bound, stdev(samples) / math.sqrt(len(samples))
    if error == 0:  # arms that compute the same
        return float(distance <= 0)
    return float(stdtr(len(samples) - 1, -distance / error))


def holm(odds: Sequence[float]) -> list[float]:
    """Return corrected odds, in the order given: all of them hold together with the odds asked for (Holm 1979)."""
    corrected = [0.0] * len(odds)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(odds)), key=odds.__getitem__)):
        largest = max(largest, min(1.0, (len(odds) - rank) * odds[index]))
        corrected[index] = largest
    return corrected


@dataclass(frozen=True, slots=True, kw_only=True)
class Extrapolation:
    """Where a line through all rungs' differences lies far outside of them. No measurement."""

    num_params: float
    tokens_per_param: float
    interval: Interval
    """Of the mean difference, nats per token, if the line goes on; 95 %."""
    terms: tuple[str, ...]
    """What the line depends on, as far as rungs differ in it."""


def extrapolate(comparisons: Sequence[Comparison], num_params: float, tokens_per_param: float) -> Extrapolation | None:
    """Fit difference = a + b log10 parameters + c log10 tokens a parameter by least squares over all pairs of seeds.

    None where finished rungs are fewer than a term each and one more: a line through all points has no interval.
    """
    done = [one for one in comparisons if one.is_finished and not one.num_diverged]
    sizes = {one.rung.name: (one.rung.model.num_params, float(f"{one.rung.tokens_per_param:.2g}")) for one in done}
    columns = [at for at in (0, 1) if len({size[at] for size in sizes.values()}) > 1]
    if not columns or len(sizes) < len(columns) + 2:
        return None

    def row(size: Mapping[int, float]) -> list[float]:
        return [1.0, *(math.log10(size[at]) for at in columns)]

    pairs = [(dict(enumerate(sizes[one.rung.name])), value) for one in done for value in one.differences]
    design_SF, target_S = np.array([row(size) for size, _ in pairs]), np.array([value for _, value in pairs])
    fit_F, _, _, _ = np.linalg.lstsq(design_SF, target_S, rcond=None)
    freedom = len(target_S) - len(fit_F)
    variance = float(((target_S - design_SF @ fit_F) ** 2).sum()) / freedom
    at_F = np.array(row({0: num_params, 1: tokens_per_param}))
    error = math.sqrt(variance * float(at_F @ np.linalg.inv(design_SF.T @ design_SF) @ at_F))
    mean, half = float(at_F @ fit_F), float(stdtrit(freedom, 0.975)) * error
    return Extrapolation(
        num_params=num_params, tokens_per_param=tokens_per_param, interval=Interval(mean, mean - half, mean + half),
        terms=tuple(("parameters", "tokens a parameter")[at] for at in columns),
    )  # fmt: skip
