"""Snapshots that cards wrote: read without trust, undone to where they began, repeated event by event."""

import json
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.errors import DataError
from hybridtrain.units import MIB
from hybridtrain.virtual_gpu.allocator.allocator import CachingAllocator
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.allocator.recorded_snapshot import RecordedDevice, read_snapshot, state_before
from hybridtrain.virtual_gpu.allocator.segments import falling, rising
from hybridtrain.virtual_gpu.allocator.snapshot import build_snapshot, write_snapshot
from hybridtrain.virtual_gpu.allocator.snapshot_replay import matching_blocks, replay_device

RECORDED = Path(__file__).parent / "recorded_snapshot.json"
"""Numbers of a training step on a CUDA card, from its first allocation on."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedDevice:
    told = json.loads(RECORDED.read_text())
    trace = [dict(zip(("action", "addr", "size", "stream"), event, strict=True)) for event in told["events"]]
    segments = [
        {
            "device": 0, "address": address, "total_size": sum(block[0] for block in blocks), "stream": 0,
            "segment_type": kind,
            "blocks": [dict(zip(("size", "requested_size", "state"), block, strict=True)) for block in blocks],
        }
        for address, kind, blocks in told["segments"]
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("recorded") / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [trace]}))
    (device,) = read_snapshot(path)
    return device


def test_card_s_history_is_repeated(recorded: RecordedDevice) -> None:
    found = replay_device(recorded)
    assert found.num_same_events == found.num_events == 97
    assert found.num_segments == 9
    assert found.same_end
    assert found.rising == found.falling == found.at_their_addresses == found.recorded
    assert matching_blocks(recorded) == (10, 10)


def test_other_rules_are_told_from_the_card_s(recorded: RecordedDevice) -> None:
    other = replace(recorded, config=AllocatorConfig(roundup_power2_divisions=4))
    assert not replay_device(other).same_end
    lawful, total = matching_blocks(other)
    assert lawful < total


def _busy_allocator(seed: int, config: AllocatorConfig, *, place: Any) -> CachingAllocator:
    allocator = CachingAllocator(config, record_history=True, place=place)
    draw, held = random.Random(seed), list[int]()  # noqa: S311
    for _ in range(300):
        chance = draw.random()
        if chance < 0.01:
            allocator.empty_cache()
        elif chance < 0.05:
            allocator.complete_stream(1)
        elif chance < 0.5 and held:
            address = held.pop(draw.randrange(len(held)))
            if draw.random() < 0.2:
                allocator.record_stream(address, 1)
            allocator.free(address)
        else:
            held.append(allocator.malloc(round(2 ** draw.uniform(4, 25))))
    return allocator


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_expandable", [False, True])
def test_any_history_is_undone_and_repeated(seed: int, is_expandable: bool, tmp_path: Path) -> None:
    config = AllocatorConfig(expandable_segments=is_expandable)
    allocator = _busy_allocator(seed, config, place=falling() if seed % 2 else rising())
    history = allocator.history
    assert history is not None
    snapshot = build_snapshot(history, allocator.segments(), config=config)
    if not is_expandable:  # as a ring buffer does, somewhere between two events
        del snapshot["device_traces"][0][: seed * len(history) // 8]
    path = tmp_path / "snapshot.pickle"
    write_snapshot(path, snapshot)
    (device,) = read_snapshot(path)
    found = replay_device(device)
    assert found.num_same_events == found.num_events == len(device.events)
    assert found.same_end
    assert (found.start_reserved_bytes == 0) == (is_expandable or not seed)


def test_events_of_another_allocator_are_refused(recorded: RecordedDevice) -> None:
    foreign = replace(recorded, segments=recorded.segments[1:])
    with pytest.raises(ValueError, match="does not lead to the segments"):
        state_before(foreign)


def test_nothing_is_run_by_reading(tmp_path: Path) -> None:
    path = tmp_path / "evil.pickle"
    path.write_bytes(b"cos\nsystem\n(S'touch evil'\ntR.")
    with pytest.raises(DataError, match=r"it references os\.system"):
        read_snapshot(path)


def test_equal_blocks_lie_where_the_driver_puts_them() -> None:
    up, down = CachingAllocator(place=rising()), CachingAllocator(place=falling())
    for allocator, is_first_lower in ((up, True), (down, False)):
        first, second = allocator.malloc(20 * MIB), allocator.malloc(20 * MIB)
        assert (first < second) is is_first_lower
        allocator.free(first)
        allocator.free(second)
        assert allocator.malloc(20 * MIB) == min(first, second)
