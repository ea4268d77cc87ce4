"""Compute factors and harm of a study's methods against AdamW by seed, and verdicts on stated figures.

Compute factor: AdamW's cost of the same final loss, interpolated on its horizon curve, over the method's cost.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf
from statistics import fmean, stdev

from scipy.optimize import isotonic_regression

from hybridvalidation.judge.case import Decider, Metric
from hybridvalidation.judge.statistics import Interval, mean_interval
from hybridvalidation.judge.verdict import Verdict, judge_metric
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.scenario import Target
from hybridvalidation.study.order import next_runs
from hybridvalidation.study.protocol import (
    BASELINE,
    JUDGED,
    Made,
    StudyFile,
    StudyMethod,
    StudyRecord,
    check_targets,
    chosen,
    run_key,
    study_record,
)

_TRUE_STEP_COST = 3.0
_STATED_SPEED = 1.6
"""Lower end of target hybrid-speedup, for which hybrid-quality states the loss of quality."""
Curve = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Factor:
    """A compute factor."""

    value: float
    bound: str = ""
    """``>`` or ``<`` if the loss is beyond AdamW's longest or shortest horizon."""

    def __str__(self) -> str:
        """Show it with its bound."""
        return f"{self.bound}{self.value:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodFigures:
    """Figures of one method over its seeds, compared with AdamW of the same seeds."""

    name: str
    lr: float
    records: tuple[StudyRecord, ...]
    baselines: tuple[StudyRecord, ...]
    gains: tuple[float, ...]
    """AdamW's validation loss minus the method's, nats per token."""
    factors: tuple[Factor, ...]

    def mean(self, name: str) -> float:
        """Return the mean of a record's field over seeds."""
        return fmean(getattr(record, name) for record in self.records)

    @property
    def cost(self) -> float:
        """Mean cost, in true steps."""
        return fmean(record.cost / _TRUE_STEP_COST for record in self.records)

    @property
    def cpu_ratios(self) -> list[float]:
        """CPU time of a true step over AdamW's, by seed; the runs were sequential, on a shared machine."""
        own, base = ([r.cpu_seconds / r.run.num_steps for r in rows] for rows in (self.records, self.baselines))
        return [a / b for a, b in zip(own, base, strict=True)]

    @property
    def gain(self) -> Interval:
        """Mean gain with its 95 % confidence interval."""
        return _interval_of(self.gains)

    @property
    def factor(self) -> Interval:
        """Mean compute factor with its 95 % interval, open on the side where factors are beyond the horizons."""
        return self.opened(_interval_of([factor.value for factor in self.factors]), least=0.0)

    def opened(self, interval: Interval, *, least: float) -> Interval:
        """Return an interval without its unmeasured end.

        With a ``>`` counted as its value, mean and lower end are lower bounds and the upper end is unknown; the reverse
        for ``<``.
        """
        low = min(interval.low, least) if "<" in self.bounds else interval.low
        return Interval(interval.mean, low, inf if ">" in self.bounds else interval.high)

    @property
    def bounds(self) -> set[str]:
        """Sides on which factors are beyond the horizons, so that the mean is a bound."""
        return {factor.bound for factor in self.factors if factor.bound}


def horizon_curve(study: StudyFile, made: Made, seed: int) -> Curve:
    """Return (steps, final validation loss) of AdamW, shortest first; under a constant rate from one run's curve."""
    if study.is_constant:
        record = _finished(study, made, BASELINE, seed, max(study.horizons))
        return [] if record is None else [(float(point.step), point.loss) for point in record.curve]
    horizons = {*study.horizons, *(study.tuning_horizons if seed == study.tuning_seed else ())}
    found = [(steps, _finished(study, made, BASELINE, seed, steps)) for steps in sorted(horizons)]
    return [(float(steps), _loss(record)) for steps, record in found if record is not None]


def compute_factor(curve: Sequence[tuple[float, float]], loss: float, steps: float) -> Factor:
    """Return the steps at which the curve reaches ``loss``, over ``steps``.

    Between two horizons the loss is linear in the logarithm of the steps. If noise makes the curve rise, it is first
    made monotonic by isotonic regression.
    """
    steps_of, losses = zip(*curve, strict=True)
    falling = list(zip(steps_of, isotonic_regression(losses, increasing=False).x.tolist(), strict=True))
    if loss > falling[0][1]:
        return Factor(falling[0][0] / steps, "<")
    for (first, high), (second, low) in itertools.pairwise(falling):
        if low <= loss <= high:
            share = 0.0 if high == low else (high - loss) / (high - low)
            return Factor(math.exp(math.log(first) + share * (math.log(second) - math.log(first))) / steps)
    return Factor(falling[-1][0] / steps, ">")


