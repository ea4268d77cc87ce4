"""A study as pictures: horizon curves, loss against cost, learning rates, harm by seed, differences by model size."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from hybridvalidation.study.equivalence import Comparison, Finding, judge_size
from hybridvalidation.study.factors import harms, horizon_curve, lr_curve, method_figures
from hybridvalidation.study.protocol import (
    BASELINE,
    LadderFile,
    LadderMade,
    Made,
    Study,
    StudyFile,
    StudyRecord,
    study_record,
)

_COLORS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00")
"""Okabe and Ito's; black is AdamW."""
_FINDING_COLORS = {
    Finding.EQUIVALENT: "#009e73", Finding.WORSE: "#d55e00", Finding.BETTER: "#0072b2", Finding.INCONCLUSIVE: "#000000",
    Finding.UNFINISHED: "#999999",
}  # fmt: skip
_BLOCK = 100
"""Steps averaged in a loss curve."""
_SHOWN_FROM = 0.2
"""Share of the run before which loss curves are not shown: they would squeeze the rest."""
_SHOWN = 6.0
"""Margins shown to either side; what lies beyond is told by its figure."""
_LOSS_AXIS = "final validation loss, nats per token"


def write_plots(study: Study, made: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write every picture that shows something as PNG and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        if isinstance(study, LadderFile):
            figures = {"": _draw_differences(study, made)}
        elif study.largest_harm_pct is not None:
            figures = {"-harm": _draw_harm(study, made)}
        elif study.is_constant:
            figures = {"-cost": _draw(_plot_validation, study, made)}
        else:
            drawn = {"-horizon": _plot_horizons, "-cost": _plot_training, "-lr": _plot_lrs}
            figures = {suffix: _draw(draw, study, made) for suffix, draw in drawn.items()}
        paths = []
        for suffix, figure in figures.items():
            if isinstance(study, LadderFile) or figure.axes[0].get_legend() is not None:  # else it was just begun
                paths.append(folder / f"study-{study.name}{suffix}.png")
                figure.savefig(paths[-1], dpi=110, metadata={"Software": None})
    return paths


def _draw(draw: Callable[[StudyFile, Made, Axes], str], study: StudyFile, made: Made) -> Figure:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"{study.name}: {draw(study, made, axes)}", fontsize=9)
    _legend(axes)
    return figure


def _draw_harm(study: StudyFile, made: Made) -> Figure:
    """Draw all settings, one point per seed."""
    found = [harm for harm in harms(study, made) if harm.percents]
    figure = Figure(figsize=(8, 1 + 0.32 * len(found)), layout="constrained")
    axes = figure.subplots()
    for place, harm in enumerate(found):
        axes.plot(harm.percents, [place] * len(harm.percents), "o", color="#0072b2", alpha=0.7)
    axes.set_yticks(range(len(found)), [harm.method.name for harm in found])
    axes.axvline(0, color="#999999", linewidth=0.8)
    axes.axvline(study.largest_harm_pct or 0, color="#d55e00", linestyle="--", label="registered bound")
    axes.set_xlabel("loss over AdamW's under the same circumstances, % (executed, one point a seed)")
    axes.invert_yaxis()
    _legend(axes)
    return figure


def _draw_differences(ladder: LadderFile, made: LadderMade) -> Figure:
    """Draw the differences of all configurations, a column for each model size that has any."""
    shown = [(size, [one for one in judge_size(ladder, made, size) if one.interval]) for size in ladder.rungs]
    shown = [(size, judged) for size, judged in shown if judged]
    begun = {one.configuration.name for _, judged in shown for one in judged}
    names, margin = [own.name for own in ladder.arms if own.name in begun], ladder.margin_nats
    columns = max(1, len(shown))
    figure = Figure(figsize=(3 + 3.2 * columns, 1.8 + 0.27 * len(names)), layout="constrained")
    row = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    for axes, (size, judged) in zip(row, shown, strict=False):
        axes.axvspan(-margin, margin, color="#009e73", alpha=0.15, linewidth=0)
        axes.axvline(0, color="#999999", linewidth=0.8)
        for one in judged:
            _plot_difference(axes, one, names.index(one.configuration.name), _SHOWN * margin)
        axes.set_xlim(-1.15 * _SHOWN * margin, 1.15 * _SHOWN * margin)
        axes.set_title(f"{size.name}, {size.tokens_per_param:.0f} tokens per parameter", fontsize=9)
    for axes in row:
        axes.set_yticks(range(len(names)), names)
    row[0].invert_yaxis()
    figure.supxlabel(
        "validation loss above the compared configuration's, nats per token\n(executed; mean and 95 % over paired "
        "seeds)\nband: equivalence margin; green equivalent, red worse,\nblue better, black inconclusive, grey "
        "unfinished",
        fontsize=9,
    )
    return figure


