"""A picture as plotly.js draws it."""

from collections.abc import Iterable
from math import isfinite
from typing import Any

from hybridvalidation.pictures.picture import INK, Axis, Picture, Series, View, diagonal_ends, log_ticks, values_of

_TEXT, _EDGE, _PAGE = "$text", "$edge", "$page"
"""Colours of the page, in either theme."""
_FAINT = "26"
"""Behind a colour: its opacity of 15 %, in hexadecimal digits."""
_SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "star")
_MARKS = {
    "bar": {"type": "bar"}, "area": {"type": "scatter", "mode": "lines", "stackgroup": "one"},
    "line": {"type": "scatter", "mode": "lines+markers"}, "point": {"type": "scatter", "mode": "markers"},
}  # fmt: skip


def page_spec(picture: Picture) -> dict[str, Any]:
    """Return data and layout of every view, as JSON has them."""
    return {
        name: {
            "data": [trace for series in view.series for trace in (*_band(series), _trace(series, view))],
            "layout": _layout(view),
        }
        for name, view in picture.views.items()
    }


def _band(series: Series) -> list[dict[str, Any]]:
    """Return the band around a line, as an edge and what is filled down to it."""
    if series.mark != "line" or not series.low:
        return []
    look = {"type": "scatter", "mode": "lines", "name": series.name, "x": _rounded(series.x, series.digits),
            "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip",
            "fillcolor": f"{_color(series)}{_FAINT}"}  # fmt: skip
    edges = [{**look, "y": _rounded(ends, series.digits)} for ends in (series.low, series.high)]
    return [edges[0], {**edges[1], "fill": "tonexty"}]


def _trace(series: Series, view: View) -> dict[str, Any]:
    is_lying = bool(view.y.names)
    shown = f"%{{{'x' if is_lying else 'y'}:,.{series.digits}f}} {series.unit}".rstrip()
    place = "%{y}" if is_lying else "%{x}"
    notes = " %{customdata}" if series.notes else ""
    color = _color(series)
    marker: dict[str, Any] = {"color": color}
    if series.mark == "bar":
        marker["line"] = {"color": _EDGE, "width": 0.5}
    if series.opacity:
        marker["opacity"] = list(series.opacity)
    trace: dict[str, Any] = {
        **_MARKS[series.mark], "name": series.name,
        "x": list(series.x) if series.mark in {"area", "line"} else _rounded(series.x, series.digits),
        "y": _rounded(series.y, series.digits),
        "hovertemplate": f"{place}<br>{series.name}: {shown}{notes}<extra></extra>",
    }  # fmt: skip
    if series.mark == "area":
        trace |= {"line": {"width": 0.5, "color": color, "shape": "hv"}, "fillcolor": color}
        trace["hovertemplate"] = shown
    elif series.mark == "line":
        trace["line"] = {"color": color}
    else:
        trace["marker"] = marker
    if series.mark == "bar":
        trace["orientation"] = "h" if is_lying else "v"
    if series.mark == "point":
        marker |= {"size": 9, "symbol": _SYMBOLS[series.symbol % len(_SYMBOLS)]}
    if series.low and series.mark == "point":
        trace["error_x"] = {
            "type": "data", "symmetric": False, "color": color,
            "array": _sizes(series.high, series.x, series.digits),
            "arrayminus": _sizes(series.x, series.low, series.digits),
        }  # fmt: skip
    if series.notes:
        trace["customdata"] = list(series.notes)
    return trace


def _color(series: Series) -> str:
    return _TEXT if series.color == INK else series.color


def _rounded(values: Iterable[float | str], digits: int) -> list[float | str]:
    """Return numbers with two digits more than are shown."""
    return [value if isinstance(value, str) else round(value, digits + 2) for value in values]


def _sizes(upper: Iterable[float | str], lower: Iterable[float | str], digits: int) -> list[float]:
    """Return the sizes of one side of intervals; an open end has no bar."""
    sizes = [float(high) - float(low) for high, low in zip(upper, lower, strict=True)]
    return [round(size, digits + 2) if isfinite(size) else 0.0 for size in sizes]


