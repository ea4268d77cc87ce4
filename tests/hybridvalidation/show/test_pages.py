"""A page is a file that is found by being there; every page says who made its records."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hybridtrain.reports.tables import MARKDOWN, TERMINAL, table, table_with_notes
from hybridtrain.run.environment import read_environment
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.records.makers import made_by
from hybridvalidation.records.record import Record
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show import pages
from hybridvalidation.show.page import sources
from hybridvalidation.show.pages.scenario import report_text
from hybridvalidation.show.report import rebuild, stale_pages, write_pages
from hybridvalidation.show.results import Results
from tiny_runs import SCENARIO, record

RUN = ScenarioRun(scenario=SCENARIO, stacks={}, records={("dry_run", "vanilla"): record(memory=None)}, num_cached=1)
NEW_PAGE = """
from hybridvalidation.show.page import Page, Source
SOURCE = Source(order=15, pages=lambda results: [Page(name="mine", group="Mine", text="# Of mine")])
"""


def nothing(folder: Path) -> Results:
    return Results(ScenarioFiles(folder), folder)


def test_a_page_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "__path__", [*pages.__path__, str(tmp_path)])
    before = sources()
    (tmp_path / "mine.py").write_text(NEW_PAGE)
    try:
        assert [*sources()] == [*(name for name in before if before[name].order < 15), "mine",
                                *(name for name in before if before[name].order > 15)]  # fmt: skip
        (tmp_path / "results").mkdir()
        results = nothing(tmp_path / "results")
        (path,) = write_pages("mine", results.files, results.folder)
        assert path.read_text() == "# Of mine\n"
        path.write_text("# Of yours\n")
        (path.parent / "gone.md").write_text("")
        assert stale_pages(results) == [path.parent / "gone.md", path]
        assert rebuild(results.files, (), results.folder) == [path]
        assert stale_pages(results) == [path.parent / "gone.md"]
    finally:
        sys.modules.pop("hybridvalidation.show.pages.mine", None)


def test_a_page_tells_what_stacks_cost_in_quality(tmp_path: Path) -> None:
    stack, results = SCENARIO.stacks[-1], nothing(tmp_path)
    assert "What it costs in quality" not in report_text(RUN, results, MARKDOWN)
    cells = ("int8", "121k", "20", "10 of 10", "vanilla", "+0.0030", "99.87", "inconclusive")
    vars(results)["quality"] = {stack: cells, "of another scenario": cells}
    shown = report_text(RUN, results, MARKDOWN)
    [row] = [line for line in shown.splitlines() if "| int8" in line]
    told = [stack, "int8 over vanilla", "121k, 20", "10 of 10", "+0.0030", "99.87", "inconclusive"]
    assert [cell.strip() for cell in row.strip("|").split("|")] == told
    assert "## What it costs" in shown
    assert "\nWhat it costs" in report_text(RUN, results, TERMINAL)


def test_a_wide_table_is_split_for_markdown_alone() -> None:
    headers = [f"h{number}" for number in range(10)]
    parts = table(headers, [headers], MARKDOWN, keys=2).split("\n\n")
    assert [part.splitlines()[0].split()[1::2] for part in parts] == [headers[:6], headers[:2] + headers[6:]]
    assert table(headers, [headers], TERMINAL, keys=2).splitlines()[0].split() == headers


def test_sentences_of_a_column_are_told_once_below() -> None:
    shown = table_with_notes(["row", "why"], [["a", "as b"], ["b", ""], ["c", "as b"], ["d", "d"]], MARKDOWN)
    assert [line.split()[1:4:2] for line in shown.splitlines()[2:6]] == [["a", "1"], ["b", "|"], ["c", "1"], ["d", "2"]]
    assert shown.endswith("\n\n1. as b\n2. d")


def made(program: str = "p", day: str = "2026-01-01", **environment: object) -> Record:
    plain = replace(read_environment(), commit="0123456789", dirty=False)
    return replace(
        record(), program=program, started_at=f"{day}T10:00:00+00:00", environment=replace(plain, **environment)
    )


def test_program_commit_and_day_are_told() -> None:
    assert made_by([("", made())]) == "Records: 1 by program p (commit 01234567, 2026-01-01)."
    assert made_by([]) == "Records: none."


def test_kinds_are_counted_by_who_made_them() -> None:
    told = made_by([("dry_run", made()), ("accuracy", made()), ("dry_run", made()), ("accuracy", made("q"))])
    assert told == (
        "Records: 2 dry_run, 1 accuracy by program p (commit 01234567, 2026-01-01); 1 accuracy by program q "
        "(commit 01234567, 2026-01-01)."
    )


def test_what_is_not_known_is_told() -> None:
    told = made_by([("", made("", commit="")), ("", made(dirty=True))])
    assert "1 by program unknown (commit unknown, 2026-01-01)" in told
    assert "1 by program p (commit 01234567, with changes, 2026-01-01)" in told
