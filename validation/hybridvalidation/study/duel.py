"""A direct comparison of two methods at equal time: difference of final losses over paired seeds, and its verdict.

The difference is tested two-sided against zero (Student's t over pairs). The claim that the first is better is met,
refuted if the second is better, else open.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from scipy.special import ndtri

from hybridtrain.reports.tables import table
from hybridvalidation.judge.statistics import Interval, mean_interval
from hybridvalidation.study.order import next_runs
from hybridvalidation.study.protocol import Duel, Side, StudyFile, StudyRecord, run_key

_POWER, _ERROR = 0.8, 0.05
_NAMES = {"ademamix": "AdEMAMix"}
_HEADERS = ("method", "learning rate", "steps", "seeds", "loss", "test", "processor time", "predicted steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class DuelFigures:
    """Pairs of finished runs, and how far the first side ends below the second."""

    pairs: tuple[tuple[StudyRecord, StudyRecord], ...]
    diverged: int
    """Pairs of which a run diverged."""

    @property
    def differences(self) -> list[float]:
        """First side's validation loss minus the second's, nats per token."""
        return [_loss(first) - _loss(second) for first, second in self.pairs]

    @property
    def interval(self) -> Interval | None:
        """Mean difference with its 95 % interval; None with fewer than two pairs."""
        return mean_interval(self.differences) if len(self.pairs) > 1 else None

    @property
    def time_ratio(self) -> float:
        """Median over pairs of the first side's processor time over the second's."""
        return median(first.cpu_seconds / second.cpu_seconds for first, second in self.pairs)

    @property
    def deciding_seeds(self) -> int:
        """Pairs that would tell the present mean from zero in four of five studies; 0: a mean of zero."""
        z = float(ndtri(1 - _ERROR / 2) + ndtri(_POWER))
        mean = fmean(self.differences)
        return math.ceil((z * stdev(self.differences) / mean) ** 2) if mean else 0


def duel_figures(study: StudyFile, duel: Duel, made: Mapping[str, Any]) -> DuelFigures:
    """Return what the runs made so far show."""
    found = [
        [made.get(run_key(study, study.duel_run(side, seed))) for side in (duel.first, duel.second)]
        for seed in study.seeds
    ]
    both = [(first, second) for first, second in found if first is not None and second is not None]
    ended = [pair for pair in both if all(record.validation_loss is not None for record in pair)]
    return DuelFigures(pairs=tuple(ended), diverged=len(both) - len(ended))


def duel_sentence(study: StudyFile, duel: Duel, made: Mapping[str, Any]) -> str:
    """Return the verdict on the claim that the first side beats the second."""
    figures = duel_figures(study, duel, made)
    found, first, second = figures.interval, duel.first.method, duel.second.method
    if found is None:
        return f"Not finished: the registered claim ({study.target}) is unproven."
    told = (
        f"{first} ends {found.mean:+.4f} nats from {second} [{found.low:+.4f}, {found.high:+.4f}] over "
        f"{len(figures.pairs)} seeds, in {figures.time_ratio:.2f} of its processor time"
    )
    if next_runs(study, made):
        return f"Not finished: {told}. No verdict before the last seed."
    if figures.diverged:
        return f"{told}; {figures.diverged} pairs diverged: the registered claim ({study.target}) is not met."
    if found.high < 0:
        return f"{told}: it is better; the registered claim is met."
    if found.low > 0:
        return f"{told}: it is worse; the registered claim is refuted."
    decides = f" At this mean and deviation {figures.deciding_seeds:,} seeds would decide." if found.mean else ""
    return f"{told}: no difference is shown; the registered claim is not met.{decides}"


def duel_words(study: StudyFile, duel: Duel, made: Mapping[str, Any]) -> str:
    """Return the difference and what it shows, for a page that names the study."""
    figures = duel_figures(study, duel, made)
    against = _NAMES.get(duel.second.method, duel.second.method)
    if next_runs(study, made):
        return f"not yet compared with {against} at equal time"
    if figures.diverged or figures.interval is None:
        return f"not better than {against} at equal time: {figures.diverged} pairs diverged"
    low, high = figures.interval.low, figures.interval.high
    found = "not significantly different from" if low <= 0 <= high else "better than" if high < 0 else "worse than"
    seeds = f"{len(figures.pairs)} seeds"
    return f"{found} {against} at equal time: {figures.interval.mean:+.4f} nats [{low:+.4f}, {high:+.4f}], {seeds}"


def duel_table(study: StudyFile, duel: Duel, made: Mapping[str, Any], style: str) -> str:
    """Return a row for each side."""
    figures = duel_figures(study, duel, made)
    sides = zip((duel.first, duel.second), zip(*figures.pairs, strict=True), strict=False)
    rows = [_row(side, records) for side, records in sides]
    return table(_HEADERS, rows, style) if rows else ""


def _row(side: Side, records: tuple[StudyRecord, ...]) -> list[str]:
    tests = [record.test_loss for record in records if record.test_loss is not None]
    return [
        side.method, f"{side.lr:g}", f"{side.num_steps:,}", str(len(records)), f"{fmean(map(_loss, records)):.4f}",
        f"{fmean(tests):.4f}" if tests else "-", f"{fmean(record.cpu_seconds for record in records):.0f} s",
        f"{fmean(record.predicted_steps for record in records):,.0f}",
    ]  # fmt: skip


def _loss(record: StudyRecord) -> float:
    assert record.validation_loss is not None, "a run that diverged"
    return record.validation_loss
