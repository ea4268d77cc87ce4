"""Trainers of others beside ours: what each recipe takes, and how fast it is."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridtrain.units import to_gib
from hybridvalidation.experiments.peers import PeerFigures, PeerScenario, Row, read_peer_records, read_peers, rows_of
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.drawing import Drawing, Trace, bar_axes, figure_of, upright_line
from hybridvalidation.show.kinds import PageChart

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")
_PALE = 0.4
_Planned = Sequence[tuple[Row, PeerFigures]]


def _draw(files: ScenarioFiles, results: Path) -> Mapping[str, Sequence[Drawing]]:
    records = read_peer_records(results / "records")
    drawings = {}
    for name, scenario in read_peers(files).items():
        found = [
            (row, figures)
            for row in rows_of(scenario, files, records)
            if (figures := row.figures(Evidence.PLANNED)) is not None
        ]
        if found:
            drawings[f"peers-{name}"] = [_memory(scenario, found), _speed(found)]
    return drawings


def _memory(scenario: PeerScenario, found: _Planned) -> Drawing:
    card = scenario.card.resolve()
    views = {
        "reserved on the card": _bars(
            found, [to_gib(figures.peak_reserved_bytes) for _, figures in found], "%{x:.2f} GiB"
        ),
        "in host memory": _bars(found, [to_gib(figures.host_peak_bytes) for _, figures in found], "%{x:.2f} GiB"),
    }
    told = ", ".join(
        f"{row.run.engine} {row.run.id} {to_gib(figures.peak_reserved_bytes):.1f} GiB"
        f"{'' if figures.fits else ' (does not fit)'}"
        for row, figures in found
    )
    line = upright_line(to_gib(card.memory_bytes), f"card: {to_gib(card.memory_bytes):.2f} GiB")
    return Drawing(
        name="memory", title="Peak memory of every recipe", choice="memory", views=views,
        evidence="planned, on the virtual card; recipes that do not fit are pale",
        says=f"Reserved on the card: {told}.",
        layout=bar_axes("GiB", len(found), rangemode="tozero"), layouts={"reserved on the card": line},
    )  # fmt: skip


def _speed(found: _Planned) -> Drawing:
    timed = [(row, figures) for row, figures in found if figures.step_time_s > 0]
    rates = [row.tokens_per_step / figures.step_time_s for row, figures in timed]
    told = ", ".join(f"{row.run.engine} {row.run.id} {rate:,.0f}" for (row, _), rate in zip(timed, rates, strict=True))
    return Drawing(
        name="speed", title="Tokens per second of every recipe",
        evidence="estimated, by a roofline of eager ops; of recipes that do not fit, on a larger card",
        says=f"Tokens per second: {told}.", views={"": _bars(timed, rates, "%{x:,.0f} tokens/s")},
        layout=bar_axes("tokens/s (estimated)", len(timed), rangemode="tozero"),
    )  # fmt: skip


def _bars(found: _Planned, values: Sequence[float], shown: str) -> list[Trace]:
    engines = list(dict.fromkeys(row.run.engine for row, _ in found))
    traces: list[Trace] = []
    for number, engine in enumerate(engines):
        of_engine = [
            (row, figures, value)
            for (row, figures), value in zip(found, values, strict=True)
            if row.run.engine == engine
        ]
        traces.append({
            "type": "bar", "orientation": "h", "name": engine, "y": [row.run.id for row, _, _ in of_engine],
            "x": [figure_of(value) for _, _, value in of_engine],
            "marker": {"color": _COLORS[number % len(_COLORS)],
                       "opacity": [1.0 if figures.fits else _PALE for _, figures, _ in of_engine]},
            "hovertemplate": f"%{{y}}: {shown}<extra>{engine}</extra>",
        })  # fmt: skip
    return traces


CHART = PageChart(order=30, draw=_draw)
