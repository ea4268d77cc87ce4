"""Fixtures around the compiled CPU kernel."""

import shutil
from collections.abc import Iterator

import pytest

from hybridkernels.adamw_int8.cpu_build import load_cpu_kernel


@pytest.fixture
def fresh_kernel() -> Iterator[None]:
    """Forget the loaded library before and after the test, so that the test's own surroundings decide."""
    load_cpu_kernel.cache_clear()
    yield
    load_cpu_kernel.cache_clear()


@pytest.fixture
def no_compiler(fresh_kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001  order matters
    """Pretend that no program is installed."""
    monkeypatch.setattr(shutil, "which", lambda _name: None)
