"""The owner of block inputs: put once, taken once, by micro-batch and block, wherever they wait meanwhile."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridtrain.memory.boundary_store import HEAD_INPUT, BoundaryStore
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.plan.placement import Placement
from hybridtrain.virtual_gpu.account.ledger import StorageLedger
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from memory_parts import new_copies
from numerics import assert_bitwise

BELOW = [Placement.HOST, Placement.DISK]
PAGE = 4096


def make_store(placement: Placement = Placement.DEVICE) -> BoundaryStore:
    return BoundaryStore(placement, new_copies())


def test_each_micro_batch_and_block_has_a_place_of_its_own() -> None:
    store = make_store()
    tensors: dict[tuple[int, int], Tensor] = {}
    for micro_batch in range(2):
        for block in range(3):
            tensors[micro_batch, block] = torch.randn(2, 3)
            store.store(micro_batch, block, tensors[micro_batch, block])
    assert all(store.fetch(*place)[0] is tensor for place, tensor in tensors.items())


@pytest.mark.parametrize("placement", [Placement.DEVICE, Placement.HOST])
def test_a_boundary_can_be_taken_once(placement: Placement) -> None:
    store = make_store(placement)
    store.store(0, 1, torch.randn(2))
    store.fetch(0, 1)
    with pytest.raises(KeyError, match=r"\(0, 1\)"):
        store.fetch(0, 1)


@pytest.mark.parametrize("placement", [Placement.DEVICE, Placement.HOST])
def test_what_was_never_put_cannot_be_taken(placement: Placement) -> None:
    store = make_store(placement)
    store.store(0, 1, torch.randn(2))
    with pytest.raises(KeyError, match=r"\(1, 1\)"):
        store.fetch(1, 1)


def test_memory_is_free_after_a_drop() -> None:
    ledger = StorageLedger()
    with ledger:
        store = BoundaryStore(Placement.DEVICE, new_copies(observer=ledger))
        store.store(0, 0, torch.empty(1000))
        assert ledger.live_bytes == 4000
        store.drop()
        assert ledger.live_bytes == 0


def test_the_observer_learns_which_block_a_boundary_belongs_to() -> None:
    ledger = StorageLedger()
    with ledger:
        store = BoundaryStore(Placement.DEVICE, new_copies(observer=ledger))
        store.store(0, 7, torch.empty(10))
    trace = ledger.trace()
    assert trace.classes == (TensorClass.BOUNDARY,)
    assert trace.units == ("block.7",)


@pytest.mark.parametrize("placement", BELOW)
def test_what_waits_below_the_device_comes_back_to_the_bit(placement: Placement, tmp_path: Path) -> None:
    transfer = DirectTransfer(torch.device("cpu"), disk_folder=tmp_path)
    store = BoundaryStore(placement, new_copies(transfer))
    for step in range(2):  # the second one finds the buffers of the first
        kept = {
            (micro_batch, block): (torch.randn(2, 5, 3 + step).bfloat16(), *[torch.randn(2, 3)] * max(0, block))
            for block in (0, 2, HEAD_INPUT)
            for micro_batch in range(2)
        }
        for place, tensors in kept.items():
            store.store(*place, *(tensor.clone() for tensor in tensors))
        for block in (2, 0, HEAD_INPUT):  # as backward passes go; the head's input of a tied model comes last
            for micro_batch in range(2):
                found, expected = store.fetch(micro_batch, block), kept[micro_batch, block]
                for one, other in zip(found, expected, strict=True):
                    assert_bitwise(one, other, f"{micro_batch}, {block}")
    transfer.close()


@pytest.mark.parametrize("placement", BELOW)
def test_any_order_of_taking_gives_the_right_tensors(placement: Placement, tmp_path: Path) -> None:
    # Only the fetching ahead relies on the usual order.
    transfer = DirectTransfer(torch.device("cpu"), disk_folder=tmp_path)
    store = BoundaryStore(placement, new_copies(transfer))
    kept = {(micro_batch, block): torch.randn(7) for block in range(3) for micro_batch in range(2)}
    for place, tensor in kept.items():
        store.store(*place, tensor.clone())
    for place in [(1, 0), (0, 2), (1, 1), (0, 0), (1, 2), (0, 1)]:
        assert_bitwise(store.fetch(*place)[0], kept[place], str(place))
    transfer.close()


def test_a_transposed_input_comes_back_with_its_values() -> None:
    store = make_store(Placement.HOST)
    tensor = torch.randn(3, 4).t()
    store.store(0, 0, tensor)
    assert_bitwise(store.fetch(0, 0)[0], tensor, "boundary")


def test_a_larger_boundary_gets_a_larger_buffer_and_the_old_one_is_given_back() -> None:
    copies = new_copies()
    store = BoundaryStore(Placement.HOST, copies)
    for num_elements in (10, 1024, 1025, 3):  # 40, 4096, 4100 and 12 bytes
        tensor = torch.randn(num_elements)
        store.store(0, 0, tensor.clone())
        assert_bitwise(store.fetch(0, 0)[0], tensor, str(num_elements))
    assert copies.transfer.tiers.by_class(Placement.HOST) == {TensorClass.BOUNDARY: 2 * PAGE}


def test_the_next_boundary_is_on_its_way_while_one_is_at_work() -> None:
    ledger = StorageLedger()
    with ledger:
        store = BoundaryStore(Placement.HOST, new_copies(observer=ledger))
        for block in range(3):
            store.store(0, block, torch.empty(1000))
        assert ledger.live_bytes == 4000  # the last one, until its copy is known to be over
        at_work: list[tuple[Tensor, ...]] = []
        for block, num_held in ((2, 2), (1, 2), (0, 1)):
            at_work[:] = [store.fetch(0, block)]
            assert ledger.live_bytes == num_held * 4000


@pytest.mark.parametrize("placement", [Placement.DEVICE, Placement.HOST])
def test_a_drop_frees_what_was_put_and_what_was_fetched_ahead(placement: Placement) -> None:
    ledger = StorageLedger()
    with ledger:
        store = BoundaryStore(placement, new_copies(observer=ledger))
        for block in range(3):
            store.store(0, block, torch.empty(1000))
        store.fetch(0, 2)
        store.drop()
        assert ledger.live_bytes == 0
        with pytest.raises(KeyError):
            store.fetch(0, 1)
