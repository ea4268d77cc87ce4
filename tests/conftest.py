"""Shared by all tests: a fixed random state for each, and tests/support on the import path."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent / "support"))


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Make every test draw the same numbers, alone or in any order."""
    torch.manual_seed(0)
