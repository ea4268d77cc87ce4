"""Pages of other trainers beside this one: one for each scenario that has a file of peers."""

from collections.abc import Iterator, Sequence

from hybridtrain.planning.time_error import TIME_ERROR, WAITING_ERROR
from hybridtrain.reports.tables import MARKDOWN
from hybridtrain.units import format_count, to_gib
from hybridtrain.virtual_gpu.cards.roofline import time_errors
from hybridvalidation.experiments.peers import (
    PeerFigures,
    PeerScenario,
    Row,
    peer_table,
    read_peer_records,
    read_peers,
    rows_of,
    versions_lines,
)
from hybridvalidation.pictures.picture import PALE, Axis, Line, Picture, View, bars_by
from hybridvalidation.records.makers import made_by
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.show.page import Page, Source
from hybridvalidation.show.results import Results

_HOW = (
    "Planned: the engine's own trainer ran two steps on a virtual card; nothing was computed and no card was there. "
    "Peaks are of allocated and of reserved bytes; host bytes are those of tensors. Where a recipe does not fit, "
    "they are its needs on a larger card; the remark says where it was refused. Step times are estimated by a "
    f"roofline of eager ops, {100 * TIME_ERROR:.1f} % off on average over recorded steps of repositories left out of "
    f"its fit; where a step waits for copies the error is {100 * WAITING_ERROR:.0f} %. Compiled rows: the graph "
    "is traced and cut as for Inductor. Not among the recipes: Unsloth. It runs on the virtual card, but no "
    "published figure of it was met yet. It may be faster than all rows."
)
_TRAINED = (
    "Executed small: the same recipe trained five steps on the CPU, at a size for that; the loss is finite and falls."
)
_Planned = Sequence[tuple[Row, PeerFigures]]


def spread_text() -> str:
    """Return a sentence on how far a ratio of two recipes' speeds may be off."""
    found = time_errors()["ratio"]
    return (
        f"Between recipes: of two recorded steps of one trainer, model, length and card ({found.runs:,} pairs of "
        f"{found.sources} repositories) the estimated ratio was {100 * found.mean_absolute:.0f} % off on average. "
        "Smaller differences decide nothing. No recorded run tests the speed of a step with 4-bit weights, or of a "
        "trainer of ours."
    )


def peers_text(scenario: PeerScenario, rows: Sequence[Row]) -> str:
    """Return the page of a scenario."""
    card, workload, memory = scenario.card.resolve(), scenario.workload, scenario.host.memory_gib
    made = [("", record) for row in rows for record in row.records.values()]
    facts = (
        f"{format_count(scenario.model.resolve().num_params)} parameters on {card.name} "
        f"({to_gib(card.memory_bytes):.2f} GiB), {scenario.tokens_per_step} tokens per step "
        f"({workload.batch_size} x {workload.seq_len}){'' if memory is None else f', {memory:g} GiB of host memory'}."
    )
    versions = "\n".join(f"- {line}" for line in versions_lines(rows))
    trained = _TRAINED if any(Evidence.EXECUTED in row.records for row in rows) else ""
    how = " ".join(part for part in (_HOW, spread_text(), trained) if part)
    parts = [
        f"# {scenario.title}", facts, scenario.description.strip(), peer_table(rows, MARKDOWN), how, versions,
        made_by(made),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part)


def _pictures(scenario: PeerScenario, rows: Sequence[Row]) -> list[Picture]:
    found = [(row, figures) for row in rows if (figures := row.figures(Evidence.PLANNED)) is not None]
    timed = [(row, figures) for row, figures in found if figures.step_time_s > 0]
    gib = to_gib(scenario.card.resolve().memory_bytes)
    reserved = [to_gib(figures.peak_reserved_bytes) for _, figures in found]
    host = [to_gib(figures.host_peak_bytes) for _, figures in found]
    rates = [row.tokens_per_step / figures.step_time_s for row, figures in timed]
    told = _told(found, [f"{size:.1f} GiB{'' if figures.fits else ' (does not fit)'}"
                         for (_, figures), size in zip(found, reserved, strict=True)])  # fmt: skip
    card = Line(at=gib, text=f"card: {gib:.2f} GiB")
    memory = Picture(
        name="memory", title="Peak memory of every recipe", choice="memory",
        evidence="planned, on the virtual card; recipes that do not fit are pale",
        description=f"Reserved on the card: {told}.",
        views={"reserved on the card": _bars(found, reserved, "GiB", 2, [card]),
               "in host memory": _bars(found, host, "GiB", 2, [])},
    )  # fmt: skip
    speed = Picture(
        name="speed", title="Tokens per second of every recipe",
        evidence="estimated, by a roofline of eager ops; of recipes that do not fit, on a larger card",
        description=f"Tokens per second: {_told(timed, [f'{rate:,.0f}' for rate in rates])}.",
        views={"": _bars(timed, rates, "tokens/s", 0, [])},
    )  # fmt: skip
    return [memory, speed] if found else []


def _told(found: _Planned, values: Sequence[str]) -> str:
    return ", ".join(f"{row.run.engine} {row.run.id} {value}" for (row, _), value in zip(found, values, strict=True))


def _bars(found: _Planned, values: Sequence[float], unit: str, digits: int, lines: Sequence[Line]) -> View:
    bars = [(row.run.engine, row.run.id, value) for (row, _), value in zip(found, values, strict=True)]
    opacity = {row.run.id: 1.0 if figures.fits else PALE for row, figures in found}
    return View(
        series=bars_by(bars, unit=unit, digits=digits, opacity=opacity), x=Axis(title=unit),
        y=Axis(names=list(opacity)), lines=lines,
    )  # fmt: skip


def _pages(results: Results) -> Iterator[Page]:
    records = read_peer_records(results.records)
    for name, scenario in read_peers(results.files).items():
        rows = rows_of(scenario, results.files, records)
        if any(row.records for row in rows):
            text, pictures = peers_text(scenario, rows), _pictures(scenario, rows)
            yield Page(name=f"peers-{name}", group="Comparisons", text=text, pictures=pictures)


SOURCE = Source(order=6, pages=_pages)
