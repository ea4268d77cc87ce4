"""Stated figures that a study judges: what predicted steps gain in time, and what they cost in quality."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import exp, inf

from hybridtrain.errors import ConfigError, unknown_name
from hybridvalidation.judge.case import Metric
from hybridvalidation.judge.statistics import Interval
from hybridvalidation.judge.verdict import Verdict, judge_metric
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.scenario import Target
from hybridvalidation.study.figures import MethodFigures, interval_of, lost_seeds, method_figures
from hybridvalidation.study.plan import Made, next_runs
from hybridvalidation.study.protocol import JUDGED, StudyFile


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
    metric = compute(study, figures)
    lost = lost_seeds(study, made, JUDGED)
    if not lost:
        return metric
    remark = f"a run diverged with seed {', '.join(map(str, lost))}, which no mean holds; {metric.remark}"
    return replace(metric, interval=Interval(metric.value, -inf, inf), remark=remark)


def _speedup(study: StudyFile, figures: MethodFigures) -> Metric:
    """Return by how much sooner the method is where AdamW ends as well: AdamW's steps to there, in its time of a step.

    Probes are in the time of a step, so they must not count in the cost as well. The runs were made one after the
    other on a machine with other work: a ratio below one is noise and counts as one.
    """
    ratio = max(1.0, figures.cpu_ratio)
    steps_to_time = figures.cost / study.num_steps / ratio
    samples = [100 * (factor.value * steps_to_time - 1) for factor in figures.factors]
    remark = (
        f"{study.model.num_params / 1e6:.2f}M parameters, {len(figures.seeds)} seeds, against AdamW with tuned "
        f"learning rate and betas; {figures.predicted_steps:,.0f} predicted beside {study.num_steps:,} true steps"
    )
    metric = _of(samples, "%", remark)
    if not figures.bounds:
        return metric
    remark += f"; with {sum(bool(factor.bound) for factor in figures.factors)} seeds beyond AdamW's horizons"
    return replace(metric, interval=figures.opened(interval_of(samples), least=-100.0), remark=remark)


def _quality_loss(study: StudyFile, figures: MethodFigures) -> Metric:
    """Return by how much validation perplexity is above AdamW's after as many true steps; negative: below."""
    samples = [100 * (exp(-gain) - 1) for gain in figures.gains]
    return _of(samples, "%", f"validation perplexity over AdamW's after {study.num_steps:,} true steps each")


def _of(samples: list[float], unit: str, remark: str) -> Metric:
    interval: Interval = interval_of(samples)
    return Metric(interval.mean, Evidence.EXECUTED, unit, interval=interval, remark=remark)


METRICS: dict[str, Callable[[StudyFile, MethodFigures], Metric]] = {
    "time_to_loss_speedup_pct": _speedup,
    "accuracy_loss_pct": _quality_loss,
}
