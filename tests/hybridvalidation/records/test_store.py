"""Records on disk: appended one by one, by several writers, whole or not at all."""

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from faults.runs import ended, fork_now
from hybridtrain.config.decode import decode
from hybridtrain.config.encode import encode, to_json
from hybridtrain.errors import RecordError
from hybridtrain.run.environment import read_environment
from hybridtrain.run.program import torch_series
from hybridtrain.virtual_gpu.cards.card import Host
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.records.record import SCHEMA
from hybridvalidation.records.stack_run import StackRun
from hybridvalidation.records.store import RecordStore, append_line, read_lines
from tiny_runs import ACCURACY, MEASURED, MEMORY, record

RECORDS = {
    "memory": record(memory=MEMORY),
    "accuracy": record(kind="accuracy", accuracy=ACCURACY),
    "measured": record(kind="measured", measured=MEASURED),
    "error": record(outcome=Outcome.ERROR, message='worker said "no"\nand \u00e9\u2028 went'),
}


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path / "records")


def path_of(store: RecordStore) -> Path:
    return store.folder / "mine.jsonl"


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_comes_back_as_it_was(store: RecordStore, name: str) -> None:
    store.append(RECORDS[name])
    assert store.read("mine") == [RECORDS[name]]
    assert decode(StackRun, json.loads(json.dumps(encode(RECORDS[name]))), source="text") == RECORDS[name]


def test_records_are_appended_and_never_changed(store: RecordStore) -> None:
    contents = [b""]
    for item in RECORDS.values():
        store.append(item)
        contents.append(path_of(store).read_bytes())
    for before, after in pairwise(contents):
        assert after.startswith(before)
        assert after.count(b"\n") == before.count(b"\n") + 1
    assert store.read("mine") == list(RECORDS.values())


def test_each_scenario_has_its_file(store: RecordStore) -> None:
    store.append(record())
    store.append(record(scenario="other"))
    assert store.scenarios() == ["mine", "other"]
    assert [item.scenario for item in store.read("other")] == ["other"]


def test_without_a_file_there_are_no_records(store: RecordStore) -> None:
    assert (store.read("mine"), store.scenarios()) == ([], [])


@pytest.mark.parametrize("num_whole", [0, 1, 2])
@pytest.mark.parametrize("cut", [1, 40, -1])
def test_a_record_that_was_cut_short_is_left_out_and_the_next_takes_its_place(
    store: RecordStore, num_whole: int, cut: int, capsys: pytest.CaptureFixture[str]
) -> None:
    # As after a crash while writing: its run is repeated, nobody must edit a file by hand.
    for _ in range(num_whole):
        store.append(record())
    whole = b"" if num_whole == 0 else path_of(store).read_bytes()
    store.folder.mkdir(exist_ok=True)
    path_of(store).write_bytes(whole + to_json(record()).encode()[:cut])
    assert store.read("mine") == [record()] * num_whole
    store.append(record("next"))
    assert "incomplete record" in capsys.readouterr().err
    aside = store.folder / "mine.jsonl.torn"
    assert aside.read_bytes() == to_json(record()).encode()[:cut] + b"\n"
    assert store.scenarios() == ["mine"]
    assert store.read("mine") == [record()] * num_whole + [record("next")]
    assert path_of(store).read_bytes() == whole + to_json(record("next")).encode() + b"\n"


def test_a_record_whose_newline_an_editor_took_stays(store: RecordStore) -> None:
    store.append(record())
    path_of(store).write_bytes(path_of(store).read_bytes().removesuffix(b"\n"))
    assert store.read("mine") == [record()]
    store.append(record("next"))
    assert store.read("mine") == [record(), record("next")]


def test_writers_at_once_lose_nothing(store: RecordStore) -> None:
    path = store.folder / "hosts.jsonl"

    def write(disk_gib: int) -> None:
        for size in range(10, 60):
            append_line(path, Host(memory_gib=size, disk_gib=disk_gib))

    writers = [fork_now(partial(write, disk_gib)) for disk_gib in (7, 8)]
    assert [ended(writer) for writer in writers] == [0, 0]
    found = [(host.disk_gib, host.memory_gib) for host in read_lines(path, Host)]
    assert sorted(found) == sorted((disk, number) for disk in (7, 8) for number in range(10, 60))


def test_pruning_keeps_what_it_is_told(store: RecordStore) -> None:
    runs = [record("0"), record("1")]
    for run in runs:
        store.append(run)
    assert store.prune("mine", [runs[1]]) == 1
    assert store.read("mine") == [runs[1]]


def test_a_record_answers_unless_it_failed_or_another_torch_made_it() -> None:
    here = read_environment()
    assert record(program="of long ago").why_repeat() == ""
    assert record(environment=replace(here, torch=f"{torch_series()}.9+cu130")).why_repeat() == ""
    assert record(outcome=Outcome.OUT_OF_MEMORY).why_repeat() == ""
    assert record(outcome=Outcome.ERROR, message="no disk").why_repeat() == "the run failed: no disk"
    told = record(environment=replace(here, torch="1.13.1+cpu")).why_repeat()
    assert told == f"made with torch 1.13, this is {torch_series()}"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"not json",
        b"\xff",
        b"[]",
        b'{"key": "k"}',
        to_json(record()).replace(f'"schema":{SCHEMA}', f'"schema":{SCHEMA + 1}').encode(),
        to_json(record()).replace('"kind"', '"sort"').encode(),
        to_json(record()).replace('"outcome":"ok"', '"outcome":"fine"').encode(),
        to_json(record()).replace("1.5", "NaN").encode(),
    ],
    ids=["blank", "text", "bytes", "list", "part", "schema", "field", "enum", "nan"],
)
def test_a_line_that_is_no_record_is_named_with_file_and_line(store: RecordStore, line: bytes) -> None:
    store.append(record())
    with path_of(store).open("ab") as file:
        file.write(line + b"\n")
    store.append(record())
    with pytest.raises(RecordError, match="not a record of this version") as caught:
        store.read("mine")
    assert str(caught.value).startswith(f"{path_of(store)}:2: ")


def test_a_record_of_another_schema_says_which_is_read(store: RecordStore) -> None:
    store.folder.mkdir()
    path_of(store).write_text(to_json(record()).replace(f'"schema":{SCHEMA}', '"schema":99') + "\n")
    with pytest.raises(RecordError, match=f"99 must be {SCHEMA}"):
        store.read("mine")


def test_a_timeline_of_unequal_lengths_is_no_record(store: RecordStore) -> None:
    assert MEMORY.timeline is not None
    whole = encode(record(memory=MEMORY))
    whole["memory"]["timeline"]["times_s"] = [0.0, 1e-6, 2e-6]
    store.folder.mkdir()
    path_of(store).write_text(json.dumps(whole) + "\n")
    with pytest.raises(RecordError, match=r"weight: 2 sizes must be as many as times_s has moments \(3\)"):
        store.read("mine")


def test_a_class_that_a_timeline_does_not_tell_has_no_bytes() -> None:
    assert MEMORY.timeline is not None
    assert (MEMORY.timeline.sizes("weight"), MEMORY.timeline.sizes("grad")) == ((5, 5), (0, 0))