def method_figures(study: StudyFile, made: Made, name: str) -> MethodFigures | None:
    """Return a method's figures over seeds that did not diverge; None without any. See ``lost_seeds``."""
    steps = max(study.horizons) if study.is_constant else study.num_steps
    rows: list[tuple[StudyRecord, StudyRecord, Curve]] = []
    for seed in study.seeds_of(name):
        record = _finished(study, made, name, seed, study.num_steps)
        base, curve = _finished(study, made, BASELINE, seed, steps), horizon_curve(study, made, seed)
        if record is not None and base is not None and len(curve) > 1:
            rows.append((record, base, curve))
    if not rows:
        return None
    records, baselines, _ = zip(*rows, strict=True)
    return MethodFigures(
        name=name, lr=chosen(study, made, name).lr, records=records, baselines=baselines,
        gains=tuple(dict(curve)[study.num_steps] - _loss(record) for record, _, curve in rows),
        factors=tuple(compute_factor(curve, _loss(own), own.cost / _TRUE_STEP_COST) for own, _, curve in rows),
    )  # fmt: skip


def lost_seeds(study: StudyFile, made: Made, name: str) -> list[int]:
    """Return the seeds that figures omit because the method or AdamW diverged; they must be reported."""
    figures = method_figures(study, made, name)
    kept = [] if figures is None else [record.run.seed for record in figures.records]
    return [seed for seed in study.seeds_of(name) if seed not in kept]


def noise_floor(study: StudyFile, made: Made) -> float | None:
    """Return the standard deviation of AdamW's final loss over seeds; None with fewer than two."""
    steps = max(study.horizons) if study.is_constant else study.num_steps
    records = [_finished(study, made, BASELINE, seed, steps) for seed in study.seeds]
    losses = [_loss(record) for record in records if record is not None]
    return stdev(losses) if len(losses) > 1 else None


def lr_curve(study: StudyFile, made: Made, name: str) -> list[tuple[float, float | None]]:
    """Return (learning rate, validation loss at the tuning seed) of all tried rates; None if diverged."""
    method = study.method(name)
    runs = study.first_rates()  # AdamW's rates are tried before its betas
    if method is not None:
        best = chosen(study, made, BASELINE)
        runs = [replace(best, method=name, lr=lr) for lr in method.lrs]
    found = [(run.lr, made.get(run_key(study, run))) for run in sorted(runs, key=lambda run: run.lr)]
    return [(lr, record.validation_loss) for lr, record in found if record is not None]


def judge_study(study: StudyFile, made: Made, targets: Mapping[str, Target]) -> list[Verdict]:
    """Return one verdict per target of the study; unproven until all runs are made."""
    check_targets(study, targets)
    return [judge_metric(targets[name], JUDGED, _metric(study, made, targets[name])) for name in study.targets]


def _finished(study: StudyFile, made: Made, method: str, seed: int, num_steps: int) -> StudyRecord | None:
    record = study_record(study, made, method, seed, num_steps)
    return None if record is None or record.validation_loss is None else record


def _loss(record: StudyRecord) -> float:
    assert record.validation_loss is not None, "a study with missing runs"
    return record.validation_loss


def _interval_of(samples: Sequence[float]) -> Interval:
    """Return mean and 95 % interval; unbounded with one sample."""
    return Interval(samples[0], -inf, inf) if len(samples) < 2 else mean_interval(samples)


def _metric(study: StudyFile, made: Made, target: Target) -> Metric | None:
    figures = None if next_runs(study, made) else method_figures(study, made, JUDGED)
    if figures is None:
        return None
    compute = _speedup if target.metric == "time_to_loss_speedup_pct" else _quality_loss
    metric = compute(study, made, figures)
    if metric.decider is not None and target.value is not None and metric.decider.value <= target.value:
        metric = _opened_upwards(metric)  # it loses at least so much
    if not (lost := lost_seeds(study, made, JUDGED)):
        return metric
    remark = f"a run diverged with seed {', '.join(map(str, lost))}, which means omit; {metric.remark}"
    return replace(metric, interval=Interval(metric.value, -inf, inf), remark=remark)


