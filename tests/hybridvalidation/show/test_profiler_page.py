from pathlib import Path

import pytest

from hybridtrain.run.environment import read_environment
from hybridvalidation.judge.verdict import Status
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.profiled import ProfiledCase, ProfilerRecord, append_profiled
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.pages import profiler
from hybridvalidation.show.pages.profiler import SOURCE, TARGET, judge_profiler
from hybridvalidation.show.results import Results

FILES = ScenarioFiles(Path("scenarios"))


def case(num_params: int, snapshot_s: float) -> ProfiledCase:
    return ProfiledCase(
        model=f"m{num_params}", num_params=num_params, batch_size=1, seq_len=8, every_n_steps=1, rounds=3, step_s=2.0,
        snapshot_s=snapshot_s, ratio=1.0, noise=1.0,
    )  # fmt: skip


def write(records: Path, *cases: ProfiledCase) -> None:
    record = ProfilerRecord(
        key="k", device="CPU", num_threads=1, cases=cases, started_at="2026-01-01T00:00:00+00:00", duration_s=1.0,
        environment=read_environment(),
    )  # fmt: skip
    append_profiled(records, record)


@pytest.mark.parametrize(
    ("card_step_s", "status"), [(None, Status.HOLDS), (1.0, Status.HOLDS), (0.1, Status.MISLEADING)]
)
def test_the_largest_model_is_judged_and_a_cards_step_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card_step_s: float | None, status: Status
) -> None:
    monkeypatch.setattr(profiler, "card_step_s", lambda _records: card_step_s)
    write(tmp_path / "records", case(10, 0.5), case(1000, 0.0004))
    (found,) = judge_profiler(tmp_path / "records", FILES.targets())
    assert (found.target, found.status, found.evidence) == (TARGET, status, Evidence.EXECUTED)
    assert found.value == pytest.approx(0.02)


def test_without_its_benchmark_nothing_is_claimed(tmp_path: Path) -> None:
    (found,) = judge_profiler(tmp_path, FILES.targets())
    assert found.status is Status.UNPROVEN
    assert list(SOURCE.pages(Results(FILES, tmp_path))) == []


def test_the_page_shows_every_case(tmp_path: Path) -> None:
    write(tmp_path / "records", case(10, 0.5), case(1000, 0.0004))
    (page,) = SOURCE.pages(Results(FILES, tmp_path))
    assert all(name in page.text for name in ("m10 ", "m1000", TARGET))
