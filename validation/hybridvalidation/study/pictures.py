"""Pictures of a study: compute factors, loss against cost, learning rates, harm by seed, differences by model size."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from hybridvalidation.pictures.picture import COLORS, INK, Axis, Line, Picture, Series, View, intervals
from hybridvalidation.study.equivalence import Finding, judge_size
from hybridvalidation.study.factors import harms, horizon_curve, lr_curve, method_figures
from hybridvalidation.study.protocol import (
    BASELINE,
    LadderFile,
    LadderMade,
    Made,
    Study,
    StudyFile,
    study_record,
)

_COLORS = (INK, *COLORS)
"""AdamW's first."""
_FINDING_COLORS = {
    Finding.EQUIVALENT: "#009e73", Finding.NO_HARM: "#009e73",
    Finding.WORSE: "#d55e00", Finding.BETTER: "#0072b2", Finding.INCONCLUSIVE: "#8c6d31",
    Finding.UNFINISHED: "#999999",
}  # fmt: skip
_BLOCK = 100
"""Steps averaged in a loss curve."""
_SHOWN_FROM = 0.2
"""Initial share of a run that loss curves omit, because of their scale."""
_SHOWN = 9.0
"""Axis limit in margins; values beyond are printed."""
_LOSS = "validation loss, nats per token"
_HOW = "executed on the CPU; bars: 95 % interval over paired seeds"
Points = Sequence[tuple[float, Sequence[float]]]
"""Positions with the values of all seeds."""


def pictures_of(study: Study, made: Mapping[str, Any], description: str) -> list[Picture]:
    """Return all non-empty pictures of a study; ``says`` is its verdict in a sentence."""
    if isinstance(study, LadderFile):
        drawn = [_differences(study, made)]
    elif study.largest_harm_pct is not None:
        drawn = [_harm(study, made)]
    elif study.is_constant:
        drawn = [_factors(study, made), _costs(study, made)]
    else:
        drawn = [draw(study, made) for draw in (_factors, _horizons, _costs, _rates)]
    shown = [picture for picture in drawn if any(view.series for view in picture.views.values())]
    return [replace(picture, description=description) for picture in shown]


def _factors(study: StudyFile, made: Made) -> Picture:
    found = [figures for method in study.methods if (figures := method_figures(study, made, method.name)) is not None]
    points = {figures.name: figures.factor for figures in found}
    return _picture(
        "factor", "Compute factor against AdamW", f"{_HOW}; above 1: less compute for the same loss",
        [intervals("compute factor", points, COLORS[0], digits=2)] if points else [], Axis(title="compute factor"),
        Axis(names=list(points)), lines=[Line(at=1.0, text="AdamW")],
    )  # fmt: skip


def _horizons(study: StudyFile, made: Made) -> Picture:
    curves = [dict(horizon_curve(study, made, seed)) for seed in study.seeds]
    common = sorted(steps for steps in study.horizons if all(steps in curve for curve in curves))
    points = [(float(steps), [curve[steps] for curve in curves]) for steps in common]
    series = _mean_line("AdamW, each horizon with its own schedule", points, _COLORS[0])
    for color, method in zip(_COLORS[1:], study.methods, strict=False):
        if (figures := method_figures(study, made, method.name)) is not None:
            losses = [loss for record in figures.records if (loss := record.validation_loss) is not None]
            costs = [figures.cost] * len(losses)
            series.append(Series(name=method.name, mark="point", color=color, digits=4, x=costs, y=losses))
    evidence = "executed on the CPU; band: one standard deviation over seeds; one point per seed of a method"
    x, y = Axis(title="cost in true steps", is_log=True), Axis(title=f"final {_LOSS}")
    return _picture("horizon", "Cost of the same loss under AdamW", evidence, series, x, y)


