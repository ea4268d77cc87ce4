"""Which files a process consisted of, and whether they are still the same."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hybridtrain.config.decode import decode
from hybridvalidation.records import program
from hybridvalidation.records.program import Program, current_program, torch_version

LAZY = "hybridtrain/virtual_gpu/card.py"
READS_CARDS = """
def late():
    from hybridtrain.virtual_gpu.card import card_catalogue
    card_catalogue()
late()
"""


def program_of(code: str) -> Program:
    """Return the program of a fresh process that runs ``code``."""
    lines = [
        "from hybridvalidation.records.program import current_program, watch_files; watch_files()",
        code,
        "from hybridtrain.config.encode import to_json; print(to_json(current_program()))",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    return decode(Program, json.loads(done.stdout), source="child")


@pytest.fixture(scope="module")
def reader() -> Program:
    """The program of a process that reads the table of cards, by a module that it imports late."""
    return program_of(
        "def late():\n    from hybridtrain.virtual_gpu.card import find_card\n    find_card('h200')\nlate()"
    )


def test_modules_are_listed_however_late_they_are_imported(reader: Program) -> None:
    assert LAZY in reader.files
    assert LAZY not in program_of("").files


def test_files_that_were_read_are_listed_too(reader: Program) -> None:
    assert "hybridtrain/virtual_gpu/hardware.toml" in reader.files


def test_only_files_of_the_project_are_listed_and_no_compiled_ones(reader: Program) -> None:
    assert {name.partition("/")[0] for name in reader.files} <= set(program.PACKAGES)
    assert {Path(name).suffix for name in reader.files} == {".py", ".toml"}


def test_a_program_that_nobody_touched_is_the_same(reader: Program) -> None:
    assert reader.first_change() == ""
    assert reader.digest == program_of(READS_CARDS).digest


@pytest.mark.parametrize(
    ("content", "told"), [("edited", f"{LAZY} has changed"), (None, f"{LAZY} is gone")], ids=["edited", "deleted"]
)
def test_an_edited_file_is_named(
    monkeypatch: pytest.MonkeyPatch, reader: Program, content: str | None, told: str
) -> None:
    digest_of = program._digest_of.__wrapped__
    monkeypatch.setattr(program, "_digest_of", lambda name: content if name == LAZY else digest_of(name))
    assert reader.first_change() == told


def test_a_file_that_was_not_there_is_none_of_it(monkeypatch: pytest.MonkeyPatch, reader: Program) -> None:
    digest_of = program._digest_of.__wrapped__
    monkeypatch.setattr(program, "_digest_of", lambda name: "edited" if "show/" in name else digest_of(name))
    assert reader.first_change() == ""


def test_the_digest_follows_content_names_and_torch(reader: Program) -> None:
    others = [
        replace(reader, torch="0"), replace(reader, files={**reader.files, LAZY: "edited"}),
        replace(reader, files={**reader.files, "hybridtrain/new.py": "new"}),
        replace(reader, files={name: content for name, content in reader.files.items() if name != LAZY}),
    ]  # fmt: skip
    assert len({found.digest for found in (reader, *others)}) == 5
    assert len(reader.digest) == 16


def test_another_torch_is_another_program_whatever_it_was_built_for(
    monkeypatch: pytest.MonkeyPatch, reader: Program
) -> None:
    monkeypatch.setattr(program.metadata, "version", lambda _name: f"{reader.torch}+cu130")
    assert (torch_version(), reader.first_change()) == (reader.torch, "")
    monkeypatch.setattr(program.metadata, "version", lambda _name: "9.9.9")
    assert reader.first_change() == f"torch was {reader.torch}, is 9.9.9"


def test_this_process_has_its_own_program() -> None:
    assert "hybridvalidation/records/program.py" in current_program().files
