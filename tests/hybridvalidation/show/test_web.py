"""Pages for a browser: their text and data are those of the records. test_web_browser.py opens them."""

import json
import re
import shutil
from pathlib import Path

import pytest

from hybridtrain.cli.main import main
from hybridtrain.errors import ConfigError
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.web import site
from hybridvalidation.show.web.environment import environment_text
from hybridvalidation.show.web.markdown import render

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
    assert [*found.headings] == ["stated-targets", "stated-targets-2"]
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
    assert ">shown <img" in found.lead


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
    assert {"index", "hybrid", "targets", "environment"} <= {page.stem for page in pages}
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
    text = (folder / "hybrid.html").read_text(encoding="utf-8")
    table = Path("results/tables/hybrid.md").read_text(encoding="utf-8")
    stack = re.search(r"^\| ([\w-]+) +\| yes", table, re.MULTILINE)
    assert stack is not None
    assert f">{stack[1]}</th>" in text
    data = [json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', text)]
    assert len(data) == text.count('<figure class="chart"') >= 4
    assert all(view["data"] for spec in data for view in spec.values())
    overview = (folder / "index.html").read_text(encoding="utf-8")
    assert 'href="hybrid.html"' in overview
    assert "stated targets: " in overview


def test_every_record_has_its_environment() -> None:
    text = environment_text(Path("results/records"))
    files = list(Path("results/records").rglob("*.jsonl"))
    count = sum(len(path.read_text().splitlines()) for path in files)
    assert text.splitlines()[2].startswith(f"{count} records in {len(files)} files")
    table = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()[6:]]
    assert sum(int(cells[2]) for cells in table) == count


def test_pages_are_of_all_scenarios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "1b-16gb", "--html", str(tmp_path / "site")]) == 2
    assert "remove 1b-16gb" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


def test_without_records_there_is_nothing_to_tell(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hybridtrain validate"):
        site.write_site(ScenarioFiles(Path("scenarios")), tmp_path / "results", tmp_path / "site")
    assert not (tmp_path / "site").exists()
