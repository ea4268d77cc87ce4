"""Pictures as matplotlib and as plotly.js draw them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from plotly.graph_objects import Figure

from hybridtrain.models.model_config import Workload
from hybridtrain.plan.compose import compose
from hybridtrain.planning.dry_runs import dry_run
from hybridtrain.planning.figures import Timeline, memory_figures
from hybridtrain.units import GIB, to_gib
from hybridtrain.virtual_gpu.cards.card import Host, find_card
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.pictures.picture import COLORS, PALE, Axis, Line, Picture, Series, View
from hybridvalidation.pictures.plotly import page_spec
from hybridvalidation.pictures.png import figure_of, png_of
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.report import all_pages
from hybridvalidation.show.results import Results
from hybridvalidation.show.scenario_pictures import scenario_pictures, thinned
from tiny_models import GPT2_UNTIED
from tiny_runs import SCENARIO, record

CARD = find_card("rtx-3090")
PLANNED = memory_figures(dry_run(GPT2_UNTIED, compose([]), CARD, Workload(micro_batch_size=1, seq_len=8)))
LEAN = replace(PLANNED, host_peak_bytes=3 << 30, host_by_class={"weight": 2 << 30})
RUN = ScenarioRun(
    scenario=replace(SCENARIO, host=Host(memory_gib=8, reserved_gib=4)), stacks={}, num_cached=2,
    records={
        ("dry_run", "vanilla"): record(memory=replace(PLANNED, fits=False)),
        ("dry_run", "lean"): record(memory=LEAN, stack="lean"),
    },
)  # fmt: skip


def pictures_of(run: ScenarioRun = RUN) -> dict[str, Picture]:
    return {picture.name: picture for picture in scenario_pictures(run)}


def run_of(**weights_gib: int) -> ScenarioRun:
    """Return a run whose stacks hold so many GiB of weights and nothing else."""
    records = {}
    for stack, gib in weights_gib.items():
        by_class = dict.fromkeys(PLANNED.by_class, 0) | {"weight": gib * GIB}
        memory = replace(PLANNED, fits=gib < 24, peak_reserved_bytes=gib * GIB, by_class=by_class)
        records["dry_run", stack] = record(memory=memory, stack=stack)
    return replace(RUN, scenario=replace(SCENARIO, stacks=tuple(weights_gib)), records=records)


def panels(picture: Picture) -> list[Axes]:
    return figure_of(picture).axes


def check(picture: Picture) -> None:
    """Raise for a key or a value that plotly.js does not know, for a series without a point or a point that is none.

    No two series of a view look alike.
    """
    assert picture.description
    assert picture.evidence
    for view in picture.views.values():
        looks = {series.name: (series.color, series.symbol) for series in view.series}
        assert len({*looks.values()}) == len(looks), (picture.name, looks)
    for view in page_spec(picture).values():
        text = json.dumps(view, allow_nan=False)
        plain = json.loads(re.sub(r'"\$\w+"', '"#000000"', text))
        found = Figure(data=plain["data"], layout=plain["layout"])
        assert plain["layout"]["height"] > 100
        assert found.data
        assert all(len(trace.x) == len(trace.y) > 0 for trace in found.data)


def test_plotly_takes_what_is_drawn_of_a_scenario() -> None:
    found = pictures_of()
    assert [*found] == ["peak", "blocks", "timeline", "speed"]  # nothing was trained
    for picture in found.values():
        check(picture)


def test_plotly_takes_what_is_drawn_of_committed_records() -> None:
    pages = all_pages(Results(ScenarioFiles(Path("scenarios")), Path("results")))
    drawn = {page.name: page.pictures for page in pages if page.pictures}
    assert {"1b-16gb", "recorded", "executed", "kernels", "attention", "study-quality-ladder"} <= {*drawn}
    assert any("peers-" in name for name in drawn)
    assert "accuracy" in {picture.name for picture in drawn["techniques"]}
    for pictures in drawn.values():
        assert len({picture.name for picture in pictures}) == len(pictures)
        for picture in pictures:
            check(picture)


@pytest.mark.parametrize("marks", [("bar", "bar"), ("area", "area"), ("line", "point")])
@pytest.mark.parametrize("is_lying", [True, False])
def test_every_mark_is_drawn(marks: tuple[str, str], is_lying: bool) -> None:
    names, numbers = ["a", "b"], [1.0, 2.0]
    has_names = "bar" in marks
    series = [
        Series(
            name=f"{mark} {number}", mark=mark, color=COLORS[number], x=numbers if is_lying or not has_names else names,  # type: ignore[arg-type]
            y=names if is_lying and has_names else numbers,
        )
        for number, mark in enumerate(marks)
    ]  # fmt: skip
    x, y = Axis(names=() if is_lying or not has_names else names), Axis(names=names if is_lying and has_names else ())
    view = View(series=series, x=x, y=y, is_grouped=True, lines=[Line(at=1, text="l")], band=(1, 2))
    picture = Picture(name="p", title="t", evidence="e", description="s", views={"": view})
    check(picture)
    assert png_of(picture).startswith(b"\x89PNG")


def test_bars_add_up_to_what_is_reserved_and_the_context() -> None:
    picture = pictures_of()["peak"]
    series = picture.views["on the card"].series
    total = sum(float(part.x[0]) for part in series)
    # Each part is rounded to thousandths of a GiB.
    expected = to_gib(PLANNED.peak_reserved_bytes + CARD.context_bytes)
    assert total == pytest.approx(expected, abs=0.0005 * len(series))
    assert [part.y for part in series] == [["lean", "vanilla"]] * len(series)  # what fits comes first
    assert series[0].opacity == [1.0, PALE]
    assert "vanilla" in picture.description
    assert "does not fit" in picture.description


@pytest.mark.parametrize(("vanilla_gib", "is_cut"), [(30, False), (900, True)])
def test_a_stack_that_fits_is_seen_beside_one_many_times_the_card(vanilla_gib: int, is_cut: bool) -> None:
    picture = pictures_of(run_of(vanilla=vanilla_gib, lean=12))["peak"]
    (axes,) = panels(picture)
    _, end = axes.get_xlim()
    assert end <= 1.5 * 24 + 1e-9
    shown = page_spec(picture)["on the card"]["layout"]["xaxis"].get("range")
    assert (shown is not None) is is_cut
    labels = [text.get_text().strip() for text in axes.texts]
    assert labels == ["12.4", f"{vanilla_gib}.4 (does not fit)"]  # with the context
    assert all(0 < text.xy[0] <= end for text in axes.texts)  # type: ignore[attr-defined]


def test_host_memory_has_a_panel_of_its_own_with_its_limit() -> None:
    picture = pictures_of()["peak"]
    card, host = panels(picture)
    assert len(card.texts) == 2
    assert [text.get_text().strip() for text in host.texts] == ["3.0"]  # of what lies there
    assert "host memory for tensors: 4.00 GiB" in host.get_legend_handles_labels()[1]
    assert page_spec(picture)["in host memory"]["layout"]["shapes"][0]["x0"] == 4
    assert "4.00 GiB" in picture.description


def test_blocks_add_up_to_the_peak() -> None:
    picture = pictures_of()["blocks"]
    assert list(picture.views) == ["lean", "vanilla"]
    view = picture.views["lean"]
    total = sum(float(size) for part in view.series for size in part.y)
    assert total == pytest.approx(to_gib(PLANNED.peak_allocated_bytes))
    units = view.x.names
    assert units[0] == "embedding"
    assert units.index("block.0") < units.index("block.3") < units.index("head")


def test_a_timeline_is_the_records_own() -> None:
    found = PLANNED.timeline
    assert found is not None
    series = pictures_of()["timeline"].views["lean"].series
    assert {len(part.x) for part in series} == {len(found.times_s)}
    drawn = page_spec(pictures_of()["timeline"])["lean"]["data"]
    assert drawn[0]["x"] == pytest.approx(found.times_s, rel=1e-5)  # a step of microseconds too
    heights = [sum(map(float, sizes)) for sizes in zip(*(part.y for part in series), strict=True)]
    totals = [sum(sizes) for sizes in zip(*found.by_class.values(), strict=True)]
    assert heights == pytest.approx([to_gib(total) for total in totals], abs=0.0005 * len(series))


def test_a_png_shows_timelines_of_stacks_that_fit_and_is_as_high_as_a_page() -> None:
    picture = pictures_of(run_of(vanilla=30, lean=12))["timeline"]
    assert [*picture.views] == ["lean", "vanilla"]
    figure = figure_of(picture)
    (axes,) = figure.axes
    assert axes.get_title(loc="left").startswith("lean")
    assert "do not fit: vanilla" in figure.get_suptitle().replace("\n", " ")
    many = pictures_of(run_of(**{f"s{number}": 12 for number in range(12)}))["timeline"]
    assert figure_of(many).get_figheight() <= 14


@pytest.mark.parametrize("peak_at", [0, 4_999, 9_999])
def test_a_long_timeline_keeps_its_peak_and_its_ends_moment(peak_at: int) -> None:
    sizes = [index * 7 % 100 for index in range(10_000)]
    sizes[peak_at] = 1000
    long = Timeline(times_s=tuple(map(float, range(10_000))), by_class={"weight": tuple(sizes), "grad": (1,) * 10_000})
    kept = thinned(long, 100)
    assert len(kept) <= 100
    assert kept == sorted(kept)
    assert peak_at in kept
    assert kept[-1] == 9_999
    assert thinned(long, 10_000) == list(range(10_000))
