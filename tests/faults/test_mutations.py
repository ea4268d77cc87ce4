"""Damaged files of every kind in the short form, and that the campaign sees what it is to see."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.__main__ import main
from faults.campaign import Order, campaigns
from faults.campaigns import mutations
from faults.mutate import MUTATIONS, Place
from faults.parsers import Parser, parsers
from hybridtrain.errors import ConfigError
from hybridvalidation.records.faults import read_faults


def test_whatever_reads_damaged_files_says_what_is_wrong(tmp_path: Path) -> None:
    tally = mutations.mutate_all(Order(seed=1, count=200, folder=tmp_path))
    assert tally.faults == []
    assert tally.num_attempts == 200
    assert len(tally.counts) >= 35
    outcomes = [outcome for counts in tally.counts.values() for outcome in counts]
    assert {"read", "refused"} == set(outcomes)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_takes_any_content_and_changes_some(name: str) -> None:
    places = [Place(where, number) for where in (0.0, 0.5, 0.999) for number in (0, 1, 77, 2**20)]
    for content in (b"", b"a", b'a = 1\nb = [2, "c", "d"]\nc.d = 3.5\n'):
        assert all(isinstance(MUTATIONS[name](content, place), bytes) for place in places)
    assert any(
        MUTATIONS[name](b'a = 1\nb = [2, "c", "d"]\n', place) != b'a = 1\nb = [2, "c", "d"]\n' for place in places
    )


def _endless(_: Path) -> None:
    while True:
        pass


def _execute(_: Path) -> None:
    subprocess.run(["true"], check=True)  # noqa: S607


def _write(path: Path) -> None:
    path.with_name("beside").write_text("")


def _fail(path: Path) -> None:
    raise KeyError(path.name)


def _refuse(path: Path) -> None:
    raise ConfigError(str(path), ["no"])


@pytest.mark.parametrize(
    ("read", "outcome"),
    [
        (_endless, "hang"), (_execute, "executed"), (_write, "executed"), (_fail, "traceback"), (_refuse, "refused"),
        (Path.read_bytes, "read"),
    ],
)  # fmt: skip
def test_what_a_reader_does_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object], outcome: str
) -> None:
    monkeypatch.setattr(mutations, "LONGEST_S", 0.05)
    sound = True

    def read_second(path: Path) -> object:
        nonlocal sound
        was_sound, sound = sound, False
        return None if was_sound else read(path)

    parser = Parser(name="mine", file="mine.txt", sample=b"sound", read=read_second)
    tally = mutations.mutate_all(Order(seed=0, count=2, folder=tmp_path), [parser])
    assert tally.counts == {"mine": {outcome: 2}}
    assert bool(tally.faults) == (outcome not in {"read", "refused"})


def test_a_reader_that_refuses_sound_files_is_no_subject(tmp_path: Path) -> None:
    parser = Parser(name="mine", file="mine.txt", sample=b"sound", read=_refuse)
    with pytest.raises(AssertionError, match="the sound file is not read"):
        mutations.mutate_all(Order(seed=0, count=2, folder=tmp_path), [parser])


def _bombs(tmp_path: Path) -> dict[str, bytes]:
    deep = 100_000
    return {
        "file.toml": b"x = " + 2_000 * b"[", "card.toml": b"memory_mib = " + 5_000 * b"9",
        "model.toml": deep * b"a." + b"a = 1\n", "config.json": deep * b"[",
        "gpt2-small.jsonl": deep * b'{"a":' + b"\n",
        "text.jsonl": b'{"text": "\\ud800"}\n',
        "model.safetensors": deep.to_bytes(8, "little") + deep * b"[", "chat.jinja": deep * b"(" + b"{{" + deep * b"(",
        "of-data.json/data.json": deep * b"[", "baseline.json": deep * b"[", "adapter_config.json": deep * b"[",
        "snapshot.pickle": b"cos\nsystem\n(S'touch " + str(tmp_path / "executed").encode() + b"'\ntR.",
    }  # fmt: skip


def test_bombs_are_refused_with_a_sentence(tmp_path: Path) -> None:
    bombs, watch = _bombs(tmp_path), mutations._Watch()
    found = {parser.file: parser for parser in parsers(tmp_path)}
    assert bombs.keys() <= found.keys()
    for file, content in bombs.items():
        assert mutations.attempt(found[file], content, tmp_path, watch) == ("refused", ""), file
    assert not (tmp_path / "executed").exists()


def test_a_template_that_ends_its_process_executes_nothing(tmp_path: Path) -> None:
    watch, found = mutations._Watch(), {parser.file: parser for parser in parsers(tmp_path)}
    assert mutations.attempt(found["chat.jinja"], b"{{ 'a' * 4000000000 }}", tmp_path, watch) == ("refused", "")
    sound = found["chat.jinja"].sample  # by a new process
    assert mutations.attempt(found["chat.jinja"], sound, tmp_path, watch) == ("read", "")


def test_a_campaign_is_recorded_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = list(parsers(tmp_path))[:2]
    monkeypatch.setattr("faults.campaigns.mutations.parsers", lambda _: few)
    results = tmp_path / "results"
    assert main(["mutations", "--count", "6", "--seed", "3", "--results", str(results)]) == 0
    (record,) = read_faults(results / "records")
    assert (record.key, record.seed, record.num_faults) == ("mutations", 3, 0)
    assert {name: sum(counts.values()) for name, counts in record.counts.items()} == {few[0].name: 3, few[1].name: 3}
    page = (results / "tables" / "faults.md").read_text()
    assert "| mutations" in page
    assert few[1].name in page
    assert main(["mutation"]) == 2


def test_every_campaign_says_what_it_does() -> None:
    found = campaigns()
    assert "mutations" in found
    assert all(campaign.description.endswith(".") and campaign.count > 0 for campaign in found.values())
