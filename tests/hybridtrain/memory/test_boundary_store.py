"""The owner of block inputs: put once, taken once, by micro-batch and block."""

import pytest
import torch
from torch import Tensor

from hybridtrain.memory.boundary_store import BoundaryStore
from hybridtrain.plan.tensor_class import TensorClass
from hybridtrain.profiler.observer import NullObserver
from hybridtrain.profiler.storage_ledger import StorageLedger


def test_each_micro_batch_and_block_has_a_place_of_its_own() -> None:
    store = BoundaryStore(NullObserver())
    tensors: dict[tuple[int, int], Tensor] = {}
    for micro_batch in range(2):
        for block in range(3):
            tensors[micro_batch, block] = torch.randn(2, 3)
            store.put(micro_batch, block, tensors[micro_batch, block])
    assert all(store.take(*place) is tensor for place, tensor in tensors.items())


def test_a_boundary_can_be_taken_once() -> None:
    store = BoundaryStore(NullObserver())
    store.put(0, 1, torch.randn(2))
    store.take(0, 1)
    with pytest.raises(KeyError, match=r"\(0, 1\)"):
        store.take(0, 1)


def test_what_was_never_put_cannot_be_taken() -> None:
    store = BoundaryStore(NullObserver())
    store.put(0, 1, torch.randn(2))
    with pytest.raises(KeyError, match=r"\(1, 1\)"):
        store.take(1, 1)


def test_memory_is_free_after_a_drop() -> None:
    ledger = StorageLedger()
    with ledger:
        store = BoundaryStore(ledger)
        store.put(0, 0, torch.empty(1000))
        assert ledger.live_bytes == 4000
        store.drop()
        assert ledger.live_bytes == 0


def test_the_observer_learns_which_block_a_boundary_belongs_to() -> None:
    ledger = StorageLedger()
    with ledger:
        store = BoundaryStore(ledger)
        store.put(0, 7, torch.empty(10))
    trace = ledger.trace()
    assert trace.classes == (TensorClass.BOUNDARY,)
    assert trace.units == ("block.7",)
