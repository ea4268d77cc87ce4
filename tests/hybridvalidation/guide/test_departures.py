"""Each documented default stands on the page of departures as the program has it, with a reason where it departs."""

from pathlib import Path

import pytest

from hybridtrain.config.aliases import KINDS, OPTIONS
from hybridvalidation.guide.departures import DEFAULTS, Default, defaults_table, names_table
from hybridvalidation.guide.figures import Figures, filled
from hybridvalidation.scenario_files import ScenarioFiles

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/departures.md"


@pytest.mark.parametrize("default", DEFAULTS, ids=lambda default: default.option)
def test_a_default_has_a_reason_exactly_where_it_departs(default: Default) -> None:
    assert bool(default.reason) == (default.documented != default.ours())


def test_the_page_has_every_default_and_name_as_the_program_has_them() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text, Figures(ScenarioFiles(ROOT / "scenarios"), ROOT / "results"), str(PAGE)) == text
    assert defaults_table() in text
    assert names_table() in text
    assert all(f"`{alias}`" in text for names in OPTIONS.values() for alias in names)
    assert all(f'`kind = "{alias}"`' in text for alias in KINDS)


def test_the_page_is_found_from_readme_and_guide() -> None:
    assert "(docs/departures.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "departures.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
