"""What the records of a study say, seed by seed, and how stated figures are judged by that.

Compute factors come by interpolation on AdamW's horizon curve.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf
from statistics import fmean, stdev

from scipy.optimize import isotonic_regression

from hybridtrain.errors import ConfigError, unknown_name
from hybridvalidation.judge.case import Decider, Metric
from hybridvalidation.judge.statistics import Interval, mean_interval
from hybridvalidation.judge.verdict import Verdict, judge_metric
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.scenario import Target
from hybridvalidation.study.protocol import (
    BASELINE,
    JUDGED,
    Betas,
    Made,
    StudyFile,
    StudyRecord,
    StudyRun,
    chosen,
    next_runs,
    run_key,
)

_TRUE_STEP_COST = 3.0
_STATED_SPEED = 1.6
"""The lower end of what target hybrid-speedup states, beside the loss of quality at that speed (hybrid-quality)."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A compute factor: cost at which AdamW ends at the same loss, over the method's own cost."""

    value: float
    bound: str = ""
    """``>`` or ``<`` where the loss lies beyond AdamW's longest or shortest horizon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodFigures:
    """One method over its seeds, beside AdamW of the same seeds."""

    name: str
    lr: float
    seeds: tuple[int, ...]
    losses: tuple[float, ...]
    test_losses: tuple[float, ...]
    gains: tuple[float, ...]
    """AdamW's validation loss minus the method's, nats per token."""
    factors: tuple[Factor, ...]
    cost: float
    """Mean, in true steps."""
    cpu_ratios: tuple[float, ...]
    """Processor time of a true step over AdamW's of the same seed: two runs, one after the other, beside other work."""
    jumps: float
    predicted_steps: float
    rollbacks: int
    planned_device_bytes: int
    planned_host_bytes: int

    @property
    def cpu_ratio(self) -> float:
        """Mean over seeds."""
        return fmean(self.cpu_ratios)

    @property
    def gain(self) -> Interval:
        """Mean gain with its 95 % interval."""
        return interval_of(self.gains)

    @property
    def factor(self) -> Interval:
        """Mean compute factor with its 95 % interval, open towards where a factor was beyond the horizons."""
        return self.opened(interval_of([factor.value for factor in self.factors]), least=0.0)

    def opened(self, interval: Interval, *, least: float) -> Interval:
        """Return an interval without the ends that nobody measured.

        Counting a ``>`` as its value makes mean and lower end too low at most: both still bound the truth from below,
        the upper end says nothing. The other way round for a ``<``.
        """
        low, high = interval.low, interval.high
        if "<" in self.bounds:
            low = min(low, least)
        return Interval(interval.mean, low, math.inf if ">" in self.bounds else high)

    @property
    def bounds(self) -> frozenset[str]:
        """On which sides factors lie beyond the horizons, so that the mean is a bound."""
        return frozenset(factor.bound for factor in self.factors if factor.bound)


def record_of(study: StudyFile, made: Made, method: str, seed: int, num_steps: int) -> StudyRecord | None:
    """Return the finished run of a method at its chosen learning rate."""
    lr, pair = chosen(study, made, method)
    run = StudyRun(
        method=method, lr=lr, beta1=pair.beta1, beta2=pair.beta2, seed=seed, num_steps=num_steps
    )  # fmt: skip
    record = made.get(run_key(study, run))
    return None if record is None or record.validation_loss is None else record


def horizon_curve(study: StudyFile, made: Made, seed: int) -> list[tuple[float, float]]:
    """Return (steps, final validation loss) of AdamW, shortest first; of one run's way under a constant rate."""
    if study.is_constant:
        record = record_of(study, made, BASELINE, seed, max(study.horizons))
        return [] if record is None else [(float(point.step), point.loss) for point in record.curve]
    horizons = {*study.horizons, *(study.tuning_horizons if seed == study.tuning_seed else ())}
    found = [(steps, record_of(study, made, BASELINE, seed, steps)) for steps in sorted(horizons)]
    return [(float(steps), _loss(record)) for steps, record in found if record is not None]


def compute_factor(curve: Sequence[tuple[float, float]], loss: float, steps: float) -> Factor:
    """Return the steps at which the curve passes ``loss`` over ``steps``.

    Between two horizons the loss is linear in the logarithm of the steps. Where noise lets a longer horizon end higher,
    the curve is levelled first: neighbours are averaged until it falls (isotonic regression).
    """
    falling = _levelled(curve)
    if loss > falling[0][1]:
        return Factor(falling[0][0] / steps, "<")
    for (first, high), (second, low) in itertools.pairwise(falling):
        if low <= loss <= high:
            share = 0.0 if high == low else (high - loss) / (high - low)
            at = math.exp(math.log(first) + share * (math.log(second) - math.log(first)))
            return Factor(at / steps)
    return Factor(falling[-1][0] / steps, ">")