def _plot_difference(axes: Axes, judged: Comparison, place: int, edge: float) -> None:
    interval, color = judged.interval, _FINDING_COLORS[judged.finding]
    assert interval is not None, "others were left out"
    if abs(interval.mean) > edge:
        at = (edge if interval.mean > 0 else -edge, place)
        axes.annotate(f"{interval.mean:+.3f}", at, color=color, fontsize=8, ha="center", va="center")
        return
    error = [[interval.mean - interval.low], [interval.high - interval.mean]]
    axes.errorbar([interval.mean], [place], xerr=error, color=color, marker="o", markersize=4, capsize=2)


def _plot_horizons(study: StudyFile, made: Made, axes: Axes) -> str:
    curves = [horizon_curve(study, made, seed) for seed in study.seeds]
    for curve in curves:
        axes.plot([steps for steps, _ in curve], [loss for _, loss in curve], color="#bbbbbb", linewidth=0.8)
    complete = [losses for losses in map(dict, curves) if losses.keys() >= set(study.horizons)]
    if complete:
        steps = sorted(study.horizons)
        means = [fmean(losses[horizon] for losses in complete) for horizon in steps]
        axes.plot(steps, means, color=_COLORS[0], marker="o", label="AdamW, each horizon with its own schedule")
    for color, method in zip(_COLORS[1:], study.methods, strict=False):
        if (figures := method_figures(study, made, method.name)) is not None:
            losses = [loss for record in figures.records if (loss := record.validation_loss) is not None]
            spread = stdev(losses) if len(losses) > 1 else 0.0
            axes.errorbar(
                [figures.cost], [fmean(losses)], yerr=[spread], color=color, marker="s", capsize=4, label=method.name
            )
    _log_axis(axes, study.horizons)
    axes.set_xlabel("cost in true steps (log scale)")
    axes.set_ylabel(_LOSS_AXIS)
    return "what the same loss costs AdamW (executed; bars: one deviation over seeds)"


def _plot_training(study: StudyFile, made: Made, axes: Axes) -> str:
    for color, name in _named_colors(study):
        records = _records(study, made, name, study.num_steps)
        runs = [_blocks(record.step_losses) for record in records if record.step_losses]
        if len(runs) > 1:
            _band(axes, runs, color, name)
    axes.set_xlabel("cost in true steps")
    axes.set_ylabel(f"training loss, mean of {_BLOCK} steps")
    return "loss against cost (executed; bands: one deviation over seeds)"


def _band(axes: Axes, runs: Sequence[Sequence[float]], color: str, name: str) -> None:
    count = min(len(run) for run in runs)
    shown = range(int(_SHOWN_FROM * count), count)
    steps = [_BLOCK * (index + 1) for index in shown]
    means = [fmean(run[index] for run in runs) for index in shown]
    spreads = [stdev([run[index] for run in runs]) for index in shown]
    low, high = ([mean + sign * spread for mean, spread in zip(means, spreads, strict=True)] for sign in (-1, 1))
    axes.plot(steps, means, color=color, label=name)
    axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)


def _plot_validation(study: StudyFile, made: Made, axes: Axes) -> str:
    for color, name in _named_colors(study):
        steps = max(study.horizons) if name == BASELINE else study.num_steps
        for number, record in enumerate(_records(study, made, name, steps)):
            points, label = record.curve[2:], name if not number else None
            axes.plot([p.cost / 3 for p in points], [p.loss for p in points], color=color, label=label, alpha=0.8)
    axes.set_xlabel("cost in true steps")
    axes.set_ylabel("validation loss, nats per token")
    return "loss against cost at a constant learning rate (executed; one line a seed)"


def _plot_lrs(study: StudyFile, made: Made, axes: Axes) -> str:
    names = [BASELINE, *(method.name for method in study.methods if method.lrs)]
    for color, name in zip(_COLORS, names, strict=False):
        curve = [(lr, loss) for lr, loss in lr_curve(study, made, name) if loss is not None]
        if curve:
            axes.plot([lr for lr, _ in curve], [loss for _, loss in curve], color=color, marker="o", label=name)
    _log_axis(axes, study.lrs)
    axes.set_xlabel("peak learning rate (log scale)")
    axes.set_ylabel(_LOSS_AXIS)
    return f"learning rates at seed {study.tuning_seed} (executed)"


def _named_colors(study: StudyFile) -> list[tuple[str, str]]:
    return list(zip(_COLORS, (BASELINE, *(method.name for method in study.methods)), strict=False))


def _records(study: StudyFile, made: Made, name: str, num_steps: int) -> list[StudyRecord]:
    found = [study_record(study, made, name, seed, num_steps) for seed in study.seeds_of(name)]
    return [record for record in found if record is not None and record.validation_loss is not None]


def _log_axis(axes: Axes, ticks: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")


def _legend(axes: Axes) -> None:
    """Name the curves, if there are any."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)


def _blocks(losses: Sequence[float]) -> list[float]:
    return [fmean(losses[start : start + _BLOCK]) for start in range(0, len(losses) - _BLOCK + 1, _BLOCK)]
