"""The page of one card to 512 follows from its program."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_lines_of_the_page_are_those_of_a_plan_made_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    scaling = importlib.import_module("scaling")
    page = (ROOT / "results" / "scaling.md").read_text(encoding="utf-8")
    assert page.startswith(scaling._HEADER)
    setting, name = scaling.SETTINGS[0], "llama-7b"
    lines = page.partition(f"## {setting.title}")[2].partition(f"### {name},")[2].splitlines()
    _, alone = scaling.chosen(name, setting, 1)
    for world in (1, 4):
        assert scaling.row(*scaling.chosen(name, setting, world), alone.tokens_per_s) in lines
