"""Plans against what others measured on CUDA, a point each."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridtrain.units import GB
from hybridvalidation.experiments.recorded import Row, read_planned, read_sources, rows_of
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.drawing import TEXT, Drawing, Trace, figure_of, log_axis
from hybridvalidation.show.kinds import PageChart
from hybridvalidation.show.pages.recorded import by_kind, headline, label_of, predicted

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#999999")
_SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "star")
_UNITS = {"memory": ("GB", GB, False), "step time": ("s", 1, True)}
"""By view: unit, its size in bytes or seconds, whether it is of times."""


def _draw(files: ScenarioFiles, results: Path) -> Mapping[str, Sequence[Drawing]]:
    rows = rows_of(read_sources(files.folder), read_planned(results / "records"))
    views, layouts = {}, {}
    for view, (unit, size, are_times) in _UNITS.items():
        if shown := predicted(rows, are_times=are_times):
            views[view] = _traces(shown, unit, size)
            layouts[view] = _layout(shown, unit, size)
    if not views:
        return {}
    return {
        "recorded": [
            Drawing(
                name="recorded", replaces="recorded", title="Planned against recorded", choice="what",
                evidence="recorded: measured by others on CUDA; planned: without a card, times by a roofline; on the "
                "line both are equal",
                says=headline(rows), views=views, layouts=layouts,
            )
        ]
    }  # fmt: skip


def _traces(rows: Sequence[Row], unit: str, size: float) -> list[Trace]:
    traces: list[Trace] = []
    for number, points in enumerate(by_kind(rows)):
        traces.append({
            "type": "scatter", "mode": "markers", "name": label_of(points),
            "x": [figure_of(row.recorded / size, 4) for row in points],
            "y": [figure_of((row.planned or 0.0) / size, 4) for row in points],
            "customdata": [[row.id, f"{100 * (row.error or 0.0):+.2f} %"] for row in points],
            "marker": {"color": _COLORS[number % len(_COLORS)], "symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 8,
                       "opacity": 0.8},
            "hovertemplate": f"%{{customdata[0]}}<br>recorded %{{x:.3f}} {unit}, planned %{{y:.3f}} {unit} "
            "(%{customdata[1]})<extra></extra>",
        })  # fmt: skip
    return traces


def _layout(rows: Sequence[Row], unit: str, size: float) -> dict[str, object]:
    values = [value / size for row in rows for value in (row.recorded, row.planned or row.recorded)]
    low, high = 0.85 * min(values), 1.15 * max(values)
    return {
        "height": 560, "xaxis": log_axis(f"{unit} recorded on CUDA by others", values),
        "yaxis": log_axis(f"{unit} planned without a card", values, fixedrange=False),
        "shapes": [{"type": "line", "x0": low, "y0": low, "x1": high, "y1": high, "line": {"color": TEXT, "width": 1}}],
    }  # fmt: skip


CHART = PageChart(order=10, draw=_draw)
