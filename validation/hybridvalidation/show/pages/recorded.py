"""Recorded against planned: every figure of every source, and a picture of all of them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from hybridtrain.reports.tables import MARKDOWN, table_with_notes
from hybridtrain.units import GB
from hybridvalidation.pictures.picture import COLORS, Axis, Picture, Series, View
from hybridvalidation.recorded.command import score_table
from hybridvalidation.recorded.planned import PlannedRun, Row, Score, read_planned, scores
from hybridvalidation.recorded.source import Role, read_sources
from hybridvalidation.recorded.source import Source as PublishedSource
from hybridvalidation.records.makers import made_by
from hybridvalidation.show.page import Page, Source, png_links
from hybridvalidation.show.results import Results

_HOW = (
    "Recorded: measured by others on CUDA and published, with code, configuration and versions. Planned: their "
    "libraries under the loop of their script in words of our own, torchtune's recipes as they are, torchtitan's model "
    "in our words too, run on a virtual card with the versions that are named; nothing was computed and no card was "
    "there. The protocol of each source "
    "was written before predicting: what was fitted, on which one run, and what counts as an error; figures that were"
    " known when what plans them was written or changed are called seen, and stand apart in the sentence above. The "
    "errors are of predicted runs alone; runs that were fitted on, or left out, stand in the tables with their role."
)
_SECONDS = "seconds"
RESIDENT = "allocated_mean"
"""What stays between steps, nearly a count of weights: easier to plan than a peak."""


def headline(rows: Sequence[Row]) -> str:
    """Return in sentences how many figures of how many sources were met how closely; figures seen before apart."""
    blind = [row for row in rows if row.role is Role.PREDICT and row.error is not None]
    found = [row for row in blind if not row.quantity.endswith(("params", _SECONDS))]  # counted, not measured
    sizes = [row for row in found if row.quantity != "oom"]
    answers = [row for row in found if row.quantity == "oom"]
    publications = {row.source.partition("-")[0] for row in found}  # a second file of one has its name, a dash and more
    told = f"{len(sizes)} CUDA figures of memory and {len(answers)} outcomes of {len(publications)} sources predicted"
    if sizes:
        largest, count = Counter(row.source for row in sizes).most_common(1)[0]
        others = [row for row in sizes if row.source != largest]
        means = [row for row in sizes if row.quantity == RESIDENT]
        peaks = [row for row in sizes if row.quantity != RESIDENT]
        apart = [f"without {count} figures of {largest}: {_spread(others)}"] if others else []
        apart += [f"without {len(means)} means of allocated bytes: {_spread(peaks)}"] if means and peaks else []
        told += f": {_spread(sizes)}" + (f" ({'; '.join(apart)})" if apart else "")
    if answers:
        right, fit = sum(row.error == 0 for row in answers), sum(not row.recorded for row in answers)
        told += f"; {right} of {len(answers)} outcomes are right ({fit} fit, {len(answers) - fit} ran out of memory)"
    known = [_seen(each) for each in scores(rows) if each.worst.role is Role.SEEN]
    every = predicted(rows, are_times=False)
    if len(every) > len(sizes):
        told += f". With those that were seen before, {len(every)} figures: {_spread(every)}"
    return f"{told}. Seen before: {', '.join(known)}." if known else f"{told}."


def _seen(score: Score) -> str:
    if score.quantity == "oom":
        return f"{round(score.count * (1 - score.mean_absolute))} of {score.count} {score.source} outcomes right"
    what = f"{score.count} {score.source} {score.quantity}".replace("_", " ")
    return f"{what} {_percent(score.mean_absolute)} off on average (signed: {100 * score.mean_error:+.1f} %)"


def _spread(rows: Sequence[Row]) -> str:
    errors = sorted(abs(row.error or 0.0) for row in rows)
    high = errors[int(0.9 * len(errors))]
    middle, largest = _percent(median(errors), 2), _percent(errors[-1], 0)
    return f"median error {middle}, nine in ten within {_percent(high)}, largest {largest}"


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def predicted(rows: Sequence[Row], *, are_times: bool) -> list[Row]:
    """Return the rows of predicted runs that are of bytes, or of seconds; neither outcomes nor counts."""
    found = [row for row in rows if row.is_predicted and row.planned and row.quantity != "oom"]
    return [
        row for row in found if row.quantity.endswith(_SECONDS) is are_times and not row.quantity.endswith("params")
    ]


def by_kind(rows: Sequence[Row]) -> list[list[Row]]:
    """Return what a picture shows as one: rows of one source and quantity, blind ones or seen ones."""
    kinds = sorted({(row.source, row.quantity, row.role) for row in rows})
    return [[row for row in rows if (row.source, row.quantity, row.role) == kind] for kind in kinds]


def label_of(rows: Sequence[Row]) -> str:
    """Return what a picture calls figures of one source and quantity."""
    first = rows[0]
    seen = ", seen before" if first.role is Role.SEEN else ""
    return f"{first.source}: {first.quantity.replace('_', ' ')} ({len(rows)}{seen})"


def _picture(rows: Sequence[Row]) -> Picture:
    kinds = {"memory": ("GB", GB, False), "step time": ("s", 1, True)}
    shown = {view: predicted(rows, are_times=are_times) for view, (_, _, are_times) in kinds.items()}
    return Picture(
        name="recorded", title="Planned against recorded", choice="figure", is_png=True, says=headline(rows),
        evidence="recorded: measured by others on CUDA; planned: without a card, times by a roofline; on the line both "
        "are equal",
        views={view: _view(found, *kinds[view][:2]) for view, found in shown.items() if found},
    )  # fmt: skip


def _view(rows: Sequence[Row], unit: str, size: float) -> View:
    return View(
        series=[
            Series(
                name=label_of(points), mark="point", color=COLORS[number % len(COLORS)], symbol=number, unit=unit,
                x=[row.recorded / size for row in points], y=[(row.planned or 0.0) / size for row in points],
                notes=[f"{row.id} ({100 * (row.error or 0.0):+.2f} %)" for row in points],
            )
            for number, points in enumerate(by_kind(rows))
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
    if quantity.endswith(_SECONDS):
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
    parts = ["# Recorded by others, planned by us", headline(rows), score_table(rows, MARKDOWN), _HOW]
    parts.append(png_links("recorded", [picture]))
    for name, source in read_sources(results.files.folder).items():
        parts += _source(name, source, [row for row in rows if row.source == name], planned)
    newest = {(record.source, record.run): record for record in planned}
    text = "\n\n".join([*parts, made_by(("", record) for record in newest.values())])
    yield Page(name="recorded", group="Evidence", text=text, pictures=[picture])


SOURCE = Source(order=5, pages=_pages)
