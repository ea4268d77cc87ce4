"""One rank of many: what a script is told, what is put back, and what is refused."""

import os
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from hybridtrain.virtual_gpu import VirtualGpu
from hybridtrain.virtual_gpu.facade import virtual_world
from hybridtrain.virtual_gpu.facade.virtual_world import TorchVersionError


def test_a_script_is_told_what_torchrun_would_say() -> None:
    with VirtualGpu("rtx-4090", world=12, rank=9):
        dist.init_process_group("nccl")
        told = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")]
        assert told == ["9", "12", "1", "8", "1"]
        assert (dist.get_rank(), dist.get_world_size(), torch.cuda.current_device()) == (9, 12, 1)
        assert torch.empty(1, device="cuda").device == torch.device("cuda", 1)
        answers: list[object] = [None] * 12
        dist.all_gather_object(answers, {"loss": 1})
        assert answers == [{"loss": 1}] * 12
    assert not dist.is_initialized()
    assert "LOCAL_WORLD_SIZE" not in os.environ


@pytest.mark.parametrize("world", [1, 2, 8])
def test_each_rank_holds_its_share(world: int) -> None:
    with VirtualGpu("rtx-4090", world=world):
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)]).cuda()
        if world > 1:
            dist.init_process_group("nccl")
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(8, 1024, device="cuda")).sum().backward()
        gathered = torch.cuda.memory_allocated()
        optimizer.step()
        state = torch.cuda.memory_allocated() - gathered
    assert state == 2 * 4 * 1024 * 1024 * 4 // world


@pytest.mark.parametrize(("world", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_a_rank_that_is_none_is_refused(world: int, rank: int) -> None:
    with pytest.raises(ValueError, match=r"must be at least 1|is not a rank"):
        VirtualGpu("rtx-4090", world=world, rank=rank)


def test_a_torch_without_a_private_name_is_told_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(virtual_world.torch.distributed.Reducer, "_rebuild_buckets")
    with pytest.raises(TorchVersionError, match=torch.__version__.replace("+", r"\+")), VirtualGpu("l4", world=2):
        pass


def test_a_process_that_is_spawned_for_each_card_runs_here() -> None:
    ran = []

    def train(rank: int, name: str) -> None:
        dist.init_process_group("nccl", rank=rank, world_size=2)
        gathered = [torch.zeros(3, device="cuda") for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, torch.ones(3, device="cuda"))
        future = dist.all_reduce(torch.ones(3, device="cuda"), async_op=True).get_future()
        halved = future.then(lambda done: done.value()[0] / 2).wait()
        ran.append((rank, name, len(gathered), halved.shape))

    with VirtualGpu("rtx-4090"):
        import_module("torch.multiprocessing").spawn(train, args=("cards",), nprocs=2)
    assert ran == [(0, "cards", 2, (3,))]
