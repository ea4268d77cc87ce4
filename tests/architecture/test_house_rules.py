"""The rules of CONTRIBUTING.md that a program can check."""

import ast
import importlib.util
import shutil
from pathlib import Path

import pytest

from hybridvalidation.cli.main import main

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("hybridtrain", "kernels", "validation") for path in (ROOT / folder).rglob("*.py"))
LONGEST_FILE = 300
LONGEST_FUNCTION = 60


def functions(path: Path) -> list[ast.FunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def test_sources_are_found() -> None:
    assert len(SOURCES) > 80  # a renamed folder would make every other test here pass


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_are_short_plain_text(path: Path) -> None:
    content = path.read_bytes()
    assert content.isascii()
    assert content.count(b"\n") <= LONGEST_FILE


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_functions_are_short(path: Path) -> None:
    long = [
        f"{function.name}: {length} lines"
        for function in functions(path)
        if (length := (function.end_lineno or 0) - function.lineno + 1) > LONGEST_FUNCTION
    ]
    assert not long


def test_nothing_looks_like_the_package_kernels_of_hugging_face() -> None:
    # transformers and bitsandbytes import a package of this name when they find one; our folder must not be it.
    assert importlib.util.find_spec("kernels") is None


def test_the_readmes_table_is_the_reports() -> None:
    shown = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| ")]
    report = (ROOT / "results" / "tables" / "1b-16gb.md").read_text().splitlines()
    stacks = [
        line for line in shown if line.startswith(("| stack", "| vanilla", "| mixed", "| conservative", "| tight"))
    ]
    assert len(stacks) == 5
    assert set(stacks) <= set(report)


def test_committed_tables_follow_from_committed_records(tmp_path: Path) -> None:
    results = tmp_path / "results"
    shutil.copytree(ROOT / "results" / "records", results / "records")
    assert main(["report", "--results", str(results), "--scenarios", str(ROOT / "scenarios")]) == 0
    for table in (ROOT / "results" / "tables").glob("*.md"):
        assert (results / "tables" / table.name).read_bytes() == table.read_bytes()
