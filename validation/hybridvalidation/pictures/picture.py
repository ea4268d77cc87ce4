"""Description of a picture, for any drawing library."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10
from typing import Literal

from hybridtrain.units import format_count, to_gib
from hybridvalidation.judge.statistics import Interval

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#999999", "#332288")
"""Okabe and Ito's, which colour-blind readers can tell apart, then brown and grey."""
INK = "#000000"
"""Of what others are compared with; on a page the colour of its text."""
PALE = 0.4
"""Opacity of what does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a view."""

    title: str = ""
    names: Sequence[str] = ()
    """Categories in their order, from the top or the left; empty: numbers."""
    is_log: bool = False
    range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points of one name and colour; bars lie where the y axis has categories, and stand where the x axis has."""

    name: str
    x: Sequence[float | str]
    y: Sequence[float | str]
    color: str
    mark: Literal["bar", "area", "line", "point"] = "bar"
    unit: str = ""
    digits: int = 2
    """Shown behind the point."""
    symbol: int = 0
    opacity: Sequence[float] = ()
    low: Sequence[float] = ()
    """Ends of intervals along x, with ``high``; of a line the band around it, along y."""
    high: Sequence[float] = ()
    notes: Sequence[str] = ()
    """Shown beside each point that is pointed at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A dashed line across a view, at a value of x or of y."""

    at: float
    text: str
    axis: Literal["x", "y"] = "x"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Series that are seen together."""

    series: Sequence[Series]
    x: Axis
    y: Axis
    title: str = ""
    """Of its panel; empty: the view's name."""
    is_grouped: bool = False
    """Bars of one category beside each other instead of stacked."""
    lines: Sequence[Line] = ()
    band: tuple[float, float] | None = None
    """Shaded values of x."""
    has_diagonal: bool = False
    """A line where x and y are equal, with a band of 5 % around it."""
    labels: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    """Words at the end of a category's bar, with the bar's length: for who cannot point at it."""
    only_page: bool = False
    """Left out of the PNG where it has another view."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture: a PNG has a panel for each view, a page of HTML shows the chosen one."""

    name: str
    """Unlike those of the page's other pictures; letters, digits and dashes."""
    title: str
    evidence: str
    """Evidence of its figures, and remarks on them."""
    description: str
    """The picture in words, for who does not see it."""
    views: Mapping[str, View]
    choice: str = ""
    """Name of the choice."""
    is_png: bool = False
    """Whether the Markdown page shows it."""


def colored(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each different name."""
    return {name: COLORS[number % len(COLORS)] for number, name in enumerate(dict.fromkeys(names))}


def bars_by(
    points: Sequence[tuple[str, str, float]], *, unit: str, digits: int, opacity: Mapping[str, float] | None = None
) -> list[Series]:
    """Return lying bars of (series, category, value), a colour for each series.

    Args:
        points: In the order of their series.
        unit: Of the values.
        digits: Shown behind the point.
        opacity: By category.
    """
    return [
        Series(
            name=name, color=color, unit=unit, digits=digits,
            x=[value for series, _, value in points if series == name],
            y=(rows := [row for series, row, _ in points if series == name]),
            opacity=[opacity[row] for row in rows] if opacity else (),
        )
        for name, color in colored(series for series, _, _ in points).items()
    ]  # fmt: skip


def intervals(name: str, points: Mapping[str, Interval], color: str, *, unit: str = "", digits: int) -> Series:
    """Return means with their intervals by category."""
    means = points.values()
    return Series(
        name=name, mark="point", color=color, unit=unit, digits=digits, x=[one.mean for one in means], y=list(points),
        low=[one.low for one in means], high=[one.high for one in means],
        notes=[f"[{one.low:.{digits}f}, {one.high:.{digits}f}]" for one in means],
    )  # fmt: skip


def rounded_gib(size_bytes: float) -> float:
    """Return GiB in as many digits as a picture shows."""
    return round(to_gib(int(size_bytes)), 3)


def log_ticks(values: Iterable[float]) -> dict[float, str]:
    """Return ticks at 1, 2 and 5 times powers of ten around all values, with their names; each value above 0."""
    values = sorted(values)
    powers = range(floor(log10(values[0])), ceil(log10(values[-1])) + 1)
    ticks = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    return {
        tick: f"{tick:,.6g}" if tick < 1000 else format_count(tick)
        for tick in ticks
        if values[0] / 2 <= tick <= 2 * values[-1]
    }


def values_of(view: View, axis: str) -> list[float]:
    """Return every number on an axis."""
    return [value for series in view.series for value in getattr(series, axis) if not isinstance(value, str)]


def diagonal_ends(view: View) -> tuple[float, float]:
    """Return the ends of a diagonal through all points."""
    values = [*values_of(view, "x"), *values_of(view, "y")]
    return 0.85 * min(values), 1.15 * max(values)