def _costs(study: StudyFile, made: Made) -> Picture:
    series: list[Series] = []
    for color, name in zip(_COLORS, (BASELINE, *(method.name for method in study.methods)), strict=False):
        steps = max(study.horizons) if study.is_constant and name == BASELINE else study.num_steps
        found = [study_record(study, made, name, seed, steps) for seed in study.seeds_of(name)]
        records = [record for record in found if record is not None and record.validation_loss is not None]
        if study.is_constant:
            curves = [[(point.cost / 3, point.loss) for point in record.curve[2:]] for record in records]
        else:
            blocks = range(int(_SHOWN_FROM * study.num_steps / _BLOCK), study.num_steps // _BLOCK)
            ends = [(float(_BLOCK * block), _BLOCK * (block + 1)) for block in blocks]
            curves = [
                [(float(end), fmean(record.step_losses[int(start) : end])) for start, end in ends]
                for record in records
                if len(record.step_losses) >= study.num_steps
            ]
        if curves:
            points = [(together[0][0], [loss for _, loss in together]) for together in zip(*curves, strict=False)]
            series += _mean_line(name, points, color)
    evidence = "executed on the CPU; band: one standard deviation over seeds"
    loss = _LOSS if study.is_constant else f"training loss, mean of {_BLOCK} steps"
    return _picture("cost", "Loss against cost", evidence, series, Axis(title="cost in true steps"), Axis(title=loss))


def _rates(study: StudyFile, made: Made) -> Picture:
    names = [BASELINE, *(method.name for method in study.methods if method.lrs)]
    series: list[Series] = []
    for color, name in zip(_COLORS, names, strict=False):
        series += _mean_line(
            name, [(lr, [loss]) for lr, loss in lr_curve(study, made, name) if loss is not None], color
        )
    evidence = f"executed on the CPU at seed {study.tuning_seed}"
    x, y = Axis(title="peak learning rate", is_log=True), Axis(title=f"final {_LOSS}")
    return _picture("lr", "Learning rates", evidence, series, x, y)


def _harm(study: StudyFile, made: Made) -> Picture:
    found, bound = [harm for harm in harms(study, made) if harm.percents], study.largest_harm_pct or 0.0
    series = Series(
        name="one seed", mark="point", color=COLORS[0], unit="%",
        x=[value for harm in found for value in harm.percents],
        y=[harm.method.name for harm in found for _ in harm.percents],
    )  # fmt: skip
    return _picture(
        "harm", "Loss above AdamW's under the same circumstances",
        "executed on the CPU, one point per seed; below 0: better", [series] if found else [],
        Axis(title="% of AdamW's loss"), Axis(names=[harm.method.name for harm in found]),
        lines=[Line(at=bound, text=f"registered bound: {bound:g} %")],
    )  # fmt: skip


def _differences(ladder: LadderFile, made: LadderMade) -> Picture:
    views, margin = {}, ladder.margin_nats
    edge = _SHOWN * margin
    for size in ladder.rungs:
        rows = [
            (f"{one.configuration.name} over {one.reference.name}", one.interval, one.finding)
            for one in judge_size(ladder, made, size)
            if one.interval is not None
        ]
        series: list[Series] = []
        for finding, color in _FINDING_COLORS.items():
            mine = {name: interval for name, interval, found in rows if found is finding}
            series += [intervals(finding.value, mine, color, digits=4)] if mine else []
        far = {name: (found.mean, f"{found.mean:+.3f}") for name, found, _ in rows if abs(found.mean) > edge}
        if rows:
            views[f"{size.name}, {size.tokens_per_param:.0f} tokens per parameter"] = View(
                series=series, y=Axis(names=[name for name, _, _ in rows]), lines=[Line(at=0, text="")],
                x=Axis(title="nats per token above the compared configuration's loss", range=(-edge, edge)),
                band=(-margin, margin), labels=far,
            )  # fmt: skip
    return Picture(
        name=f"study-{ladder.name}", title="Loss of every configuration beside the one it is compared with",
        evidence=f"{_HOW}, not adjusted; band: registered equivalence margin of {margin:g} nats", choice="model size",
        views=views, description="",
    )  # fmt: skip


def _picture(
    name: str, title: str, evidence: str, series: Sequence[Series], x: Axis, y: Axis, *, lines: Sequence[Line] = ()
) -> Picture:
    view = View(series=series, x=x, y=y, lines=lines)
    return Picture(name=name, title=title, evidence=evidence, description="", views={"": view})


def _mean_line(name: str, points: Points, color: str) -> list[Series]:
    """Return the mean over seeds as a line, with a band of one standard deviation; nothing without points."""
    if not points:
        return []
    means = [fmean(values) for _, values in points]
    spreads = [stdev(values) if len(values) > 1 else 0.0 for _, values in points]
    low, high = ([mean + side * spread for mean, spread in zip(means, spreads, strict=True)] for side in (-1, 1))
    x = [place for place, _ in points]
    return [Series(name=name, mark="line", color=color, digits=4, x=x, y=means, low=low, high=high)]
