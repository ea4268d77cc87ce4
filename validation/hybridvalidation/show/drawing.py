"""Pictures to point at and zoom into: what one is, whatever library draws it in the end."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, isfinite, log10

from hybridtrain.units import format_count
from hybridvalidation.judge.statistics import Interval

Trace = Mapping[str, object]
"""A data series as plotly.js has it; colours that begin with $ are the page's own, of either theme."""
TEXT = "$text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One picture of a page."""

    name: str
    """Unlike those of the page's other pictures; letters, digits and dashes."""
    title: str
    evidence: str
    """How its figures were got, and anything else to know of them."""
    says: str
    """The picture in words, for who does not see it."""
    views: Mapping[str, Sequence[Trace]]
    """Data series by what is chosen, the first at first; a single one has nothing to choose from."""
    choice: str = ""
    """What is chosen."""
    replaces: str = ""
    """End of the name of a picture in the page's text that shows no more than this one."""
    layout: Mapping[str, object] = field(default_factory=dict)
    """As plotly.js has it."""
    layouts: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """What a single view has beside it."""

    def as_mapping(self) -> dict[str, object]:
        """Return what the page's script draws."""
        return {"views": self.views, "layout": self.layout, "layouts": self.layouts}


def bars_height(count: int) -> int:
    """Return pixels for so many lying bars, their axis included."""
    return 110 + 30 * max(1, count)


def upright_line(at: float, text: str) -> dict[str, object]:
    """Return a dashed line across all bars, with its name on top, as a part of a layout."""
    return {
        "shapes": [
            {"type": "line", "xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1,
             "line": {"color": TEXT, "width": 1.5, "dash": "dash"}}
        ],
        "annotations": [
            {"xref": "x", "yref": "paper", "x": at, "y": 1, "text": text, "showarrow": False, "yanchor": "bottom",
             "xanchor": "right"}
        ],
    }  # fmt: skip


def bar_axes(title: str, count: int, **x_axis: object) -> dict[str, object]:
    """Return the layout of lying bars, the first on top."""
    return {
        "barmode": "stack", "height": bars_height(count), "xaxis": {"title": {"text": title}, **x_axis},
        "yaxis": {"autorange": "reversed", "automargin": True, "fixedrange": True, "type": "category"},
    }  # fmt: skip


def log_axis(title: str, values: Iterable[float], **axis: object) -> dict[str, object]:
    """Return a logarithmic axis with ticks at 1, 2 and 5 times powers of ten between all values; each above 0."""
    values = sorted(values)
    powers = range(floor(log10(values[0])), ceil(log10(values[-1])) + 1)
    ticks = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    shown = [tick for tick in ticks if values[0] / 2 <= tick <= 2 * values[-1]]
    names = [f"{tick:,.6g}" if tick < 1000 else format_count(tick) for tick in shown]
    return {"type": "log", "title": {"text": title}, "tickvals": shown, "ticktext": names, **axis}


def figure_of(value: float, digits: int = 3) -> float:
    """Return a figure in the digits that a picture shows."""
    return round(value, digits)


def interval_trace(
    name: str, points: Sequence[tuple[str, Interval]], color: str, *, unit: str = "", digits: int = 4
) -> Trace:
    """Return means with their intervals, a row each; an end that is open has no bar."""
    means = [figure_of(interval.mean, digits) for _, interval in points]
    above, below = (
        [figure_of(size, digits) if isfinite(size) else 0.0 for size in sizes]
        for sizes in (
            [interval.high - interval.mean for _, interval in points],
            [interval.mean - interval.low for _, interval in points],
        )
    )
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": means, "y": [row for row, _ in points],
        "marker": {"color": color, "size": 9}, "customdata": [_ends(interval, digits) for _, interval in points],
        "error_x": {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "color": color},
        "hovertemplate": f"%{{y}}: %{{x:.{digits}f}}{unit} %{{customdata}}<extra>{name}</extra>",
    }  # fmt: skip


def _ends(interval: Interval, digits: int) -> str:
    return f"[{interval.low:.{digits}f}, {interval.high:.{digits}f}]"
