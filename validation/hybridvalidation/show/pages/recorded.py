"""Recorded against planned: every figure of every source, and a picture of all of them."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from hybridtrain.reports.tables import MARKDOWN, table, table_with_notes
from hybridtrain.units import GB
from hybridvalidation.experiments.recorded import (
    SECONDS,
    PeakScore,
    PlannedRun,
    Role,
    Row,
    peak_scores,
    read_planned,
    read_sources,
    score_table,
)
from hybridvalidation.experiments.recorded import Source as PublishedSource
from hybridvalidation.pictures.picture import Axis, Picture, Series, View, colored
from hybridvalidation.records.makers import made_by
from hybridvalidation.show.page import Page, Source, png_links
from hybridvalidation.show.results import Results

_HOW = (
    "Recorded: measured by others on CUDA and published, with code, configuration and versions. Planned: their "
    "libraries ran on a virtual card with the named versions; nothing was computed and no card was there. Loops are "
    "rewritten from their scripts, and so are the models of torchtitan, modded-nanogpt and convolutional networks; "
    "torchtune's recipes run as they are. The protocol of each source was written before predicting: what was fitted, "
    "on which run, and what counts as an error. Seen: figures that were known when what plans them was written or "
    "changed; they stand apart above. Errors are of predicted runs alone; fitted or omitted runs stand in the tables "
    "with their role."
)
_PEAKS = (
    "Absolute errors of peaks, planned over recorded, less 1. Null model: each peak is taken to be the geometric mean "
    "of its publication's others. First plans: the oldest ones on record, before faults that they showed were mended."
)


def headline(rows: Sequence[Row]) -> str:
    """Return the errors of peaks of memory and outcomes that were predicted before they were seen."""
    scores = peak_scores(rows)
    answers = [row for row in rows if row.role is Role.PREDICT and row.quantity == "oom" and row.error is not None]
    right, fit = sum(row.error == 0 for row in answers), sum(not row.recorded for row in answers)
    return (
        f"Predicted before they were seen: {sum(len(one.errors) for one in scores)} peaks of CUDA memory of "
        f"{len(scores)} publications, mean error {_pct(mean_of_publications(scores))}, each publication the same. "
        f"Of {len(answers)} outcomes {right} are right ({fit} fit, {len(answers) - fit} ran out of memory)."
    )


def mean_of_publications(scores: Sequence[PeakScore]) -> float | None:
    """Return the mean absolute error of publications, each the same."""
    return fmean(one.mean for one in scores) if scores else None


def peak_table(rows: Sequence[Row]) -> str:
    """Return errors of peaks of memory, a row for each publication, those seen before below."""
    told = [
        [
            f"{one.name}{', seen before' * (role is Role.SEEN)}", str(len(one.errors)),
            _pct(one.median), _pct(one.mean), _pct(one.null), _pct(one.first), f"{_error(one.worst)} ({one.worst.id})",
        ]
        for role in (Role.PREDICT, Role.SEEN) for one in peak_scores(rows, role)
    ]  # fmt: skip
    return table(("publication", "peaks", "median", "mean", "null model", "first plans", "worst"), told, MARKDOWN)


def _pct(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def predicted(rows: Sequence[Row], *, are_times: bool) -> list[Row]:
    """Return the rows of predicted runs that are of bytes, or of seconds; neither outcomes nor counts."""
    found = [row for row in rows if row.is_predicted and row.planned and row.quantity != "oom"]
    return [row for row in found if row.quantity.endswith(SECONDS) is are_times and not row.quantity.endswith("params")]


def by_kind(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows as series of a picture: one source and quantity each, blind ones or seen ones."""
    kinds = sorted({(row.source, row.quantity, row.role) for row in rows})
    return [[row for row in rows if (row.source, row.quantity, row.role) == kind] for kind in kinds]


