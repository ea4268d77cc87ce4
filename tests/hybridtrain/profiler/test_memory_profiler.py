"""The memory profile of a run: snapshots, statistics, spikes, alerts, report and file, with memory that is made up."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybridtrain.phase import Phase
from hybridtrain.profiler import memory_reader
from hybridtrain.profiler.memory_history import MAX_EVENTS, MemoryHistory, MemorySnapshot, to_csv
from hybridtrain.profiler.memory_profiler import MemoryProfiler
from hybridtrain.profiler.memory_reader import CudaMemory, MemoryReading, MemorySource, ProcessMemory, SystemReader
from hybridtrain.profiler.nvml import DeviceMemory, DeviceReadError

GB = 10**9
ALLOCATOR = CudaMemory(
    allocated_bytes=4 * GB, reserved_bytes=6 * GB, peak_allocated_bytes=7 * GB, peak_reserved_bytes=8 * GB
)


class FakeReader:
    """Gives the figures one after the other; an exception among them is raised."""

    def __init__(
        self,
        used_gb: Iterable[float | Exception],
        *,
        source: MemorySource = MemorySource.NVML,
        total_gb: int | None = 48,
    ) -> None:
        self._used_gb = iter(used_gb)
        self._source, self._total_gb = source, total_gb
        self.count = 0

    def __call__(self) -> MemoryReading:
        self.count += 1
        used = next(self._used_gb)
        if isinstance(used, Exception):
            raise used
        return MemoryReading(
            used_bytes=int(used * GB), total_bytes=None if self._total_gb is None else self._total_gb * GB,
            source=self._source,
            allocator=ALLOCATOR if self._source is not MemorySource.PROCESS else None,
            process=ProcessMemory(2 * GB, 3 * GB),
        )  # fmt: skip


class Kept:
    def __init__(self, error: Exception | None = None) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.closed = False
        self._error = error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._error is not None:
            raise self._error
        self.lines.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


def profile(
    used_gb: Iterable[float | Exception], phases: Iterable[Phase] = (), every_n_steps: int = 1,
    alert_gb: float = 45.0, spike_threshold: float = 0.1, source: MemorySource = MemorySource.NVML,
    total_gb: int | None = 48,
) -> MemoryProfiler:  # fmt: skip
    """Return a profile with one step per figure, counted from 1, each in the phase given or FULL."""
    figures = list(used_gb)
    given = dict(enumerate(phases))
    profiler = MemoryProfiler(
        every_n_steps=every_n_steps, alert_threshold_bytes=int(alert_gb * GB), spike_threshold=spike_threshold,
        reader=FakeReader(figures, source=source, total_gb=total_gb),
    )  # fmt: skip
    with profiler:
        for index in range(len(figures)):
            profiler.record_step(index + 1, given.get(index, Phase.FULL))
    return profiler


def snapshot(step: int, used_bytes: int, source: MemorySource = MemorySource.NVML) -> MemorySnapshot:
    memory = MemoryReading(
        used_bytes=used_bytes, total_bytes=None, source=source, allocator=None, process=ProcessMemory(2 * GB, 3 * GB)
    )
    return MemorySnapshot(step=step, phase=Phase.FULL, elapsed_s=step / 8, memory=memory)


# --- snapshots --------------------------------------------------------------------------------------------------


def test_a_snapshot_has_mb_gb_and_percent() -> None:
    (found,) = profile([12.0]).history.snapshots()
    assert (found.step, found.phase, found.memory.source) == (1, Phase.FULL, MemorySource.NVML)
    assert (found.used_gb, found.utilization_percent) == (12.0, 25.0)
    row = found.as_row()
    assert (row["used_mb"], row["rss_bytes"], row["peak_rss_bytes"]) == ("12000.000", 2 * GB, 3 * GB)
    assert found.memory.allocator == ALLOCATOR


def test_without_a_total_there_is_no_percentage() -> None:
    (found,) = profile([12.0], total_gb=None).history.snapshots()
    assert found.utilization_percent is None
    assert "memory/utilization_percent" not in found.as_metrics()


@pytest.mark.parametrize(
    ("every", "first", "taken"),
    [(1, 1, [1, 2, 3, 4, 5, 6, 7]), (3, 1, [1, 3, 6]), (3, 5, [5, 6, 9]), (100, 1, [1])],
)
def test_every_n_steps_and_the_first(every: int, first: int, taken: list[int]) -> None:
    reader = FakeReader(count(1))
    profiler = MemoryProfiler(every_n_steps=every, reader=reader)
    with profiler:
        for step in range(first, first + 7):
            profiler.record_step(step, Phase.FULL)
    assert [found.step for found in profiler.history.snapshots()] == taken
    assert reader.count == len(taken)  # between snapshots nothing is read
    assert profiler.num_steps == 7


def test_elapsed_time_counts_from_the_start() -> None:
    clock: Iterator[int] = count(100)
    profiler = MemoryProfiler(reader=FakeReader([1.0, 1.0]), clock=lambda: next(clock))
    profiler.start()
    for step in (1, 2):
        profiler.record_step(step, Phase.FULL)
    profiler.stop()
    assert [found.elapsed_s for found in profiler.history.snapshots()] == [1, 3]  # the clock is asked twice a step
    assert "cost, measured: 1 s per snapshot, 40 % of the time profiled" in profiler.report()  # 2 of 5 seconds


def test_a_profiler_that_does_not_run_says_so() -> None:
    profiler = MemoryProfiler(reader=FakeReader([]))
    with pytest.raises(RuntimeError, match="not running"):
        profiler.record_step(1, Phase.FULL)


def test_a_new_start_drops_what_was() -> None:
    profiler = MemoryProfiler(reader=FakeReader(count(1)))
    profiler.start()
    profiler.record_step(1, Phase.FULL)
    profiler.start()
    profiler.record_step(2, Phase.FULL)
    profiler.stop()
    profiler.stop()
    assert [found.step for found in profiler.history.snapshots()] == [2]


def test_all_faulty_settings_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="every_n_steps: 0") as found:
        MemoryProfiler(every_n_steps=0, alert_threshold_bytes=0, spike_threshold=-1.0)
    assert str(found.value).count("\n") == 2


# --- statistics, peak, spikes, alerts ---------------------------------------------------------------------------


def test_statistics_are_per_phase() -> None:
    phases = [Phase.WARMUP, Phase.FULL, Phase.PREDICT, Phase.FULL, Phase.PREDICT, Phase.PREDICT]
    found = profile([10, 20, 4, 30, 5, 3], phases).history.phases
    assert list(found) == [Phase.WARMUP, Phase.FULL, Phase.PREDICT]
    figures = {name: (s.count, s.sum_bytes / GB, s.min_bytes / GB, s.max_bytes / GB) for name, s in found.items()}
    assert figures == {Phase.WARMUP: (1, 10, 10, 10), Phase.FULL: (2, 50, 20, 30), Phase.PREDICT: (3, 12, 3, 5)}


def test_the_peak_is_the_first_of_the_greatest_with_its_step_and_phase() -> None:
    peak = profile([10, 30, 5, 30], [Phase.FULL, Phase.CORRECT]).history.peak
    assert peak is not None
    assert (peak.step, peak.phase, peak.used_gb) == (2, Phase.CORRECT, 30.0)


def test_a_spike_is_a_rise_above_the_threshold_over_the_snapshot_before() -> None:
    history = profile([10, 12, 15, 15, 12, 15.1, 9], spike_threshold=0.25).history
    assert [(now.step, before.used_gb, now.used_gb) for before, now in history.spikes] == [(6, 12, 15.1)]
    assert profile([10, 15], spike_threshold=0.5).history.num_spikes == 0  # at the threshold is not above it
    assert profile([10, 15], spike_threshold=0.49).history.num_spikes == 1


def test_another_source_is_no_spike() -> None:
    history = MemoryHistory(alert_threshold_bytes=GB, spike_threshold=0.1)
    history.add(snapshot(1, 10, MemorySource.ALLOCATOR))
    history.add(snapshot(2, 100, MemorySource.NVML))
    history.add(snapshot(3, 200, MemorySource.NVML))
    assert [now.step for _, now in history.spikes] == [3]


def test_an_alert_is_a_rise_above_the_threshold() -> None:
    history = profile([44, 45, 46, 47, 40, 46]).history
    assert [(alert.step, alert.used_gb) for alert in history.alerts] == [(3, 46), (6, 46)]
    assert (history.num_alerts, history.num_snapshots_in_alert) == (2, 3)


def test_the_first_alert_is_told_at_once_with_advice_in_its_order() -> None:
    said: list[tuple[int, str]] = []
    reader = FakeReader([44, 46, 40, 47])
    profiler = MemoryProfiler(reader=reader, on_alert=lambda text: said.append((reader.count, text)))
    with profiler:
        for step in range(1, 5):
            profiler.record_step(step, Phase.FULL)
    ((at, text),) = said
    assert at == 2
    assert "46.0 GB used at step 2, above 45.0 GB" in text
    for whole in (text, profiler.report()):
        places = [whole.index(word) for word in ("micro-batch", "accumulation", "checkpoint", "offload")]
        assert places == sorted(places)


def test_the_host_is_not_relieved_by_offloading_to_it() -> None:
    report = profile([46], source=MemorySource.PROCESS, total_gb=64).report()
    assert "checkpoint" in report
    assert "offload" not in report


def test_a_threshold_above_the_card_is_told() -> None:
    assert "never, the card has 24.000 GB" in profile([23.9], total_gb=24).report()
    assert "never" not in profile([23.9], total_gb=48).report()


def test_a_long_run_keeps_few_snapshots_and_exact_figures() -> None:
    history = MemoryHistory(alert_threshold_bytes=10**6, spike_threshold=0.1, max_snapshots=8)
    used = [1000 + (step * 377) % 1000 for step in range(1000)]
    used[333] = 10**5
    for step, size in enumerate(used):
        history.add(snapshot(step, size))
    kept = history.snapshots()
    assert len(kept) <= 8 + 2
    assert [found.step for found in kept] == sorted({found.step for found in kept})
    assert {0, 333, 999} <= {found.step for found in kept}
    spread = [found.step for found in kept if found.step not in {333, 999}]
    assert len({after - before for before, after in pairwise(spread)}) == 1  # evenly
    found = history.phases[Phase.FULL]
    assert (found.count, found.sum_bytes, found.min_bytes, found.max_bytes) == (1000, sum(used), 1000, 10**5)
    assert history.num_spikes == sum(b > 1.1 * a for a, b in pairwise(used)) > MAX_EVENTS
    assert len(history.spikes) == MAX_EVENTS


# --- report, file, loggers --------------------------------------------------------------------------------------


def test_the_report_says_peak_phases_spikes_and_source() -> None:
    report = profile([10, 20, 4], [Phase.FULL, Phase.FULL, Phase.PREDICT]).report()
    lines = [" ".join(line.split()) for line in report.splitlines()]
    assert lines[0] == "memory profile: 3 snapshots of 3 steps (every step), from NVML"
    assert "peak 20.000 GB of 48.000 GB (41.7 %) at step 2, phase full" in lines
    assert "full 2 15.000 10.000 20.000" in lines
    assert "predict 1 4.000 4.000 4.000" in lines
    assert "spikes of more than 10 % above the snapshot before: 1" in lines
    assert "step 2, phase full: 10.000 GB to 20.000 GB (+100 %)" in lines
    assert "alerts, above 45.000 GB: none" in lines
    assert any("allocated 4.000 GB, reserved 6.000 GB, free in it 2.000 GB" in line for line in lines)


def test_more_spikes_than_are_shown_are_counted() -> None:
    report = profile([1.5**step for step in range(9)], total_gb=None).report()
    assert "snapshot before: 8" in report
    assert "and 3 more" in report


def test_the_file_has_a_row_per_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "new" / "memory.csv"
    profile([10, 12], [Phase.FULL, Phase.PREDICT]).write_csv(path)
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert [(row["step"], row["phase"], row["source"], row["used_bytes"]) for row in rows] == [
        ("1", "full", "NVML", str(10 * GB)),
        ("2", "predict", "NVML", str(12 * GB)),
    ]
    assert {name: float(rows[1][name]) for name in ("used_mb", "used_gb", "utilization_percent")} == {
        "used_mb": 12_000, "used_gb": 12, "utilization_percent": 25,
    }  # fmt: skip
    assert rows[0]["peak_reserved_bytes"] == str(8 * GB)
    assert rows[0]["allocator_free_bytes"] == str(2 * GB)
    assert [found.name for found in path.parent.iterdir()] == ["memory.csv"]  # nothing half-written is left


def test_what_is_unknown_is_empty_in_the_file() -> None:
    (row,) = csv.DictReader(io.StringIO(to_csv([snapshot(1, 5)])))
    assert (row["used_bytes"], row["total_bytes"], row["allocated_bytes"], row["rss_bytes"]) == (
        "5",
        "",
        "",
        str(2 * GB),
    )


def test_sinks_get_each_snapshots_metrics_and_stay_open() -> None:
    sink = Kept()
    profiler = MemoryProfiler(every_n_steps=2, reader=FakeReader([10, 12]), sinks=[sink])
    with profiler:
        for step in (1, 2, 3):
            profiler.record_step(step, Phase.FULL)
    assert [step for step, _ in sink.lines] == [1, 2]
    assert sink.lines[1][1] == {
        "memory/used_gb": 12.0, "memory/utilization_percent": 25.0, "memory/rss_gb": 2.0,
        "memory/allocated_gb": 4.0, "memory/reserved_gb": 6.0,
        "memory/peak_allocated_gb": 7.0, "memory/peak_reserved_gb": 8.0,
    }  # fmt: skip
    assert not sink.closed


def test_a_sink_that_fails_is_left_and_told() -> None:
    good = Kept()
    profiler = MemoryProfiler(reader=FakeReader([10, 12]), sinks=[Kept(OSError("disk full")), good])
    with profiler:
        for step in (1, 2):
            profiler.record_step(step, Phase.FULL)
    assert len(good.lines) == 2
    assert profiler.report().count("Kept stopped at step 1 (disk full)") == 1


def test_a_reading_that_fails_is_left_out_and_told_once() -> None:
    profiler = profile([10, RuntimeError("device busy"), RuntimeError("device busy"), 11])
    assert [found.step for found in profiler.history.snapshots()] == [1, 4]
    assert profiler.report().count("device busy") == 1


def test_a_profile_without_snapshots_says_why() -> None:
    report = profile([OSError("no such thing")]).report()
    assert report.splitlines()[0] == "memory profile: no snapshot in 1 steps"
    assert "no such thing" in report


# --- the machine's own reader -----------------------------------------------------------------------------------


class FakeCard:
    def __init__(self, used_bytes: Iterable[int]) -> None:
        self._used_bytes = iter(used_bytes)
        self.closed = 0

    def read(self) -> DeviceMemory:
        used = next(self._used_bytes, None)
        if used is None:
            raise DeviceReadError("GPU is lost")
        return DeviceMemory(used, 24 * GB)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    """Make torch look as if it saw a card, which is read once."""
    found = FakeCard([9 * GB])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: SimpleNamespace(total_memory=23 * GB))
    monkeypatch.setattr(memory_reader, "read_cuda_memory", lambda _index: ALLOCATOR)
    monkeypatch.setattr(memory_reader, "DeviceReader", lambda _index: found)
    return found


def test_without_a_card_the_process_is_profiled_and_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    profiler = MemoryProfiler()
    with profiler:
        profiler.record_step(1, Phase.FULL)
        assert profiler.report().count("no CUDA card is visible to torch") == 1  # while it runs
    (found,) = profiler.history.snapshots()
    assert found.memory.source is MemorySource.PROCESS
    assert found.memory.used_bytes == found.memory.process.rss_bytes
    assert found.memory.used_bytes > 10**7  # torch alone is larger
    assert profiler.report().count("no CUDA card is visible to torch") == 1


def test_a_cards_reading_is_the_whole_cards(card: FakeCard) -> None:
    reader = SystemReader()
    found = reader()
    assert (found.used_bytes, found.total_bytes, found.allocator) == (9 * GB, 24 * GB, ALLOCATOR)
    assert (found.source, reader.note) == (MemorySource.NVML, "")
    reader.close()
    reader.close()
    assert card.closed == 1


@pytest.mark.usefixtures("card")
def test_a_card_that_cannot_be_opened_leaves_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_index: int) -> FakeCard:
        raise DeviceReadError("nothing is installed")

    monkeypatch.setattr(memory_reader, "DeviceReader", refuse)
    reader = SystemReader()
    found = reader()
    assert (found.source, found.used_bytes, found.total_bytes) == (MemorySource.ALLOCATOR, 6 * GB, 23 * GB)
    assert reader.note.startswith("nothing is installed; used memory is what torch reserved")


def test_a_card_that_is_lost_is_read_no_further(card: FakeCard) -> None:
    reader = SystemReader()
    assert [reader().source for _ in range(3)] == [MemorySource.NVML, *[MemorySource.ALLOCATOR] * 2]
    assert card.closed == 1
    assert "GPU is lost" in reader.note
