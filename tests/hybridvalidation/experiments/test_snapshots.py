"""``hybridtrain snapshots``: a file by its path, folders by the list, and the page."""

import json
from pathlib import Path

import pytest

from hybridtrain.cli.main import main
from hybridtrain.errors import DataError
from hybridtrain.stacks import default_folder
from hybridtrain.units import MIB
from hybridtrain.virtual_gpu.allocator.allocator import CachingAllocator
from hybridtrain.virtual_gpu.allocator.snapshot import build_snapshot, write_snapshot
from hybridvalidation.experiments.snapshots import (
    SNAPSHOTS_FILE,
    blob_of,
    differs,
    read_public,
    replay_files,
    write_reserved,
)
from hybridvalidation.records.store import append_record


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    allocator = CachingAllocator(record_history=True)
    kept = [allocator.malloc(size * MIB) for size in (1, 3, 30)]
    allocator.free(kept[1])
    assert allocator.history is not None
    path = tmp_path / "own.pickle"
    write_snapshot(path, build_snapshot(allocator.history, allocator.segments()))
    return path


def test_a_snapshot_of_one_s_own(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshots", str(snapshot), "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert device["num_blocks"] == device["num_lawful"] == 2
    assert device["replay"]["num_events"] == device["replay"]["num_same_events"] == 8
    assert device["replay"]["recorded"]["reserved_bytes"] == (2 + 20 + 30) * MIB


def test_of_a_folder_only_listed_files_are_taken(snapshot: Path) -> None:
    with pytest.raises(DataError, match=r"no snapshot found; give \.pickle files"):
        replay_files([snapshot.parent], default_folder())


def test_the_list_knows_each_file_once() -> None:
    public = read_public(default_folder())
    assert len(public) == len({(each.repository, each.path, each.blob) for each in public.values()})
    assert all(len(blob) == 40 for blob in public)
    assert any(not each.left_out for each in public.values())


def test_the_page_tells_what_was_found(snapshot: Path, tmp_path: Path) -> None:
    found = replay_files([snapshot], default_folder())
    assert not differs(found)
    assert found.devices[0].blob == blob_of(snapshot)
    append_record(tmp_path / "records", SNAPSHOTS_FILE, found)
    (page,) = write_reserved(default_folder(), tmp_path)
    assert "1 of 1 recorded histories (1 files, 8 events) are reproduced event by event" in page.read_text()