def method_figures(study: StudyFile, made: Made, name: str) -> MethodFigures | None:
    """Return a method's figures over the seeds that ended with a loss; None without one. See ``lost_seeds``."""
    rows: list[tuple[int, StudyRecord, StudyRecord]] = []
    for seed in study.seeds_of(name):
        record = record_of(study, made, name, seed, study.num_steps)
        base = _baseline(study, made, seed)
        if record is not None and base is not None and len(horizon_curve(study, made, seed)) > 1:
            rows.append((seed, record, base))
    if not rows:
        return None
    lr, _ = chosen(study, made, name)
    return MethodFigures(
        name=name, lr=lr, seeds=tuple(seed for seed, _, _ in rows),
        losses=tuple(_loss(record) for _, record, _ in rows),
        test_losses=tuple(math.nan if record.test_loss is None else record.test_loss for _, record, _ in rows),
        gains=tuple(_loss_at(study, made, seed) - _loss(record) for seed, record, _ in rows),
        factors=tuple(
            compute_factor(horizon_curve(study, made, seed), _loss(record), record.cost / _TRUE_STEP_COST)
            for seed, record, _ in rows
        ),
        cost=fmean(record.cost / _TRUE_STEP_COST for _, record, _ in rows),
        cpu_ratios=tuple(_cpu_s(record) / _cpu_s(base) for _, record, base in rows),
        jumps=fmean(record.jumps for _, record, _ in rows),
        predicted_steps=fmean(record.predicted_steps for _, record, _ in rows),
        rollbacks=sum(record.rollbacks for _, record, _ in rows),
        planned_device_bytes=rows[0][1].planned_device_bytes, planned_host_bytes=rows[0][1].planned_host_bytes,
    )  # fmt: skip


def lost_seeds(study: StudyFile, made: Made, name: str) -> tuple[int, ...]:
    """Return the seeds that figures leave out because a run diverged, the method's or AdamW's; none may be hidden."""
    figures = method_figures(study, made, name)
    kept = () if figures is None else figures.seeds
    return tuple(seed for seed in study.seeds_of(name) if seed not in kept)


def noise_floor(study: StudyFile, made: Made) -> float | None:
    """Return the standard deviation of AdamW's final loss over seeds; None without two of them."""
    records = [_baseline(study, made, seed) for seed in study.seeds]
    losses = [_loss(record) for record in records if record is not None]
    return stdev(losses) if len(losses) > 1 else None


def lr_curve(study: StudyFile, made: Made, name: str) -> list[tuple[float, float | None]]:
    """Return (learning rate, validation loss at the tuning seed) of every rate tried; None where it diverged."""
    method = study.method(name)
    lrs = study.lrs if method is None else method.lrs
    pair = Betas(beta1=study.optimizer.beta1, beta2=study.optimizer.beta2)  # AdamW's rates are tried before its betas
    if method is not None:
        _, pair = chosen(study, made, BASELINE)
    curve: list[tuple[float, float | None]] = []
    for lr in sorted(lrs):
        run = StudyRun(
            method=name, lr=lr, beta1=pair.beta1, beta2=pair.beta2, seed=study.tuning_seed, num_steps=study.num_steps
        )
        record = made.get(run_key(study, run))
        if record is not None:
            curve.append((lr, record.validation_loss))
    return curve


def _baseline(study: StudyFile, made: Made, seed: int) -> StudyRecord | None:
    steps = max(study.horizons) if study.is_constant else study.num_steps
    return record_of(study, made, BASELINE, seed, steps)


def _loss_at(study: StudyFile, made: Made, seed: int) -> float:
    """Return AdamW's loss at the study's length."""
    curve = horizon_curve(study, made, seed)
    return next(loss for steps, loss in curve if steps == study.num_steps)


def _loss(record: StudyRecord) -> float:
    assert record.validation_loss is not None, "only finished runs are asked"
    return record.validation_loss


def _cpu_s(record: StudyRecord) -> float:
    """Return the processor seconds of a true step."""
    return record.cpu_seconds / record.run.num_steps


