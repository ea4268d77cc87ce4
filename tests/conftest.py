"""Shared by all tests: a fixed random state, closed files, tests/support on the import path, samples of many cases."""

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "support"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer every case of tests that take a sample of theirs."""
    parser.addoption("--every-case", action="store_true", help="run all cases of tests marked sample, not some of them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep, of a test marked `sample(one_in=n)`, every n-th case, and one for each value that several cases have.

    Leave tests marked `every_case` out. The same cases each time; pytest tells how many were left out.
    """
    if config.getoption("every_case"):
        return
    tests: dict[str, list[pytest.Item]] = {}
    left_out = {item for item in items if item.get_closest_marker("every_case") is not None}
    for item in items:
        if item.get_closest_marker("sample") is not None:
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("sample")
        assert marker is not None
        left_out |= set(cases) - set(sample(cases, **marker.kwargs))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True, scope="module")
def _frozen_heap() -> None:
    """Spare the collector, and forked processes, what outlives the file: torch, transformers and thousands of tests.

    A full collection of it takes 0.4 s, and many tests ask for one or cause it.
    """
    gc.collect()
    gc.freeze()


def sample(cases: list[pytest.Item], one_in: int) -> list[pytest.Item]:
    """Return every n-th case, and of the others each that holds a value which several have and none before it."""
    values = [values_of(case) for case in cases]
    counts = Counter(value for held in values for value in held)
    missing = {value for value, count in counts.items() if count > 1}.difference(*values[::one_in])
    chosen = cases[::one_in]
    for case, held in zip(cases, values, strict=True):
        if held & missing:
            chosen.append(case)
            missing -= held
    return chosen


def values_of(case: pytest.Item) -> set[tuple[str, str]]:
    """Return the parameters of a case and the values they have in it."""
    return {(name, repr(value)) for name, value in case.callspec.params.items()}  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Make every test draw the same numbers, alone or in any order."""
    import torch  # noqa: PLC0415  the process that hands out tests needs none

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _closed_tiers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close files of the disk tier that a test leaves: collected in a later one they would be told as its fault."""
    from hybridtrain.memory.disk_tier import DiskFile  # noqa: PLC0415  as above

    opened: list[DiskFile] = []
    make = DiskFile.__init__

    def note(file: DiskFile, *arguments: object, **settings: object) -> None:
        make(file, *arguments, **settings)  # type: ignore[arg-type]
        opened.append(file)

    monkeypatch.setattr(DiskFile, "__init__", note)
    yield
    for file in opened:
        file.close()
