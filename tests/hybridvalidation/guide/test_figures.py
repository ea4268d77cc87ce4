"""Marked figures in pages: filled from records, checked, and refused where nobody knows them."""

import json
import re
import shutil
from pathlib import Path

import pytest

from hybridtrain.cli.main import main
from hybridtrain.errors import ConfigError
from hybridvalidation.guide import figures as module
from hybridvalidation.guide.figures import Figures, filled
from hybridvalidation.scenario_files import ScenarioFiles

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def figures() -> Figures:
    return Figures(ScenarioFiles(ROOT / "scenarios"), ROOT / "results")


def test_a_figure_in_a_sentence_and_one_in_lines_of_its_own_are_filled(figures: Figures) -> None:
    text = "a <!--figure held all-->7<!--/figure--> b\n<!--figure scenario 1b-16gb tight-->\n\nold\n\n<!--/figure-->\n"
    first, *table = filled(text, figures, "page").splitlines()
    assert first == "a <!--figure held all-->51<!--/figure--> b"
    assert table[0] == "<!--figure scenario 1b-16gb tight-->"
    assert (table[1], table[-2], table[-1]) == ("", "", "<!--/figure-->")  # a table of Markdown needs blank lines
    assert table[4].startswith("| tight")
    again = "\n".join([first, *table, ""])
    assert filled(again, figures, "page") == again
    dense = filled(text.replace("\n\n", "\n"), figures, "page")  # as in the README
    assert dense.splitlines()[2].startswith("| stack")
    assert filled(dense, figures, "page") == dense


@pytest.mark.parametrize(
    ("marker", "told"),
    [
        ("helt all", "figure 'helt' is unknown; did you mean 'held'?"),
        ("held al", "word 'al' is unknown; did you mean 'all'?"),
        ("held", "missing 1 required positional argument: 'word'"),
        ("_targets", "figure '_targets' is unknown"),
    ],
)
def test_a_marker_that_nobody_knows_is_refused(figures: Figures, marker: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        filled(f"a <!--figure {marker}--><!--/figure-->", figures, "page.md")
    assert told in str(caught.value)
    assert "page.md" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["<!--figure held all--><!--/figure--> hold", "- a\n  <!--figure held all--><!--/figure-->"]
)
def test_a_figure_of_a_sentence_does_not_begin_a_line(figures: Figures, text: str) -> None:
    with pytest.raises(ConfigError, match="begins a line, which Markdown takes for HTML"):
        filled(text, figures, "page.md")


def test_a_figure_takes_the_words_of_its_marker(figures: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "<!--figure options tiny rtx-4090-->\n\nold\n\n<!--/figure-->\n"
    monkeypatch.setattr(module, "training_options", lambda *words: f"asked {words}")
    assert "asked ('tiny', 'rtx-4090', '64GiB')" in filled(text, figures, "page")


def test_report_fills_and_check_names_what_is_not_as_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results/records").mkdir(parents=True)
    for name in ("scenarios/stacks", "docs"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("1b-16gb", "targets"):
        shutil.copy(ROOT / f"scenarios/{name}.toml", tmp_path / "scenarios")
    for path in (ROOT / "scenarios/stacks").glob("*.toml"):
        shutil.copy(path, tmp_path / "scenarios/stacks")
    shutil.copy(ROOT / "results/records/1b-16gb.jsonl", tmp_path / "results/records")
    page = tmp_path / "docs/page.md"
    page.write_text("# 1B\n\n<!--figure scenario 1b-16gb tight-->\n<!--/figure-->\n")
    assert main(["report", "--check"]) == 1
    assert {line.partition(":")[0] for line in capsys.readouterr().out.splitlines()} == {
        "docs/page.md", "results/tables/1b-16gb.md", "results/tables/targets.md",
    }  # fmt: skip
    assert "| tight" not in page.read_text(), "a check writes nothing"
    assert main(["report"]) == 0
    row = re.search(r"\| tight +\| yes +\| (\d+\.\d\d) +\|", page.read_text())
    assert row is not None
    newest = [json.loads(line) for line in (tmp_path / "results/records/1b-16gb.jsonl").read_text().splitlines()]
    used = next(record["memory"]["device_used_bytes"] for record in reversed(newest) if record["stack"] == "tight")
    assert row[1] == f"{used / 2**30:.2f}"
    page.write_text(page.read_text().replace(row[1], "7.77"))
    capsys.readouterr()
    assert main(["report", "--check"]) == 1
    assert capsys.readouterr().out == "docs/page.md: outdated; run: hybridtrain report\n"
