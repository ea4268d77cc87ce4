"""Stated figures that a study judges: what predicted steps gain in time, and what they cost in quality."""

from collections.abc import Callable, Mapping
from math import exp

from hybridtrain.errors import ConfigError, unknown_name
from hybridvalidation.case import Metric
from hybridvalidation.evidence import Evidence
from hybridvalidation.scenario import Target
from hybridvalidation.statistics import Interval
from hybridvalidation.study import JUDGED, StudyFile
from hybridvalidation.study_figures import MethodFigures, interval_of, method_figures
from hybridvalidation.study_plan import Made, next_runs
from hybridvalidation.verdict import Verdict, judge_metric


def judge_study(study: StudyFile, made: Made, targets: Mapping[str, Target]) -> list[Verdict]:
    """Return one verdict per target of the study; unproven until every run was made.

    Raises:
        ConfigError: a target is unknown.
    """
    faults = [f"targets: {unknown_name('target', name, targets)}" for name in study.targets if name not in targets]
    if faults:
        raise ConfigError(study.name, faults)
    return [judge_metric(targets[name], JUDGED, _metric(study, made, targets[name])) for name in study.targets]


def _metric(study: StudyFile, made: Made, target: Target) -> Metric | None:
    figures = None if next_runs(study, made) else method_figures(study, made, JUDGED)
    compute = METRICS.get(target.metric)
    if figures is None or compute is None:
        return None
    return compute(study, figures)


def _speedup(study: StudyFile, figures: MethodFigures) -> Metric:
    """Return by how much sooner the method is where AdamW ends as well: compute factor over the ratio of step times.

    The runs were made one after the other on a machine with other work: a ratio below one is noise and counts as one.
    """
    ratio = max(1.0, figures.cpu_ratio)
    samples = [100 * (factor.value / ratio - 1) for factor in figures.factors]
    remark = (
        f"{study.model.num_params / 1e6:.2f}M parameters, {len(figures.seeds)} seeds, against AdamW with tuned "
        f"learning rate and betas; {figures.predicted_steps:,.0f} predicted beside {study.num_steps:,} true steps"
    )
    return _of(samples, "%", remark)


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
