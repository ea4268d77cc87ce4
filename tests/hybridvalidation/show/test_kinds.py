"""A section, a picture or a page is a file that is found by being there; every page says who made its records."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hybridtrain.reports.tables import MARKDOWN, TERMINAL
from hybridtrain.run.environment import read_environment
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.records.makers import made_by
from hybridvalidation.records.record import Record
from hybridvalidation.show.kinds import Page, Plot, Section, kinds_in
from hybridvalidation.show.pictures import write_plots
from hybridvalidation.show.report import report_text
from tiny_runs import SCENARIO, record

RUN = ScenarioRun(scenario=SCENARIO, stacks={}, records={("dry_run", "vanilla"): record(memory=None)}, num_cached=1)
NEW_SECTION = """
from hybridvalidation.show.kinds import Section
SECTION = Section(order=15, parts=lambda view: [view.title("Of mine"), "said by a new file"])
"""
NEW_PLOT = """
from hybridvalidation.show.kinds import Plot
PLOT = Plot(order=5, name="mine", size=lambda run: (2, 2), draw=lambda run, figure: figure.suptitle("mine"))
"""


@pytest.fixture
def new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose modules belong to sections and plots."""
    import hybridvalidation.show.plots  # noqa: PLC0415
    import hybridvalidation.show.sections  # noqa: PLC0415

    for package in (hybridvalidation.show.plots, hybridvalidation.show.sections):
        (tmp_path / package.__name__.rpartition(".")[2]).mkdir()
        name = package.__name__.rpartition(".")[2]
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / name)])
    yield tmp_path
    for name in ("plots", "sections"):
        sys.modules.pop(f"hybridvalidation.show.{name}.mine", None)


@pytest.mark.parametrize(("style", "title"), [(MARKDOWN, "## Of mine"), (TERMINAL, "Of mine")])
def test_a_section_is_one_file(new_file: Path, style: str, title: str) -> None:
    before = report_text(RUN, {}, style)
    (new_file / "sections" / "mine.py").write_text(NEW_SECTION)
    assert report_text(RUN, {}, style).replace(f"{title}\n\nsaid by a new file\n\n", "") == before


def test_a_page_tells_what_stacks_cost_in_quality() -> None:
    stack = SCENARIO.stacks[-1]
    cells = ("int8", "121k", "20", "10 of 10", "vanilla", "+0.0030", "99.87", "inconclusive")
    shown = report_text(RUN, {}, MARKDOWN, quality={stack: cells, "of another scenario": cells})
    assert "What it costs in quality" not in report_text(RUN, {}, MARKDOWN)
    [row] = [line for line in shown.splitlines() if "| int8" in line]
    assert [cell.strip() for cell in row.strip("|").split("|")] == [stack, *cells]


def test_a_picture_is_one_file(new_file: Path, tmp_path: Path) -> None:
    (new_file / "plots" / "mine.py").write_text(NEW_PLOT)
    names = [path.name for path in write_plots(RUN, tmp_path / "out")]
    assert names[0] == "mine-mine.png"
    assert {"mine-peak.png", "mine-timeline.png", "mine-accuracy.png"} < set(names)


def test_every_file_of_a_kind_is_found_in_order() -> None:
    show = Path(sys.modules["hybridvalidation.show"].__file__ or "").parent
    for package, kind in (("sections", Section), ("plots", Plot), ("pages", Page)):
        found = kinds_in(package, kind)
        assert len(found) >= len([path for path in (show / package).glob("*.py") if path.stem != "__init__"])
        assert [item.order for item in found] == sorted({item.order for item in found})


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
    assert "1 by program unknown (commit of no checkout, 2026-01-01)" in told
    assert "1 by program p (commit 01234567, with changes, 2026-01-01)" in told
