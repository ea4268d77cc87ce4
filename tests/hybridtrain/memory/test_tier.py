"""The account of memory below the device, and buffers of host pages and of files."""

import errno
import mmap
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from hybridtrain.errors import HostMemoryError
from hybridtrain.memory import tier
from hybridtrain.memory.disk_tier import DiskArena
from hybridtrain.memory.tier import BufferContent, HostBytes, TierAccount, available_host_bytes, page_rounded
from hybridtrain.plan.placement import Placement
from hybridtrain.units import MIB
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass

PAGE = mmap.PAGESIZE


def test_an_account_counts_live_and_largest_bytes_by_tier_and_class() -> None:
    account = TierAccount()
    account.enter(Placement.HOST, 100, TensorClass.WEIGHT)
    account.enter(Placement.HOST, 50, TensorClass.MASTER)
    account.enter(Placement.DISK, 7, TensorClass.WEIGHT)
    account.leave(Placement.HOST, 100, TensorClass.WEIGHT)
    account.enter(Placement.HOST, 60, TensorClass.MASTER)
    assert account.by_class(Placement.HOST) == {TensorClass.MASTER: 110}  # a class that holds nothing is not named
    assert account.by_class(Placement.DISK) == {TensorClass.WEIGHT: 7}
    assert account.peak_bytes(Placement.HOST) == 150
    assert account.peak_bytes(Placement.DISK) == 7
    assert account.peak_bytes(Placement.DEVICE) == 0


def test_what_exceeds_the_limit_is_refused_and_not_counted() -> None:
    account = TierAccount(host_limit_bytes=3 * MIB)
    account.enter(Placement.HOST, 2 * MIB, TensorClass.WEIGHT)
    with pytest.raises(HostMemoryError) as raised:
        account.enter(Placement.HOST, MIB + 1, TensorClass.OPTIM_STATE)
    message = str(raised.value)
    assert message.startswith("host memory: 1.00 MiB more for optim_state exceed the limit of 3.00 MiB")
    assert "(in use: weight 2.00 MiB)" in message
    assert "raise the limit" in message
    assert account.by_class(Placement.HOST) == {TensorClass.WEIGHT: 2 * MIB}
    assert account.peak_bytes(Placement.HOST) == 2 * MIB
    account.enter(Placement.HOST, MIB, TensorClass.OPTIM_STATE)  # exactly the limit fits
    assert account.peak_bytes(Placement.HOST) == 3 * MIB


def test_the_first_buffer_beyond_the_limit_says_that_nothing_is_held() -> None:
    with pytest.raises(HostMemoryError, match=r"\(in use: nothing\)"):
        TierAccount(host_limit_bytes=0).enter(Placement.HOST, 1, TensorClass.GRAD)


def test_the_limit_is_for_the_host_alone_and_what_left_makes_room() -> None:
    account = TierAccount(host_limit_bytes=10)
    account.enter(Placement.DISK, 1000, TensorClass.WEIGHT)
    account.enter(Placement.HOST, 10, TensorClass.WEIGHT)
    account.leave(Placement.HOST, 10, TensorClass.WEIGHT)
    account.enter(Placement.HOST, 10, TensorClass.GRAD)
    assert account.by_class(Placement.HOST) == {TensorClass.GRAD: 10}


@pytest.mark.parametrize(
    ("num_bytes", "pages"), [(0, 1), (1, 1), (PAGE - 1, 1), (PAGE, 1), (PAGE + 1, 2), (7 * PAGE, 7)]
)
def test_bytes_round_up_to_whole_pages(num_bytes: int, pages: int) -> None:
    assert page_rounded(num_bytes) == pages * PAGE
    assert HostBytes(num_bytes, pinned=False).tensor.nbytes == pages * PAGE


@contextmanager
def content(place: str, folder: Path) -> Iterator[BufferContent]:
    if place == "host":
        host = HostBytes(2 * PAGE, pinned=False)
        yield host
        host.close()
        return
    with closing(DiskArena(folder)) as arena:
        yield arena.allocate(2 * PAGE, "buffer")


@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_buffer_begins_as_zeros_and_gives_back_what_was_written(place: str, tmp_path: Path) -> None:
    with content(place, tmp_path) as buffer:
        target = torch.full((2 * PAGE,), 9, dtype=torch.uint8)
        buffer.read(0, target)
        assert not target.any()
        values = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
        buffer.write(512, values)
        back = torch.empty(5, 7)
        buffer.read(512, back)
        assert torch.equal(back, values)
        buffer.read(0, target)
        assert torch.equal(target[512 : 512 + 140], values.view(-1).view(torch.uint8))
        assert not target[:512].any()  # beside the range nothing changed
        assert not target[652:].any()


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.int16, torch.float32])
def test_every_element_type_keeps_its_bits(place: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pattern = torch.arange(256, dtype=torch.uint8).roll(3)  # among them NaNs and infinities of the wide types
    with content(place, tmp_path) as buffer:
        buffer.write(PAGE, pattern.view(dtype))
        back = torch.zeros(256, dtype=torch.uint8)
        buffer.read(PAGE, back.view(dtype))
    assert torch.equal(back, pattern)


@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_range_that_leaves_the_buffer_is_an_error(place: str, tmp_path: Path) -> None:
    with content(place, tmp_path) as buffer:
        with pytest.raises((RuntimeError, ValueError)):
            buffer.write(2 * PAGE - 8, torch.ones(16, dtype=torch.uint8))
        with pytest.raises((RuntimeError, ValueError)):
            buffer.read(2 * PAGE - 8, torch.ones(16, dtype=torch.uint8))


def test_views_outlive_the_buffer() -> None:
    buffer = HostBytes(PAGE, pinned=False)
    view = buffer.tensor[:4]
    view.fill_(3)
    buffer.close()
    del buffer
    assert view.tolist() == [3, 3, 3, 3]


def test_a_system_without_memory_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_number: int, _size: int) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(tier.mmap, "mmap", refuse)
    with pytest.raises(HostMemoryError, match=r"the system refused 5\.00 MiB \(Cannot allocate memory\); close other"):
        HostBytes(5 * MIB, pinned=False)


def test_available_memory_is_some_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = available_host_bytes()
    assert found is None or found > MIB

    def missing(_path: Path, encoding: str) -> str:
        raise OSError(errno.ENOENT, encoding)

    monkeypatch.setattr(Path, "read_text", missing)
    assert available_host_bytes() is None
    monkeypatch.setattr(Path, "read_text", lambda _path, encoding: "MemTotal: 9 kB\nMemAvailable:   3 kB\n")  # noqa: ARG005
    assert available_host_bytes() == 3072
