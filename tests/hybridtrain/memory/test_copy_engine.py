"""Copies and their order, alone: on a device whose copies come as late as they may, which finds every race."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hybridtrain.errors import ConfigError, HostMemoryError
from hybridtrain.memory.boundary_store import BoundaryStore
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.grad_store import GradStore
from hybridtrain.memory.shards import Shards
from hybridtrain.memory.tier import TierBuffer
from hybridtrain.memory.transfer import DirectTransfer, VirtualTransfer
from hybridtrain.models.block_model import Unit
from hybridtrain.plan.memory_plan import Cell
from hybridtrain.plan.placement import Placement
from hybridtrain.virtual_gpu.account.ledger import StorageLedger
from hybridtrain.virtual_gpu.account.op_record import Lane
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from lazy_transfer import ComputeWatch, LazyTransfer, RaceError
from memory_parts import direct, new_copies, plan_of
from numerics import assert_bitwise

PAGE = 4096


@dataclass
class Parts:
    """A late device, its copy engine, a buffer of one page."""

    transfer: LazyTransfer
    copies: CopyEngine
    buffer: TierBuffer


@pytest.fixture(params=[Placement.HOST, Placement.DISK])
def parts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Parts]:
    transfer = LazyTransfer(disk_folder=tmp_path)
    copies = new_copies(transfer)
    yield Parts(transfer, copies, copies.allocate(PAGE, request.param, TensorClass.WEIGHT, "test"))
    DirectTransfer.close(transfer)  # without the copies that a race has left


def test_what_is_stored_can_be_fetched(parts: Parts) -> None:
    with ComputeWatch(parts.transfer):
        source, target = torch.randn(7), torch.empty(7)
        parts.copies.store(source, parts.buffer, 512)
        ticket = parts.copies.fetch(target, parts.buffer, 512, after=[parts.copies.mark()])
        parts.copies.wait(ticket)
        assert_bitwise(target, source, "tensor")
    assert parts.transfer.hazards == []


def test_a_new_buffer_is_zero(parts: Parts) -> None:
    target = torch.ones(8)
    parts.copies.wait(parts.copies.fetch(target, parts.buffer, 1024, after=[parts.copies.mark()]))
    assert_bitwise(target, torch.zeros(8), "tensor")


def test_a_copy_waits_until_someone_waits_for_it(parts: Parts) -> None:
    # Guards the double: nothing comes early by itself.
    source, target = torch.ones(8), torch.zeros(8)
    parts.copies.store(source, parts.buffer)
    ticket = parts.copies.fetch(target, parts.buffer, after=[parts.copies.mark()])
    assert target.isnan().all()
    parts.copies.wait(ticket)
    assert_bitwise(target, source, "tensor")


def use_too_early(parts: Parts, target: Tensor) -> None:
    parts.copies.fetch(target, parts.buffer, after=[parts.copies.mark()])
    target.sum()


def overwrite_what_compute_uses(parts: Parts, target: Tensor) -> None:
    target.mul_(2)
    parts.copies.fetch(target, parts.buffer)


def overwrite_what_leaves(parts: Parts, target: Tensor) -> None:
    other = parts.copies.allocate(PAGE, Placement.HOST, TensorClass.WEIGHT, "other")
    parts.copies.store(target, other)
    parts.copies.fetch(target, parts.buffer, after=[parts.copies.mark()])


def change_what_leaves(parts: Parts, target: Tensor) -> None:
    parts.copies.store(target, parts.buffer)
    target.mul_(2)


def store_what_has_not_come(parts: Parts, target: Tensor) -> None:
    other = parts.copies.allocate(PAGE, Placement.HOST, TensorClass.WEIGHT, "other")
    parts.copies.fetch(target, parts.buffer, after=[parts.copies.mark()])
    parts.copies.store(target, other)


def read_what_was_not_stored(parts: Parts, target: Tensor) -> None:
    parts.copies.store(target.clone(), parts.buffer)
    parts.buffer.last_store = None
    parts.copies.fetch(target, parts.buffer, after=[parts.copies.mark()])


def store_over_what_is_read(parts: Parts, target: Tensor) -> None:
    parts.copies.fetch(target, parts.buffer, after=[parts.copies.mark()])
    parts.copies.store(torch.ones(8), parts.buffer)


RACES: list[tuple[Callable[[Parts, Tensor], None], str]] = [
    (use_too_early, "compute uses memory that a copy in is still filling"),
    (overwrite_what_compute_uses, "memory that compute may still be using"),
    (overwrite_what_leaves, "would overwrite what a copy out still reads"),
    (change_what_leaves, "compute changes memory that a copy out still reads"),
    (store_what_has_not_come, "would read what a copy in has not brought yet"),
    (read_what_was_not_stored, "would read a buffer before the copy out into it is over"),
    (store_over_what_is_read, "would overwrite a buffer that a copy in still reads"),
]


@pytest.mark.parametrize(("race", "message"), RACES, ids=[race.__name__ for race, _ in RACES])
def test_the_late_device_finds_every_kind_of_race(
    parts: Parts, race: Callable[[Parts, Tensor], None], message: str
) -> None:
    with ComputeWatch(parts.transfer), pytest.raises(RaceError, match=message):
        race(parts, torch.zeros(8))


@pytest.mark.parametrize("fetches", [False, True])
def test_the_late_device_finds_memory_that_goes_too_early(parts: Parts, *, fetches: bool) -> None:
    tensor = torch.zeros(8)
    if fetches:
        parts.copies.fetch(tensor, parts.buffer, after=[parts.copies.mark()])
    else:
        parts.copies.store(tensor, parts.buffer)
    del tensor
    gc.collect()
    assert len(parts.transfer.hazards) == 1
    assert "given back while it was being" in parts.transfer.hazards[0]


def test_the_late_device_finds_a_change_that_no_watch_has_seen(parts: Parts) -> None:
    source = torch.zeros(8)
    ticket = parts.copies.store(source, parts.buffer)
    source.add_(1)
    with pytest.raises(RaceError, match="changed while it was being copied out"):
        parts.copies.wait(ticket)


def test_changing_what_has_left_is_no_race(parts: Parts) -> None:
    source = torch.zeros(8)
    with ComputeWatch(parts.transfer):
        parts.copies.wait(parts.copies.store(source, parts.buffer))
        source.add_(1)
        parts.copies.store(source, parts.buffer)
    assert parts.transfer.hazards == []


def test_a_transposed_gradient_lives_until_it_has_left() -> None:
    transfer = LazyTransfer()
    copies = new_copies(transfer)
    units = [Unit(name, ((f"{name}.a", nn.Parameter(torch.empty(3, 2))),)) for name in ("first", "second")]
    plan = replace(plan_of([]), grad=Cell(placement=Placement.HOST))
    store = GradStore(units, plan, Shards(copies), wants_norm=False)
    with ComputeWatch(transfer):
        for unit in units:
            store.accumulate(unit.name, [torch.randn(2, 3).t()])
            store.finish_visit(unit.name, is_last=True)
            gc.collect()
    assert transfer.hazards == []


def test_boundaries_on_their_way_live_until_a_drop_has_waited_for_them() -> None:
    # What a copy fills is not memory for others yet, even if nobody wants its content any more.
    transfer = LazyTransfer()
    store = BoundaryStore(Placement.HOST, new_copies(transfer))
    with ComputeWatch(transfer):
        for block in range(3):
            store.store(0, block, torch.randn(100))
        store.fetch(0, 2)
        store.drop()
        gc.collect()
    assert transfer.hazards == []


def test_a_refused_buffer_is_not_counted() -> None:
    transfer = DirectTransfer(torch.device("cpu"), host_limit_bytes=2 * PAGE)
    copies = new_copies(transfer)
    copies.allocate(PAGE + 1, Placement.HOST, TensorClass.WEIGHT, "first")
    with pytest.raises(HostMemoryError):
        copies.allocate(1, Placement.HOST, TensorClass.GRAD, "second")
    with pytest.raises(ConfigError, match="no folder;"):
        copies.allocate(1, Placement.DISK, TensorClass.GRAD, "third")
    assert transfer.tiers.by_class(Placement.HOST) == {TensorClass.WEIGHT: 2 * PAGE}
    assert transfer.tiers.by_class(Placement.DISK) == {}
    assert transfer.tiers.peak_bytes(Placement.HOST) == 2 * PAGE


@pytest.mark.parametrize("transfer", [direct(), VirtualTransfer()], ids=["direct", "virtual"])
def test_a_released_buffer_makes_room(transfer: DirectTransfer | VirtualTransfer) -> None:
    copies = new_copies(transfer)
    buffer = copies.allocate(1, Placement.HOST, TensorClass.WEIGHT, "test")
    assert buffer.num_bytes == PAGE
    copies.release(buffer)
    assert transfer.tiers.by_class(Placement.HOST) == {}
    assert transfer.tiers.peak_bytes(Placement.HOST) == PAGE


def test_the_ledger_learns_lanes_bytes_and_what_waits_for_what() -> None:
    ledger = StorageLedger()
    with ledger:
        copies = CopyEngine(VirtualTransfer(), ledger)
        host = copies.allocate(PAGE, Placement.HOST, TensorClass.WEIGHT, "host")
        disk = copies.allocate(PAGE, Placement.DISK, TensorClass.WEIGHT, "disk")
        tensor = torch.empty(100, device="meta")  # op 0
        copies.store(tensor, host)  # op 1
        copies.store(tensor, disk)  # ops 2 and 3
        copies.fetch(tensor, host, after=[copies.mark()])  # op 4
        copies.wait(copies.fetch(tensor, disk))  # ops 5 and 6
        tensor.add_(1)  # op 7
        copies.host_work(50, [host.last_store, None])  # op 8
    found = [(op.lane, op.bytes_moved, op.waits) for op in ledger.trace().ops[1:]]
    assert found[:6] == [
        (Lane.COPY_OUT, 400, (0,)),
        (Lane.COPY_OUT, 400, (0,)),
        (Lane.DISK, 400, (2,)),
        (Lane.COPY_IN, 400, (0, 1)),
        (Lane.DISK, 400, (3,)),
        (Lane.COPY_IN, 400, (5,)),
    ]
    assert (found[6][0], found[6][2]) == (Lane.COMPUTE, (6,))
    assert found[7] == (Lane.HOST, 50, (1,))
