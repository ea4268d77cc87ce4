"""Shared by all tests: a fixed random state for each, closed files, and tests/support on the import path."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybridtrain.memory.disk_tier import DiskFile

sys.path.append(str(Path(__file__).parent / "support"))


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Make every test draw the same numbers, alone or in any order."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _closed_tiers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close files of the disk tier that a test leaves: collected in a later one they would be told as its fault."""
    opened: list[DiskFile] = []
    make = DiskFile.__init__

    def note(file: DiskFile, *arguments: object, **settings: object) -> None:
        make(file, *arguments, **settings)  # type: ignore[arg-type]
        opened.append(file)

    monkeypatch.setattr(DiskFile, "__init__", note)
    yield
    for file in opened:
        file.close()
