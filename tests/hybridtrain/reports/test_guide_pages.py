"""The guide on a terminal: every page is listed in a line, found by its name, and printed without markers."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from command import Command
from hybridtrain import stacks
from hybridtrain.errors import ConfigError
from hybridtrain.reports.guide_pages import find_page, first_sentence, guide_pages, plain_text

ROOT = Path(__file__).parents[3]
LINE = 110
"""Characters of a sentence in the list."""


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def test_every_page_is_listed_with_one_short_sentence(command: Command) -> None:
    told = command.json("guide")["pages"]
    assert list(told)[:2] == ["index", "questions"]
    assert set(told) == {*guide_pages()} >= {"gate", "techniques/lora"}
    wrong = {name: line for name, line in told.items() if not re.fullmatch(rf"[A-Z`].{{15,{LINE}}}[.?]", line)}
    assert wrong == {}
    assert command("guide") == 0
    assert all(re.search(rf"^{name} +{re.escape(line)}$", command.out, re.MULTILINE) for name, line in told.items())


def test_a_page_is_printed_without_markers(command: Command) -> None:
    assert command("guide", "troubleshooting") == 0
    assert command.out.startswith("# Troubleshooting\n\n")
    assert "## Out of memory" in command.out
    assert "<!--" not in command.out
    assert "](" not in command.out


def test_a_page_has_several_names() -> None:
    pages = guide_pages()
    assert [find_page(name, pages) for name in ("lora", "techniques/lora", "docs/techniques/lora.md", "index")] == [
        *["techniques/lora"] * 3, "index",
    ]  # fmt: skip


def test_an_unknown_page_is_one_error_with_near_names(command: Command) -> None:
    assert command("guide", "troubleshoot") == 2
    told = "page 'troubleshoot' is unknown; near: troubleshooting; hybridtrain guide lists all pages"
    assert command.err == f"hybridtrain: guide: 1 fault\n  {told}\n"


def test_without_pages_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stacks, "__file__", str(tmp_path / "a/b.py"))
    monkeypatch.setattr(stacks.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ConfigError, match="share/hybridtrain/docs: no such folder; install hybridtrain again"):
        guide_pages()


def test_the_wheel_carries_the_guide_to_where_it_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    shutil.copytree(ROOT / "docs", tmp_path / wheel["shared-data"]["docs"])
    monkeypatch.setattr(stacks, "__file__", str(tmp_path / "a/b.py"))
    monkeypatch.setattr(stacks.sysconfig, "get_path", lambda _: str(tmp_path))
    assert all(path.is_relative_to(tmp_path) for path in guide_pages().values())


def test_links_and_markers_become_text() -> None:
    page = "# A\n\nSee [this](gate.md#verdicts), [LoRA](techniques/lora.md): `x`\nthere. And more.\n\n"
    page += "<!--figure a b-->\n\n1\n\n<!--/figure-->\n\n[all](../results/tables/a.md), [there](https://a.b).\n"
    assert first_sentence(page) == "See this (guide gate), LoRA: x there."
    assert plain_text(page).endswith("1\n\nall, there (https://a.b).")
