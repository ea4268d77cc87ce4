"""A picture as a PNG beside a page of Markdown."""

from io import BytesIO
from textwrap import fill
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hybridvalidation.pictures.picture import Axis, Picture, Series, View, diagonal_ends, log_ticks, values_of

_WIDTH_INCHES, _MOST_INCHES = 10.0, 14.0
_LETTERS_PER_INCH = 10
"""Of a title in 11 points, with room on both sides."""
_MARKERS = "os^DvPX"


def png_of(picture: Picture) -> bytes:
    """Return the picture as a file, a panel for each view."""
    figure = figure_of(picture)
    stream = BytesIO()
    figure.savefig(stream, format="png", dpi=110, metadata={"Software": None})
    return stream.getvalue()


def figure_of(picture: Picture) -> Figure:
    """Return the picture as matplotlib has it."""
    shown = {name: view for name, view in picture.views.items() if not view.only_page} or dict(picture.views)
    absent = [name for name in picture.views if name not in shown]
    heights = [_inches(view, len(shown)) for view in shown.values()]
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        size = (_WIDTH_INCHES, min(_MOST_INCHES, 0.7 + sum(heights)))
        figure = Figure(figsize=size, layout="constrained")
        has_areas = any(series.mark == "area" for view in shown.values() for series in view.series)
        column: list[Axes] = list(figure.subplots(
            len(shown), 1, squeeze=False, height_ratios=heights, sharey=has_areas
        )[:, 0])  # fmt: skip
        named: set[str] = set()
        for axes, (name, view) in zip(column, shown.items(), strict=True):
            _draw(axes, view)
            if title := view.title or (name if len(shown) > 1 else ""):
                axes.set_title(title, fontsize=10, loc="left")
            if has_areas and axes is not column[-1]:
                axes.set_xlabel("")
            found = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
            new = {label: handle for label, handle in found.items() if label not in named}
            if new and len(found) > 1:
                axes.legend(
                    new.values(), new, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False
                )  # fmt: skip
                named |= {*new}
        left_out = f"; not shown, for they do not fit: {', '.join(absent)}" if absent else ""
        title = fill(f"{picture.title} ({picture.evidence}{left_out})", int(_LETTERS_PER_INCH * _WIDTH_INCHES))
        figure.suptitle(title, fontsize=11)
    return figure


def _inches(view: View, count: int) -> float:
    if view.y.names:
        return 0.9 + 0.32 * len(view.y.names) * (len(view.series) if view.is_grouped else 1)
    return 1.9 if count > 2 else 5.0


def _draw(axes: Axes, view: View) -> None:
    bases: dict[str | float, float] = {}
    places: dict[Any, int] = {name: place for place, name in enumerate(view.y.names or view.x.names)}
    areas = [series for series in view.series if series.mark == "area"]
    if areas:
        axes.stackplot(
            areas[0].x, [series.y for series in areas], step="post", colors=[series.color for series in areas],
            labels=[series.name for series in areas],
        )  # fmt: skip
    for number, series in enumerate(view.series):
        if series.mark == "bar":
            _bars(axes, view, series, number, places, bases)
        elif series.mark == "line":
            axes.plot(series.x, series.y, color=series.color, marker="o", label=series.name)
            if series.low:
                axes.fill_between(series.x, series.low, series.high, color=series.color, alpha=0.15, linewidth=0)
        elif series.mark == "point":
            y = [places.get(value, value) for value in series.y]
            ends = [
                (float(x) - low, high - float(x))
                for x, low, high in zip(series.x, series.low, series.high, strict=False)
            ]
            axes.errorbar(
                series.x, y, xerr=list(zip(*ends, strict=True)) or None, color=series.color, alpha=0.8, capsize=4,
                markersize=5, fmt=_MARKERS[series.symbol % len(_MARKERS)], label=series.name,
            )  # fmt: skip
    for line in view.lines:
        draw = axes.axvline if line.axis == "x" else axes.axhline
        draw(line.at, color="black", linestyle="--", linewidth=1, label=line.text)
    if view.band is not None:
        axes.axvspan(*view.band, color="#009e73", alpha=0.15, linewidth=0)
    if view.has_diagonal:
        line_ends = diagonal_ends(view)
        axes.plot(line_ends, line_ends, color="#444444", linewidth=0.8)
        low, high = ([share * end for end in line_ends] for share in (0.95, 1.05))
        axes.fill_between(line_ends, low, high, color="#eeeeee", zorder=0, label="within 5 %")
    _axes(axes, view)


def _bars(
    axes: Axes, view: View, series: Series, number: int, places: dict[Any, int], bases: dict[str | float, float]
) -> None:
    is_lying = bool(view.y.names)
    sizes, names = (series.x, series.y) if is_lying else (series.y, series.x)
    width = 0.8 / (len(view.series) if view.is_grouped else 1)
    shift = (number - (len(view.series) - 1) / 2) * width if view.is_grouped else 0.0
    starts = [bases.get(name, 0.0) for name in names]
    where = [places[name] + shift for name in names]
    values, look = [float(size) for size in sizes], dict[str, Any](color=series.color, label=series.name)
    if is_lying:
        bars = axes.barh(where, values, width, left=starts, **look)
    else:
        bars = axes.bar(where, values, width, bottom=starts, **look)
    for bar, opacity in zip(bars, series.opacity, strict=False):
        bar.set_alpha(opacity)
    if not view.is_grouped:
        bases |= {name: start + float(size) for name, start, size in zip(names, starts, sizes, strict=True)}


def _axes(axes: Axes, view: View) -> None:
    for name, axis in (("x", view.x), ("y", view.y)):
        _axis(axes, view, name, axis)
    if not view.y.names:
        return
    axes.set_ylim(len(view.y.names) - 0.5, -0.5)
    low, edge = axes.get_xlim()
    for name, (end, words) in view.labels.items():
        is_cut, place = end > low + 0.92 * (edge - low), (min(max(end, low), edge), view.y.names.index(name))
        axes.annotate(f" {words} ", place, ha="right" if is_cut else "left", va="center", fontsize=9)


def _axis(axes: Axes, view: View, name: str, axis: Axis) -> None:
    if axis.title:
        axes.set(**{f"{name}label": axis.title})
    if axis.names:
        axes.set(**{f"{name}ticks": range(len(axis.names)), f"{name}ticklabels": axis.names})
    elif axis.is_log:
        ticks = log_ticks(values_of(view, name))
        axes.set(**{f"{name}scale": "log"})
        axes.set(**{f"{name}ticks": list(ticks), f"{name}ticklabels": list(ticks.values())})
        axes.minorticks_off()
    elif axis.range is not None:
        axes.set(**{f"{name}lim": axis.range})
