"""Pages for a browser: their text and data are those of the records. test_web_browser.py opens them."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from plotly.graph_objects import Figure

from hybridtrain.cli.main import main
from hybridtrain.errors import ConfigError
from hybridtrain.models.model_config import Workload
from hybridtrain.plan.compose import compose
from hybridtrain.planning.dry_runs import dry_run
from hybridtrain.planning.figures import Timeline, memory_figures
from hybridtrain.units import to_gib
from hybridtrain.virtual_gpu.cards.card import Host, find_card
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.charts import memory, timeline
from hybridvalidation.show.drawing import Drawing
from hybridvalidation.show.kinds import Chart, PageChart, kinds_in
from hybridvalidation.show.web import site
from hybridvalidation.show.web.environment import environment_text
from hybridvalidation.show.web.markdown import render
from tiny_models import GPT2_UNTIED
from tiny_runs import SCENARIO, record

PLANNED = memory_figures(
    dry_run(GPT2_UNTIED, compose([]), find_card("rtx-3090"), Workload(micro_batch_size=1, seq_len=8))
)
RUN = ScenarioRun(
    scenario=replace(SCENARIO, host=Host(memory_gib=8, reserved_gib=4)), stacks={}, num_cached=2,
    records={
        ("dry_run", "vanilla"): record(memory=replace(PLANNED, fits=False)),
        ("dry_run", "lean"): record(
            memory=replace(PLANNED, host_peak_bytes=3 << 30, host_by_class={"weight": 2 << 30}), stack="lean"
        ),
    },
)  # fmt: skip


def check(drawing: Drawing) -> None:
    """Raise for a key or a value that plotly.js does not know, for a series without a point or a point that is none."""
    for view, traces in drawing.views.items():
        text = json.dumps([traces, drawing.layout, drawing.layouts], allow_nan=False)
        plain = json.loads(re.sub(r'"\$\w+"', '"#000000"', text))
        found = Figure(data=plain[0], layout=plain[1])
        Figure(layout=plain[2].get(view, {}))
        assert found.data
        assert all(len(trace.x) == len(trace.y) > 0 for trace in found.data)
        assert drawing.says
        assert drawing.evidence


def drawn(chart: Chart) -> Drawing:
    (found,) = chart.draw(RUN)
    return found


@pytest.mark.parametrize("chart", kinds_in("charts", Chart))
def test_plotly_takes_what_is_drawn(chart: Chart) -> None:
    for drawing in chart.draw(RUN):
        check(drawing)


@pytest.mark.parametrize("chart", kinds_in("charts", PageChart))
def test_plotly_takes_what_is_drawn_of_committed_records(chart: PageChart) -> None:
    drawings = chart.draw(ScenarioFiles(Path("scenarios")), Path("results"))
    assert any(drawings.values())
    for drawing in (each for found in drawings.values() for each in found):
        check(drawing)


def test_bars_add_up_to_what_is_reserved_and_the_context() -> None:
    drawing = drawn(memory.CARD)
    (traces,) = drawing.views.values()
    total = sum(trace["x"][0] for trace in traces)  # type: ignore[index]
    context = find_card("rtx-3090").context_bytes
    # Each part is rounded to thousandths of a GiB.
    assert total == pytest.approx(to_gib(PLANNED.peak_reserved_bytes + context), abs=0.0005 * len(traces))
    assert [trace["y"] for trace in traces] == [["lean", "vanilla"]] * len(traces)  # what fits comes first
    assert traces[0]["marker"]["opacity"] == [1.0, memory._PALE]  # type: ignore[index]
    assert "vanilla" in drawing.says
    assert "does not fit" in drawing.says


def test_blocks_add_up_to_the_peak() -> None:
    drawing = drawn(memory.BLOCKS)
    assert list(drawing.views) == ["lean", "vanilla"]
    traces = drawing.views["lean"]
    total = sum(sum(trace["y"]) for trace in traces)  # type: ignore[arg-type]
    assert total == pytest.approx(to_gib(PLANNED.peak_allocated_bytes), abs=0.00005 * len(PLANNED.by_unit))
    units = drawing.layout["xaxis"]["categoryarray"]  # type: ignore[index]
    assert units[0] == "embedding"
    assert units.index("block.0") < units.index("block.3") < units.index("head")


def test_the_host_has_its_limit() -> None:
    drawing = drawn(memory.HOST)
    assert drawing.layout["shapes"][0]["x0"] == 4  # type: ignore[index]
    assert "4.0 GiB" in drawing.says


def test_a_timeline_is_the_records_own() -> None:
    found = PLANNED.timeline
    assert found is not None
    traces = drawn(timeline.CHART).views["lean"]
    assert {len(trace["x"]) for trace in traces} == {len(found.times_s)}  # type: ignore[arg-type]
    heights = [sum(sizes) for sizes in zip(*(trace["y"] for trace in traces), strict=True)]  # type: ignore[arg-type, misc]
    totals = [sum(sizes) for sizes in zip(*found.by_class.values(), strict=True)]
    assert heights == pytest.approx([to_gib(total) for total in totals], abs=0.0005 * len(traces))


@pytest.mark.parametrize("peak_at", [0, 4_999, 9_999])
def test_a_long_timeline_keeps_its_peak_and_its_ends_moment(peak_at: int) -> None:
    sizes = [index * 7 % 100 for index in range(10_000)]
    sizes[peak_at] = 1000
    long = Timeline(times_s=tuple(map(float, range(10_000))), by_class={"weight": tuple(sizes), "grad": (1,) * 10_000})
    kept = timeline.thinned(long, 100)
    assert len(kept) <= 100
    assert kept == sorted(kept)
    assert peak_at in kept
    assert kept[-1] == 9_999
    assert timeline.thinned(long, 10_000) == list(range(10_000))


TEXT = """# A title

