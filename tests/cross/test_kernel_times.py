"""The published times of kernels that a time model is fitted on: complete, in seconds, and possible."""

import importlib
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
COUNTS = {
    "gemm": 777,
    "normalization": 462,
    "attention": 437,
    "elementwise": 354,
    "loss": 126,
    "softmax": 105,
    "launch": 84,
    "gather": 80,
    "reduction": 56,
    "quantize": 42,
    "copy": 26,
    "optimizer": 12,
    "host": 7,
}


@pytest.fixture
def kernel_times(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("kernel_times")


def test_each_class_has_as_many_times_as_were_registered(kernel_times: ModuleType) -> None:
    assert Counter(time.kind for time in kernel_times.load_times()) == COUNTS


def test_each_class_has_sources_of_both_roles_and_a_third_is_left_out(kernel_times: ModuleType) -> None:
    sources, times = kernel_times.load_sources()["sources"], kernel_times.load_times()
    assert {time.source for time in times} == set(sources)
    roles = {(time.kind, sources[time.source]["role"]) for time in times}
    assert roles == {(kind, role) for kind in COUNTS for role in kernel_times.ROLES}
    assert 3 * sum(source["role"] == "left out" for source in sources.values()) >= len(sources)


def test_no_time_is_below_what_the_card_allows(kernel_times: ModuleType) -> None:
    sources, bounded = kernel_times.load_sources(), 0
    for time in kernel_times.load_times():
        card = kernel_times.bounding_card(time.card, sources)
        if card is not None:
            assert time.seconds >= time.least_seconds(card), time
            bounded += time.least_seconds(card) > 0
    assert bounded > 1500  # a bound that bounds nothing would pass


def test_a_time_in_milliseconds_would_be_found(kernel_times: ModuleType) -> None:
    sources = kernel_times.load_sources()
    large = [time for time in kernel_times.load_times() if time.kind in {"gemm", "attention"} and time.seconds > 1e-3]
    assert large
    for time in large:
        card = kernel_times.bounding_card(time.card, sources)
        assert card is None or time.seconds / 1000 < time.least_seconds(card), time


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("s,l4,gemm,nn,1x2,fp32,forward,0,torch,", "line 2: seconds 0 must be above 0"),
        ("s,l4,gemm,nn,1xa,fp32,forward,1,torch,", "line 2: .*whole numbers joined by x"),
        ("s,l4,gemm,nn,1x2,fp9,forward,1,torch,", "line 2: dtype 'fp9'"),
    ],
)
def test_a_bad_line_is_told(kernel_times: ModuleType, tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "times.csv").write_text(
        f"source,card,class,op,shape,dtype,pass,seconds,software,note\n{line}\n", encoding="utf-8"
    )
    with pytest.raises(ValueError, match=told):
        kernel_times.load_times(tmp_path)


def test_a_source_without_a_role_is_told(kernel_times: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "sources.toml").write_text('[sources.s]\nrepository = "a/b"\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"sources\.s: role is missing"):
        kernel_times.load_sources(tmp_path)