def _speedup(study: StudyFile, _made: Made, figures: MethodFigures) -> Metric:
    """Return the speed-up to AdamW's final loss: AdamW's steps to there, in its time of a step.

    Probes are in the time of a step, so they must not count in the cost as well. Seed by seed, so that the interval
    holds the noise of the times: the runs were sequential, on a machine with other work. Ratios that are
    below one on average are noise, and are raised to one.
    """
    ratios = figures.cpu_ratios
    steps_to_time = figures.cost / study.num_steps * min(1.0, fmean(ratios))
    samples = [100 * (f.value * steps_to_time / ratio - 1) for f, ratio in zip(figures.factors, ratios, strict=True)]
    told = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    remark = (
        f"{study.model.num_params / 1e6:.2f}M parameters, {len(ratios)} seeds, against AdamW with tuned "
        f"learning rate and betas; {figures.mean('predicted_steps'):,.0f} predicted beside {study.num_steps:,} true "
        f"steps; the compute factor without probes, over the processor time of a step in AdamW's, by seed {told}"
    )
    metric = _executed(samples, remark)
    if not figures.bounds:
        return metric
    remark += f"; with {sum(bool(factor.bound) for factor in figures.factors)} seeds beyond AdamW's horizons"
    return replace(metric, interval=figures.opened(_interval_of(samples), least=-100.0), remark=remark)


def _quality_loss(study: StudyFile, made: Made, figures: MethodFigures) -> Metric:
    """Return the excess of validation perplexity over AdamW's after equal true steps; negative: below.

    That skips no true step, and the stated loss is the price of skipping them: at the stated speed decides.
    """
    samples = [100 * (exp(-gain) - 1) for gain in figures.gains]
    metric = _executed(samples, f"validation perplexity over AdamW's after {study.num_steps:,} true steps each")
    worth = figures.factor.mean * study.num_steps / _STATED_SPEED
    if worth >= study.num_steps:
        return metric
    decider = _loss_at_stated_speed(study, made, figures, worth)
    return _opened_upwards(metric) if decider is None else replace(metric, decider=decider)


def _opened_upwards(metric: Metric) -> Metric:
    """Return a loss open upwards: at the stated speed nothing was run."""
    low = metric.value if metric.interval is None else metric.interval.low
    remark = f"{metric.remark}; no run measures the loss at {_STATED_SPEED:g} times the speed"
    return replace(metric, interval=Interval(metric.value, low, inf), decider=None, remark=remark)


def _loss_at_stated_speed(study: StudyFile, made: Made, figures: MethodFigures, worth: float) -> Decider | None:
    """Return AdamW's loss at the longest length that a method cut to the stated speed would reach.

    If the compute factor stays what it is, true steps cut by the speed take the method as far as AdamW gets in the
    factor times as many, ``worth``. None without a horizon of AdamW from there to the study's length.
    """
    curves = [dict(horizon_curve(study, made, record.run.seed)) for record in figures.records]
    common = set(curves[0]).intersection(*curves)
    within = [steps for steps in common if worth <= steps < study.num_steps]
    if figures.bounds or not within:
        return None
    loss = fmean(100 * (exp(curve[min(within)] - curve[study.num_steps]) - 1) for curve in curves)
    return Decider(
        loss, Evidence.EXECUTED, "is at equal true steps",
        f"at {_STATED_SPEED:g} times the speed, worth {worth:,.0f} of AdamW's steps if the compute factor stays, "
        f"more than AdamW loses with {min(within):,.0f}", is_saving=False,
    )  # fmt: skip


def _executed(samples: list[float], remark: str) -> Metric:
    interval = _interval_of(samples)
    return Metric(interval.mean, Evidence.EXECUTED, "%", interval=interval, remark=remark)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingEffect:
    """Effect of one setting over its seeds, compared with plain AdamW under the same circumstances."""

    method: StudyMethod
    pairs: tuple[tuple[StudyRecord, StudyRecord], ...]

    @property
    def percents(self) -> list[float]:
        """Loss above AdamW's in percent, by seed, if neither diverged."""
        losses = [(own.validation_loss, base.validation_loss) for own, base in self.pairs]
        return [100 * (own / base - 1) for own, base in losses if own is not None and base is not None]

    def keeps(self, largest_pct: float) -> bool:
        """Return whether the mean harm is within the bound, and no run stopped unless AdamW's did."""
        stops = any(own.validation_loss is None and base.validation_loss is not None for own, base in self.pairs)
        return not stops and (not self.percents or fmean(self.percents) <= largest_pct)


def harms(study: StudyFile, made: Made) -> list[SettingEffect]:
    """Return every judged setting with finished runs; controls are the references."""
    found = []
    for method in study.methods:
        seeds, names = study.seeds_of(method.name), (method.name, method.against)
        records = [[study_record(study, made, name, seed, study.num_steps) for name in names] for seed in seeds]
        pairs = tuple((own, base) for own, base in records if own is not None and base is not None)
        if method.role != "control" and len(pairs) == len(seeds):
            found.append(SettingEffect(method=method, pairs=pairs))
    return found