def _levelled(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the curve with non-increasing losses."""
    steps, losses = zip(*curve, strict=True)
    return list(zip(steps, isotonic_regression(losses, increasing=False).x.tolist(), strict=True))


def interval_of(samples: Sequence[float]) -> Interval:
    """Return mean and 95 % interval; unbounded with one sample."""
    if len(samples) < 2:
        return Interval(samples[0], -math.inf, math.inf)
    return mean_interval(samples)


def check_targets(study: StudyFile, targets: Mapping[str, Target]) -> None:
    """Refuse a study with a target that is unknown, or that no study can judge.

    Raises:
        ConfigError: every fault at once.
    """
    faults = []
    for name in study.targets:
        if name not in targets:
            faults.append(f"$.targets: {unknown_name('target', name, targets)}")
        elif targets[name].metric not in METRICS:
            known = ", ".join(sorted(METRICS))
            faults.append(f"$.targets: '{name}' is about {targets[name].metric}; a study judges {known}")
    if faults:
        raise ConfigError(study.name, faults)


def judge_study(study: StudyFile, made: Made, targets: Mapping[str, Target]) -> list[Verdict]:
    """Return one verdict per target of the study; unproven until every run was made."""
    check_targets(study, targets)
    return [judge_metric(targets[name], JUDGED, _metric(study, made, targets[name])) for name in study.targets]


def _metric(study: StudyFile, made: Made, target: Target) -> Metric | None:
    figures = None if next_runs(study, made) else method_figures(study, made, JUDGED)
    compute = METRICS.get(target.metric)
    if figures is None or compute is None:
        return None
    metric = compute(study, made, figures)
    if metric.decider is not None and target.value is not None and metric.decider.value <= target.value:
        metric = _opened_upwards(metric)  # it loses at least so much
    lost = lost_seeds(study, made, JUDGED)
    if not lost:
        return metric
    remark = f"a run diverged with seed {', '.join(map(str, lost))}, which no mean holds; {metric.remark}"
    return replace(metric, interval=Interval(metric.value, -inf, inf), remark=remark)


def _speedup(study: StudyFile, _made: Made, figures: MethodFigures) -> Metric:
    """Return by how much sooner the method is where AdamW ends as well: AdamW's steps to there, in its time of a step.

    Probes are in the time of a step, so they must not count in the cost as well. Seed by seed, so that the interval
    holds the noise of the times: the runs were made one after the other on a machine with other work. Ratios that are
    below one on average are noise, and are raised to one.
    """
    steps_to_time = figures.cost / study.num_steps * min(1.0, figures.cpu_ratio)
    samples = [
        100 * (factor.value * steps_to_time / ratio - 1)
        for factor, ratio in zip(figures.factors, figures.cpu_ratios, strict=True)
    ]
    told = ", ".join(f"{ratio:.2f}" for ratio in figures.cpu_ratios)
    remark = (
        f"{study.model.num_params / 1e6:.2f}M parameters, {len(figures.seeds)} seeds, against AdamW with tuned "
        f"learning rate and betas; {figures.predicted_steps:,.0f} predicted beside {study.num_steps:,} true steps; "
        f"the compute factor, probes taken out, over the processor time of a step in AdamW's, by seed {told}"
    )
    metric = _of(samples, "%", remark)
    if not figures.bounds:
        return metric
    remark += f"; with {sum(bool(factor.bound) for factor in figures.factors)} seeds beyond AdamW's horizons"
    return replace(metric, interval=figures.opened(interval_of(samples), least=-100.0), remark=remark)


def _quality_loss(study: StudyFile, made: Made, figures: MethodFigures) -> Metric:
    """Return by how much validation perplexity is above AdamW's after as many true steps; negative: below.

    That skips no true step, and the stated loss is the price of skipping them: at the stated speed decides.
    """
    samples = [100 * (exp(-gain) - 1) for gain in figures.gains]
    metric = _of(samples, "%", f"validation perplexity over AdamW's after {study.num_steps:,} true steps each")
    worth = figures.factor.mean * study.num_steps / _STATED_SPEED
    if worth >= study.num_steps:
        return metric
    decider = _loss_at_stated_speed(study, made, figures, worth)
    return _opened_upwards(metric) if decider is None else replace(metric, decider=decider)


def _opened_upwards(metric: Metric) -> Metric:
    """Return a loss that may be any larger one: at the stated speed nothing was run."""
    low = metric.value if metric.interval is None else metric.interval.low
    remark = f"{metric.remark}; no run tells the loss at {_STATED_SPEED:g} times the speed"
    return replace(metric, interval=Interval(metric.value, low, inf), decider=None, remark=remark)


def _loss_at_stated_speed(study: StudyFile, made: Made, figures: MethodFigures, worth: float) -> Decider | None:
    """Return what AdamW loses at the length that a method cut to the stated speed would reach at most.

    If the compute factor stays what it is, true steps cut by the speed take the method as far as AdamW gets in the
    factor times as many, ``worth``. None without a horizon of AdamW from there to the study's length.
    """
    losses: dict[float, list[float]] = {}
    for seed in figures.seeds:
        for steps, loss in horizon_curve(study, made, seed):
            losses.setdefault(steps, []).append(100 * (exp(loss - _loss_at(study, made, seed)) - 1))
    known = [steps for steps, found in losses.items() if len(found) == len(figures.seeds)]
    within = [steps for steps in known if worth <= steps < study.num_steps]
    if figures.bounds or not within:
        return None
    return Decider(
        fmean(losses[min(within)]), Evidence.EXECUTED, "is at equal true steps, none of them skipped",
        f"at {_STATED_SPEED:g} times the speed, worth {worth:,.0f} of AdamW's steps if the compute factor stays, "
        f"more than AdamW loses with {min(within):,.0f}", is_saving=False,
    )  # fmt: skip


def _of(samples: list[float], unit: str, remark: str) -> Metric:
    interval: Interval = interval_of(samples)
    return Metric(interval.mean, Evidence.EXECUTED, unit, interval=interval, remark=remark)


METRICS: dict[str, Callable[[StudyFile, Made, MethodFigures], Metric]] = {
    "time_to_loss_speedup_pct": _speedup,
    "accuracy_loss_pct": _quality_loss,
}
