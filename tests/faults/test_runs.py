"""Runs that are broken, in the short form, and that a campaign sees failures."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.campaign import Order, campaigns
from faults.campaigns import (
    flips,
    full_disk,
    kills,
    long_runs,
    memory_limits,
    power_cuts,
    rank_kills,
    signals,
    two_writers,
)
from faults.disk_log import Act, image_of
from faults.runs import TOLD, Run, ended, fork, number_of, telling
from hybridtrain.checkpoint.generations import generations
from hybridtrain.checkpoint.manifest import MANIFEST


@pytest.fixture(autouse=True)
def _one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    for campaign in (flips, full_disk, kills, memory_limits, power_cuts, signals, two_writers):
        monkeypatch.setattr(campaign, "KINDS", ["plain"])
    for name, value in {"KINDS": ["zero 2"], "_WORLDS": (2,), "_LAST_WORLDS": (1,), "_MOST_KILLS": 1}.items():
        monkeypatch.setattr(rank_kills, name, value)


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("flips", 8),
        ("kills", 3),
        ("full-disk", 2),
        ("memory-limits", 2),
        ("power-cuts", 3),
        ("rank-kills", 1),
        ("signals", 2),
        ("two-writers", 2),
    ],
)
def test_a_run_survives(tmp_path: Path, name: str, count: int) -> None:
    tally = campaigns()[name].run(Order(seed=2, count=count, folder=tmp_path))
    assert tally.faults == []
    assert tally.num_attempts >= count


def test_a_state_that_is_accepted_though_damaged_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridtrain.checkpoint.generations.verify", lambda _: None)
    tally = flips._flip(Order(seed=0, count=8, folder=tmp_path))
    assert tally.counts["plain"]["accepted"] == tally.num_faults > 0


def test_a_rank_that_adds_otherwise_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_kills, "_LAST_WORLDS", (2,))
    monkeypatch.setattr(rank_kills, "_with", lambda *_: ((0, 1),))
    tally = rank_kills._break(Order(seed=0, count=1, folder=tmp_path))
    assert tally.counts["zero 2"]["other values"] == tally.num_faults > 0


def test_what_two_equal_runs_share_tells_others_apart(tmp_path: Path) -> None:
    one, other = (Run("plain", tmp_path / name) for name in ("one", "other"))
    assert [ended(fork(run.go)) for run in (one, other)] == [0, 0]
    assert one.outcome() == other.outcome()
    assert (one.steps_saved(), one.steps_logged(), one.leftovers()) == (6, 6, [])
    (one.folder / ".log.jsonl.1.partial").touch()
    assert one.leftovers() == [".log.jsonl.1.partial"]
    log = one.folder / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[2]["loss"] += 1e-6
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert one.outcome() != other.outcome()
    (generations(one.states)[-1] / MANIFEST).write_bytes(b"{}")
    assert one.steps_saved() < 6


def test_a_disk_after_a_power_cut_has_what_was_waited_for_and_anything_of_the_rest() -> None:
    acts = [
        Act("create", "x.partial"), Act("sync", "x.partial", content=b"one"), Act("os.rename", "x.partial", "x"),
        Act("sync folder", ""), Act("create", "y"), Act("os.rename", "y", "x"),
    ]  # fmt: skip
    cut = [image_of(acts, 4, seed) for seed in range(20)]
    assert cut == [{"x": b"one"}] * 20
    images = [image_of(acts, 6, seed) for seed in range(60)]
    assert {tuple(sorted(image)) for image in images} == {("x",), ("x", "y")}
    assert {image["x"] == b"one" for image in images} == {True, False}  # the rename reached the disk, or did not
    early = [image_of(acts, 3, seed) for seed in range(40)]
    assert {tuple(image) for image in early} == {(), ("x.partial",), ("x",)}
    assert all(content == b"one" for image in early for content in image.values())


def _raise(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def test_a_child_tells_how_it_ended(capfd: pytest.CaptureFixture[str]) -> None:
    assert ended(fork(lambda: None)) == 0
    assert ended(fork(telling(_raise(OSError(5, "Input/output error"))))) == TOLD
    assert ended(fork(telling(_raise(KeyError("x"))))) == 1
    assert "KeyError" in capfd.readouterr().err


def test_memory_that_grows_by_the_step_is_seen() -> None:
    flat, growing = (long_runs.Looks(warm_up=10, window=20) for _ in range(2))
    for step in range(100):
        spike = 10**9 if step < 10 else step % 20  # what comes and goes, and what comes before
        flat.add(step, 1000 + spike)
        growing.add(step, 1000 + spike + 7 * step)
    assert flat.growth == 0
    assert growing.growth == 7 * 70 + 10  # from step 29 to step 99


def test_a_run_tells_what_it_grew_by(tmp_path: Path) -> None:
    run = Run("plain", tmp_path / "run")
    assert 0 <= number_of(run, long_runs._watched(run, steps=60, warm_up=10, save_every=10)) < 64 * 1024