Two lines <script>alert(1)</script> with [a page](../tables/recorded.md), [none](../x.toml), [bad](javascript:alert(2)).

![shown](../plots/shown.png) ![new](../plots/new.png)

## Stated targets

| target | verdict | because |
|--------|---------|---------|
| a&b    | refuted | because of this and of that, which is a long sentence |

## Stated targets
"""
PLACES = {"../tables/recorded.md": "recorded.html", "../plots/new.png": "pictures/new.png"}


def test_markdown_becomes_tables_that_say_what_they_are() -> None:
    found = render(TEXT, PLACES.get)
    assert found.title == "A title"
    assert [heading.id for heading in found.headings] == ["stated-targets", "stated-targets-2"]
    assert "<caption>Stated targets</caption>" in found.html
    assert '<th scope="row">a&amp;b</th>' in found.html
    assert '<td class="verdict refuted">refuted</td>' in found.html
    assert '<td class="long">' in found.html
    assert 'role="region" aria-label="Table 1: Stated targets" tabindex="0"' in found.html


def test_markup_of_others_is_text() -> None:
    found = render(TEXT, PLACES.get)
    assert "<script" not in found.lead + found.html
    assert "javascript:" not in re.findall(r'href="([^"]*)"', found.lead)
    assert re.findall(r'(?:href|src)="([^"]*)"', found.lead) == ["recorded.html", "pictures/new.png"]
    assert "Drawn on this page" in found.lead


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of one scenario, from its committed records."""
    base = tmp_path_factory.mktemp("web")
    shutil.copytree("scenarios/stacks", base / "scenarios" / "stacks")
    for name in ("hybrid.toml", "targets.toml"):
        shutil.copy(Path("scenarios", name), base / "scenarios" / name)
    (base / "results" / "records").mkdir(parents=True)
    shutil.copy("results/records/hybrid.jsonl", base / "results" / "records")
    site.write_site(ScenarioFiles(base / "scenarios"), base / "results", base / "site")
    assert sorted(path.name for path in (base / "results").iterdir()) == ["records"]  # nothing is written there
    return base / "site"


def test_every_link_leads_to_a_file_of_the_folder(folder: Path) -> None:
    pages = sorted(folder.glob("*.html"))
    assert {"index", "scenario-hybrid", "targets", "environment"} <= {page.stem for page in pages}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r'(?:href|src)="([^"]*)"', text):
            path, _, place = target.partition("#")
            assert path in {"", "data:,"} or (folder / path).is_file(), (page.name, target)
            assert path or not place or f'id="{place}"' in text, (page.name, target)
    for asset in ("report.js", "report.css", "theme.js", "plotly.min.js"):
        assert (folder / asset).stat().st_size > 100
    assert not re.search(r"https?://", "".join((folder / name).read_text() for name in ("report.js", "report.css")))


def test_a_page_has_the_text_and_the_data_of_its_scenario(folder: Path) -> None:
    text = (folder / "scenario-hybrid.html").read_text(encoding="utf-8")
    table = Path("results/tables/hybrid.md").read_text(encoding="utf-8")
    stack = re.search(r"^\| ([\w-]+) +\| yes", table, re.MULTILINE)
    assert stack is not None
    assert f">{stack[1]}</th>" in text
    data = [json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', text)]
    assert len(data) == text.count('<figure class="chart"') >= 4
    assert all(traces for spec in data for traces in spec["views"].values())
    overview = (folder / "index.html").read_text(encoding="utf-8")
    assert 'href="scenario-hybrid.html"' in overview
    assert "stated targets: " in overview


def test_every_record_has_its_environment() -> None:
    text = environment_text(Path("results/records"))
    files = list(Path("results/records").rglob("*.jsonl"))
    count = sum(len(path.read_text().splitlines()) for path in files)
    assert text.splitlines()[2].startswith(f"{count} records in {len(files)} files")
    table = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()[6:]]
    assert sum(int(cells[2]) for cells in table) == count


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(site, "_NEEDED", {"no_such_module": "no-such-package"})
    with pytest.raises(ConfigError, match=r"not installed: no-such-package; .*'hybridtrain\[html\]'"):
        site.write_site(ScenarioFiles(Path("scenarios")), Path("results"), tmp_path)


def test_pages_are_of_all_scenarios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "1b-16gb", "--html", str(tmp_path / "site")]) == 2
    assert "leave out 1b-16gb" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


def test_without_records_there_is_nothing_to_tell(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hybridtrain validate"):
        site.write_site(ScenarioFiles(Path("scenarios")), tmp_path / "results", tmp_path / "site")
    assert not (tmp_path / "site").exists()
