"""Copies on a CUDA card, with streams and events that only remember what was asked of them."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrain.errors import DiskTierError, HostMemoryError
from hybridtrain.memory.cuda_transfer import CudaTransfer
from hybridtrain.memory.tier import BufferContent, HostBytes
from hybridtrain.plan.placement import Placement

SIZE = 4096


class FakeEvent:
    """An event that is over unless a test says otherwise."""

    def __init__(self, *, blocking: bool = False) -> None:
        self.blocking = blocking
        self.stream: FakeStream | None = None
        self.is_over = True

    def record(self, stream: "FakeStream") -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True


class FakeStream:
    """A stream that notes what it waits for; torch.Tensor copies on the CPU are done at once."""

    def __init__(self, _device: object = None) -> None:
        self.waited: list[object] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.waited.append(event)

    def wait_stream(self, stream: "FakeStream") -> None:
        self.waited.append(stream)


class FakeRuntime:
    """The part of the CUDA runtime that locks pages."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.code = 0

    def cudaHostRegister(self, address: int, num_bytes: int, _flags: int) -> int:
        if not self.code:
            assert address not in self.locked, "cudaErrorHostMemoryAlreadyRegistered"
            self.locked[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def cudaGetErrorString(self, _code: int) -> str:
        return "out of memory"


class Card:
    """What the fakes saw."""

    def __init__(self) -> None:
        self.compute = FakeStream()
        self.runtime = FakeRuntime()
        self.devices: list[tuple[str, object]] = []
        self.is_broken = False

    def synchronize(self, _device: object = None) -> None:
        if self.is_broken:
            raise RuntimeError("an illegal memory access was encountered")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    found = Card()

    @contextmanager
    def stream(_stream: FakeStream) -> Iterator[None]:
        yield

    for name, fake in {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": stream,
        "current_stream": lambda _device: found.compute,
        "current_device": lambda: 3,
        "set_device": lambda device: found.devices.append((threading.current_thread().name, device)),
        "synchronize": found.synchronize,
        "cudart": lambda: found.runtime,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    yield found
    gc.collect()  # pinned memory is given back while there is someone to take it


@pytest.fixture
def transfer(card: Card, tmp_path: Path) -> Iterator[CudaTransfer]:
    made = CudaTransfer(torch.device("cuda"), disk_folder=tmp_path)
    yield made
    card.is_broken = False
    made.close()


def tensor(value: int) -> torch.Tensor:
    return torch.full((SIZE,), value, dtype=torch.uint8)


def opened(transfer: CudaTransfer, placement: Placement = Placement.HOST, count: int = 1) -> BufferContent:
    content = transfer.open_bytes(placement, count * SIZE, "test")
    assert content is not None
    return content


def is_alive(reference: "weakref.ref[Any]") -> bool:
    gc.collect()
    return reference() is not None


def test_the_card_becomes_the_current_one_in_every_thread(card: Card, transfer: CudaTransfer) -> None:
    file = opened(transfer, Placement.DISK)
    transfer.wait(transfer.fetch(tensor(0), file, 0, []))
    assert transfer.device == torch.device("cuda", 3)
    assert [device for _, device in card.devices] == [transfer.device] * 2
    assert card.devices[1][0].startswith("disk-tier")


def test_a_source_given_back_early_is_held_until_compute_waits(transfer: CudaTransfer) -> None:
    source = tensor(7)
    storage = weakref.ref(source)
    event = transfer.store(source, opened(transfer), 0)
    del source
    assert is_alive(storage)
    transfer.wait(event)
    assert not is_alive(storage)


def test_a_target_given_back_early_is_held_until_compute_waits_for_a_later_copy(transfer: CudaTransfer) -> None:
    content = opened(transfer)
    target = tensor(0)
    storage = weakref.ref(target)
    transfer.fetch(target, content, 0, [])
    del target
    later = transfer.fetch(tensor(0), content, 0, [])
    assert is_alive(storage)
    transfer.synchronize(later)
    assert not is_alive(storage)


def test_a_copy_in_that_came_after_a_copy_out_stands_for_it(transfer: CudaTransfer) -> None:
    content = opened(transfer)
    source = tensor(7)
    storage = weakref.ref(source)
    out = transfer.store(source, content, 0)
    del source
    transfer.wait(transfer.fetch(tensor(0), content, 0, []))
    assert is_alive(storage)
    transfer.wait(transfer.fetch(tensor(0), content, 0, [out]))
    assert not is_alive(storage)


def test_the_processor_cannot_run_ahead_of_copies_out_without_end(card: Card, transfer: CudaTransfer) -> None:
    content = opened(transfer)
    storages = []
    for value in range(100):
        source = tensor(value)
        storages.append(weakref.ref(source))
        transfer.store(source, content, 0)
        del source
    gc.collect()
    assert sum(storage() is not None for storage in storages) == 32
    assert len(card.compute.waited) == 68


def test_copies_wait_for_what_they_are_told_to_wait_for(card: Card, transfer: CudaTransfer) -> None:
    content = opened(transfer)
    out = transfer.store(tensor(7), content, 0)
    mark = transfer.mark()
    target = tensor(0)
    event = transfer.fetch(target, content, 0, [mark, out])
    assert transfer._out.stream.waited == [card.compute]
    assert transfer._in.stream.waited == [mark, out.event]  # type: ignore[attr-defined]
    transfer.wait(event)
    transfer.wait(mark)
    assert card.compute.waited == [event.event, mark]  # type: ignore[attr-defined]
    assert target.eq(7).all()


def test_files_are_written_and_read_in_the_order_of_the_calls(transfer: CudaTransfer) -> None:
    file = opened(transfer, Placement.DISK, count=20)
    for number in range(20):
        transfer.store(tensor(number), file, number * SIZE)
        transfer.store(tensor(number + 100), file, number * SIZE)
    targets = [tensor(0) for _ in range(20)]
    events = [transfer.fetch(target, file, number * SIZE, []) for number, target in enumerate(targets)]
    for event in events:
        transfer.wait(event)
    assert [int(target[0]) for target in targets] == list(range(100, 120))


def test_pinned_buffers_for_files_are_few_and_larger_ones_replace_smaller_ones(
    card: Card, transfer: CudaTransfer
) -> None:
    file = opened(transfer, Placement.DISK, count=40)
    for number in range(20):
        transfer.store(tensor(number), file, number * SIZE)
    assert len(card.runtime.locked) <= 5
    for number in range(10):
        transfer.store(torch.zeros(4 * SIZE, dtype=torch.uint8), file, number * 4 * SIZE)
    assert len(card.runtime.locked) <= 6
    transfer.close()
    assert not card.runtime.locked


def test_a_write_that_fails_is_told_once_and_the_files_still_go(transfer: CudaTransfer, tmp_path: Path) -> None:
    file = opened(transfer, Placement.DISK)
    file._file.close()  # type: ignore[attr-defined]
    transfer.store(tensor(1), file, 0)
    with pytest.raises(DiskTierError):
        transfer.close()
    assert not list(tmp_path.iterdir())


def test_a_read_that_fails_is_told_to_who_waits(transfer: CudaTransfer) -> None:
    file = opened(transfer, Placement.DISK)
    file._file.close()  # type: ignore[attr-defined]
    event = transfer.fetch(tensor(1), file, 0, [])
    with pytest.raises(DiskTierError):
        transfer.wait(event)


def test_the_files_go_even_if_the_device_failed(card: Card, transfer: CudaTransfer, tmp_path: Path) -> None:
    opened(transfer, Placement.DISK)
    card.is_broken = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        transfer.close()
    assert not list(tmp_path.iterdir())


class TestPinned:
    def test_pages_are_unlocked_before_they_are_unmapped_though_nobody_closes(self, card: Card) -> None:
        content = HostBytes(SIZE, pinned=True)
        assert list(card.runtime.locked.values()) == [SIZE]
        del content
        gc.collect()
        assert not card.runtime.locked

    def test_closing_twice_unlocks_once(self, card: Card) -> None:
        content = HostBytes(SIZE, pinned=True)
        content.close()
        content.close()
        assert not card.runtime.locked

    def test_a_failed_device_does_not_keep_pages_locked(self, card: Card) -> None:
        content = HostBytes(SIZE, pinned=True)
        card.is_broken = True
        content.close()
        assert not card.runtime.locked

    def test_a_refusal_says_what_the_driver_said(self, card: Card) -> None:
        card.runtime.code = 2
        with pytest.raises(HostMemoryError, match="CUDA error 2, out of memory"):
            HostBytes(SIZE, pinned=True)
