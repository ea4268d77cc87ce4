"""The owner of weights hands out the model's own parts."""

import torch

from hybridtrain.memory.weight_store import WeightStore
from hybridtrain.models.build import build_model
from hybridtrain.virtual_gpu.account.observer import NullObserver
from memory_parts import new_copies, plan_of
from tiny_models import LLAMA_GROUPED


def test_every_part_is_the_models_own() -> None:
    model = build_model(LLAMA_GROUPED, torch.float32, torch.device("meta"))
    store = WeightStore(model, plan_of([]), new_copies(), NullObserver())
    assert store.acquire_embedding() is model.embedding
    assert [store.acquire(block) for block in range(4)] == list(model.blocks)
    assert store.acquire_head() is model.head