def _layout(view: View) -> dict[str, Any]:
    layout: dict[str, Any] = {"xaxis": _axis(view, "x", view.x), "yaxis": _axis(view, "y", view.y), "height": 440}
    if view.y.names:
        beside = len(view.series) if view.is_grouped else 1
        layout["height"] = 110 + 30 * max(1, beside * len(view.y.names))
    if any(series.mark == "bar" for series in view.series):
        layout["barmode"] = "group" if view.is_grouped else "stack"
    if any(series.mark == "area" for series in view.series):
        layout["hovermode"] = "x unified"
    shapes, annotations = [], []
    for line in view.lines:
        other = "y" if line.axis == "x" else "x"
        across = {f"{line.axis}ref": line.axis, f"{other}ref": "paper"}
        ends = {f"{line.axis}0": line.at, f"{line.axis}1": line.at, f"{other}0": 0, f"{other}1": 1}
        shapes.append({"type": "line", **across, **ends, "line": {"color": _TEXT, "width": 1.5, "dash": "dash"}})
        place = (
            {"x": line.at, "y": 1, "xanchor": "right"}
            if line.axis == "x"
            else {"x": 0, "y": line.at, "xanchor": "left"}
        )
        look = {"text": line.text, "showarrow": False, "yanchor": "bottom", "bgcolor": _PAGE}
        annotations.append({**across, **place, **look})
    annotations += [_label(view, *item) for item in view.labels.items()]
    if view.band is not None:
        edges = dict(zip(("x0", "x1"), view.band, strict=True))
        shapes.append({"type": "rect", "xref": "x", "yref": "paper", **edges, "y0": 0, "y1": 1, "fillcolor": "#009e73",
                       "opacity": 0.15, "line": {"width": 0}})  # fmt: skip
    if view.has_diagonal:
        low, high = diagonal_ends(view)
        shapes.append(
            {"type": "line", "x0": low, "y0": low, "x1": high, "y1": high, "line": {"color": _TEXT, "width": 1}}
        )
        layout["height"] = 560
    return layout | ({"shapes": shapes} if shapes else {}) | ({"annotations": annotations} if annotations else {})


def _label(view: View, name: str, label: tuple[float, str]) -> dict[str, Any]:
    """Return words at the end of a bar, within the axis."""
    end, words = label
    low, high = view.x.range or (0.0, max(end for end, _ in view.labels.values()))
    place: dict[str, Any] = {"x": max(end, low), "xanchor": "left", "xshift": 3}
    if end > low + 0.8 * (high - low):  # there is no room behind it
        place = {"x": min(end, high), "xanchor": "right", "xshift": -3}
    if end > high:
        place |= {"x": 1, "xref": "paper"}
    return {"xref": "x", **place, "y": name, "text": words, "showarrow": False, "bgcolor": _PAGE}


def _axis(view: View, name: str, axis: Axis) -> dict[str, Any]:
    shown: dict[str, Any] = {"title": {"text": axis.title}} if axis.title else {}
    if axis.names:
        shown |= {"type": "category", "automargin": True, "categoryorder": "array", "categoryarray": list(axis.names)}
        shown["showgrid"] = False
        return shown | ({"autorange": "reversed", "fixedrange": True} if name == "y" else {"tickangle": -60})
    if axis.is_log:
        ticks = log_ticks(values_of(view, name))
        shown |= {"type": "log", "tickvals": list(ticks), "ticktext": list(ticks.values())}
        return shown | ({"fixedrange": False} if name == "y" and view.has_diagonal else {})
    if axis.range is not None:
        return shown | {"range": [float(f"{end:.6g}") for end in axis.range]}
    return shown | ({"rangemode": "tozero"} if any(series.mark in {"bar", "area"} for series in view.series) else {})