def label_of(rows: Sequence[Row]) -> str:
    """Return the label of figures of one source and quantity."""
    first = rows[0]
    seen = ", seen before" if first.role is Role.SEEN else ""
    return f"{first.source}: {first.quantity.replace('_', ' ')} ({len(rows)}{seen})"


def _picture(rows: Sequence[Row]) -> Picture:
    kinds = {"memory": ("GB", GB, False), "step time": ("s", 1, True)}
    shown = {view: predicted(rows, are_times=are_times) for view, (_, _, are_times) in kinds.items()}
    return Picture(
        name="recorded", title="Planned against recorded", choice="figure", is_png=True, description=headline(rows),
        evidence="recorded: measured by others on CUDA; planned: without a card, times by a roofline; on the line both "
        "are equal",
        views={view: _view(found, *kinds[view][:2]) for view, found in shown.items() if found},
    )  # fmt: skip


def _view(rows: Sequence[Row], unit: str, size: float) -> View:
    kinds = by_kind(rows)
    color_of = colored(row.source for row in rows)
    colors = [color_of[points[0].source] for points in kinds]
    return View(
        series=[
            Series(
                name=label_of(points), mark="point", color=colors[number], unit=unit,
                symbol=colors[:number].count(colors[number]),
                x=[row.recorded / size for row in points], y=[(row.planned or 0.0) / size for row in points],
                notes=[f"{row.id} ({100 * (row.error or 0.0):+.2f} %)" for row in points],
            )
            for number, points in enumerate(kinds)
        ],
        x=Axis(title=f"{unit} recorded on CUDA by others", is_log=True),
        y=Axis(title=f"{unit} planned without a card", is_log=True), has_diagonal=True,
    )  # fmt: skip


def _source(name: str, source: PublishedSource, rows: Sequence[Row], planned: Sequence[PlannedRun]) -> list[str]:
    packages = next((record.packages for record in reversed(planned) if record.source == name), {})
    here = ", ".join(f"{package} {version}" for package, version in packages.items())
    rows_of_source = [
        [
            row.id, row.quantity.replace("_", " "), row.role.value.replace("_", " "),
            _value(row.quantity, row.recorded),
            "-" if row.planned is None else _value(row.quantity, row.planned),
            "-" if row.error is None else _error(row), row.why,
        ]
        for row in rows
    ]  # fmt: skip
    headers = ("run", "quantity", "role", "recorded", "planned", "error", "remark")
    return [
        f"## {source.title}",
        f"{source.where}; {source.card}, {source.versions}. Planned with {here or 'nothing yet'}.",
        source.protocol,
        table_with_notes(headers, rows_of_source, MARKDOWN),
    ]


def _value(quantity: str, value: float) -> str:
    if quantity == "oom":
        return "out of memory" if value else "fits"
    if quantity.endswith(SECONDS):
        return f"{1000 * value:.1f} ms"
    return f"{value:,.0f}" if quantity.endswith("params") else f"{value / GB:.3f} GB"


def _error(row: Row) -> str:
    if row.quantity == "oom":
        return "WRONG" if row.error else "right"
    return f"{100 * (row.error or 0):+.2f} %"


def _pages(results: Results) -> Iterator[Page]:
    planned, rows = read_planned(results.records), results.published
    if not planned:
        return
    picture = _picture(rows)
    parts = [
        "# Recorded by others, planned by us",
        headline(rows),
        peak_table(rows),
        _PEAKS,
        "All quantities by file, means over steps, counts and seconds too:",
        score_table(rows, MARKDOWN),
        _HOW,
    ]
    parts.append(png_links("recorded", [picture]))
    for name, source in read_sources(results.files.folder).items():
        parts += _source(name, source, [row for row in rows if row.source == name], planned)
    newest = {(record.source, record.run): record for record in planned}
    text = "\n\n".join([*parts, made_by(("", record) for record in newest.values())])
    yield Page(name="recorded", group="Evidence", text=text, pictures=[picture])


SOURCE = Source(order=5, pages=_pages)
