"""A study as pictures: horizon curve with the methods' points, loss against cost, learning-rate curves."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from hybridvalidation.study.figures import horizon_curve, lr_curve, method_figures, record_of
from hybridvalidation.study.harm import harms
from hybridvalidation.study.protocol import BASELINE, Made, StudyFile

_COLORS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00")
"""Okabe and Ito's; black is AdamW."""
_BLOCK = 100
"""Steps averaged in a loss curve."""
_SHOWN_FROM = 0.2
"""Share of the run before which loss curves are not shown: they would squeeze the rest."""


def write_study_plots(study: StudyFile, made: Made, folder: Path) -> list[Path]:
    """Write every picture that shows something as PNG and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    plots: list[tuple[str, Callable[[StudyFile, Made, Figure], None]]] = [("horizon", _plot_horizons)]
    if study.is_constant:
        plots = [("cost", _plot_validation)]
    else:
        plots += [("cost", _plot_training), ("lr", _plot_lrs)]
    paths = []
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        for suffix, draw in plots:
            figure = Figure(figsize=(8, 5), layout="constrained")
            draw(study, made, figure)
            if figure.axes[0].get_legend() is None:
                continue  # a study that was just begun has no curve yet
            path = folder / f"study-{study.name}-{suffix}.png"
            figure.savefig(path, dpi=110, metadata={"Software": None})
            paths.append(path)
    return paths


def harm_plots(study: StudyFile, made: Made, folder: Path) -> list[Path]:
    """Write the picture of all settings, one point a seed."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [harm for harm in harms(study, made) if harm.percents]
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
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
        path = folder / f"study-{study.name}-harm.png"
        figure.savefig(path, dpi=110, metadata={"Software": None})
    return [path]


def _plot_horizons(study: StudyFile, made: Made, figure: Figure) -> None:
    axes = figure.subplots()
    curves = [horizon_curve(study, made, seed) for seed in study.seeds]
    by_steps = [dict(curve) for curve in curves]
    complete = [losses for losses in by_steps if all(steps in losses for steps in study.horizons)]
    for curve in curves:
        axes.plot([steps for steps, _ in curve], [loss for _, loss in curve], color="#bbbbbb", linewidth=0.8)
    if complete:
        steps = sorted(study.horizons)
        means = [fmean(losses[horizon] for losses in complete) for horizon in steps]
        axes.plot(steps, means, color=_COLORS[0], marker="o", label="AdamW, each horizon with its own schedule")
    for color, method in zip(_cycle(), study.methods, strict=False):
        figures = method_figures(study, made, method.name)
        if figures is not None:
            spread = stdev(figures.losses) if len(figures.losses) > 1 else 0.0
            axes.errorbar(
                [figures.cost], [fmean(figures.losses)], yerr=[spread], color=color, marker="s", capsize=4,
                label=method.name,
            )  # fmt: skip
    _log_axis(axes, study.horizons)
    axes.set_xlabel("cost in true steps (log scale)")
    axes.set_ylabel("final validation loss, nats per token")
    axes.set_title(
        f"{study.name}: what the same loss costs AdamW (executed; bars: one deviation over seeds)", fontsize=9
    )
    _legend(axes)


def _plot_training(study: StudyFile, made: Made, figure: Figure) -> None:
    axes = figure.subplots()
    for color, name in zip((_COLORS[0], *_cycle()), (BASELINE, *(m.name for m in study.methods)), strict=False):
        records = [record_of(study, made, name, seed, study.num_steps) for seed in study.seeds_of(name)]
        runs = [_blocks(record.step_losses) for record in records if record is not None and record.step_losses]
        if len(runs) > 1:
            _band(axes_plot=axes.plot, axes_fill=axes.fill_between, runs=runs, color=color, name=name)
    axes.set_xlabel("cost in true steps")
    axes.set_ylabel(f"training loss, mean of {_BLOCK} steps")
    axes.set_title(f"{study.name}: loss against cost (executed; bands: one deviation over seeds)", fontsize=9)
    _legend(axes)


def _band(
    *, axes_plot: Callable[..., object], axes_fill: Callable[..., object], runs: Sequence[Sequence[float]],
    color: str, name: str,
) -> None:  # fmt: skip
    count = min(len(run) for run in runs)
    first = int(_SHOWN_FROM * count)
    steps = [_BLOCK * (index + 1) for index in range(first, count)]
    means = [fmean(run[index] for run in runs) for index in range(first, count)]
    spreads = [stdev([run[index] for run in runs]) for index in range(first, count)]
    low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
    high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
    axes_plot(steps, means, color=color, label=name)
    axes_fill(steps, low, high, color=color, alpha=0.15, linewidth=0)


def _plot_validation(study: StudyFile, made: Made, figure: Figure) -> None:
    axes = figure.subplots()
    for color, name in zip((_COLORS[0], *_cycle()), (BASELINE, *(m.name for m in study.methods)), strict=False):
        steps = max(study.horizons) if name == BASELINE else study.num_steps
        for number, seed in enumerate(study.seeds_of(name)):
            record = record_of(study, made, name, seed, steps)
            if record is not None:
                points = record.curve[2:]
                label = name if not number else None
                axes.plot([p.cost / 3 for p in points], [p.loss for p in points], color=color, label=label, alpha=0.8)
    axes.set_xlabel("cost in true steps")
    axes.set_ylabel("validation loss, nats per token")
    axes.set_title(
        f"{study.name}: loss against cost at a constant learning rate (executed; one line a seed)", fontsize=9
    )
    _legend(axes)


def _plot_lrs(study: StudyFile, made: Made, figure: Figure) -> None:
    axes = figure.subplots()
    names = [BASELINE, *(method.name for method in study.methods if method.lrs)]
    for color, name in zip((_COLORS[0], *_cycle()), names, strict=False):
        curve = [(lr, loss) for lr, loss in lr_curve(study, made, name) if loss is not None]
        if curve:
            axes.plot([lr for lr, _ in curve], [loss for _, loss in curve], color=color, marker="o", label=name)
    _log_axis(axes, study.lrs)
    axes.set_xlabel("peak learning rate (log scale)")
    axes.set_ylabel("final validation loss, nats per token")
    axes.set_title(f"{study.name}: learning rates at seed {study.tuning_seed} (executed)", fontsize=9)
    _legend(axes)


def _log_axis(axes: Axes, ticks: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")


def _legend(axes: Axes) -> None:
    """Name the curves, if there are any."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)


def _cycle() -> tuple[str, ...]:
    return _COLORS[1:]


def _blocks(losses: Sequence[float]) -> list[float]:
    return [fmean(losses[start : start + _BLOCK]) for start in range(0, len(losses) - _BLOCK + 1, _BLOCK)]
