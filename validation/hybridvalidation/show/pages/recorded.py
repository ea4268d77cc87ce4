"""Recorded against planned: every figure of every source, and a picture of all of them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure
from tabulate import tabulate

from hybridtrain.reports.tables import MARKDOWN, write_page
from hybridtrain.units import GB
from hybridvalidation.experiments.recorded import (
    PlannedRun,
    Role,
    Row,
    Score,
    Source,
    read_planned,
    read_sources,
    rows_of,
    score_table,
    scores,
)
from hybridvalidation.records.makers import made_by
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.kinds import Page
from hybridvalidation.show.pictures import picture_settings

_HOW = (
    "Recorded: measured by others on CUDA and published, with code, configuration and versions. Planned: their "
    "libraries under the loop of their script in words of our own, torchtune's recipes as they are, torchtitan's model "
    "in our words too, run on a virtual card with the versions that are named; nothing was computed and no card was "
    "there. The protocol of each source "
    "was written before predicting: what was fitted, on which one run, and what counts as an error; figures that were"
    " known when what plans them was written or changed are called seen, and stand apart in the sentence above. The "
    "errors are of predicted runs alone; runs that were fitted on, or left out, stand in the tables with their role."
)
_MARKERS = "os^DvPX"
"""As many as share no divisor with the colors, which repeat after ten."""
_SECONDS = "seconds"
RESIDENT = "allocated_mean"
"""What stays between steps, nearly a count of weights: easier to plan than a peak."""


def write_recorded(files: ScenarioFiles, results: Path) -> list[Path]:
    """Write ``tables/recorded.md`` and ``plots/recorded.png``; nothing before anything is planned."""
    planned = read_planned(results / "records")
    sources = read_sources(files.folder)
    if not planned:
        return []
    rows = rows_of(sources, planned)
    parts = ["# Recorded by others, planned by us", headline(rows), score_table(rows, MARKDOWN), _HOW]
    parts.append("![recorded against planned](../plots/recorded.png)")
    for name, source in sources.items():
        parts += _source(name, source, [row for row in rows if row.source == name], planned)
    newest = {(record.source, record.run): record for record in planned}
    parts.append(made_by(("", record) for record in newest.values()))
    picture = results / "plots" / "recorded.png"
    figure = Figure(figsize=(7.0, 6.0), layout="constrained")
    draw(rows, figure)
    picture.parent.mkdir(parents=True, exist_ok=True)
    with picture_settings():
        figure.savefig(picture, dpi=110, metadata={"Software": None})
    return [write_page(results, "recorded", "\n\n".join(parts)), picture]


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


def draw(rows: Sequence[Row], figure: Figure) -> None:
    """Draw recorded against planned bytes on logarithmic axes."""
    axes = figure.subplots()
    shown = predicted(rows, are_times=False)
    for number, points in enumerate(by_kind(shown)):
        axes.scatter(
            [row.recorded / GB for row in points], [(row.planned or 0) / GB for row in points], s=22, alpha=0.7,
            zorder=3, marker=_MARKERS[number % len(_MARKERS)],
            label=label_of(points),
        )  # fmt: skip
    ends = [
        min(row.recorded for row in shown) / GB * 0.85,
        max(row.recorded for row in shown) / GB * 1.15,
    ]
    axes.plot(ends, ends, color="#444444", linewidth=0.8, zorder=2)
    axes.fill_between(
        ends, [0.95 * end for end in ends], [1.05 * end for end in ends], color="#eeeeee", zorder=1, label="within 5 %"
    )
    axes.set(xscale="log", yscale="log", xlabel="GB recorded on CUDA by others", ylabel="GB planned without a card")
    ticks = [tick for tick in (4, 6, 8, 10, 15, 20, 30, 40, 60, 80) if ends[0] <= tick <= ends[1]]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_title("Plans against what others measured", fontsize=11)
    axes.legend(fontsize=8)


def _source(name: str, source: Source, rows: Sequence[Row], planned: Sequence[PlannedRun]) -> list[str]:
    packages = next((record.packages for record in reversed(planned) if record.source == name), {})
    here = ", ".join(f"{package} {version}" for package, version in packages.items())
    table = [
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
        tabulate(table, headers=headers, tablefmt=MARKDOWN, disable_numparse=True),
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


PAGE = Page(order=5, group="Evidence", write=write_recorded)
