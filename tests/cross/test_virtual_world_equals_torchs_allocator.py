"""The independent oracle of several cards: torch's own allocator events of a real rank, against one virtual rank.

The same script trains with real tensors as rank 0 of two under ``torch.profiler`` with memory, and once on the virtual
card. DDP's ranks are two processes on gloo. FSDP2's rank sends nothing (torch's fake group; sizes depend on no value):
gloo's threads free their copies at times of their own, which the profiler cannot tell from FSDP2's buffers. Left aside:
numbers and DDP's list of buckets (up to 64 bytes), cuBLAS's workspaces, and what is the CPU's or gloo's own.
"""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybridtrain.virtual_gpu import VirtualGpu, find_card
from memory_events import profiled_changes, summary

CARD = find_card("rtx-4090")
WORLD = 2
WIDTH = 64
SMALL = 64
SCRATCH = ("c10d::", "gloo:", "aten::_chunk_cat")
"""What gloo copies to and from, where NCCL has buffers of its own outside of torch's allocator; and what the CPU pads
and concatenates by several ops, where CUDA has one kernel (aten/src/ATen/native/cuda/TensorShape.cu)."""
KINDS = ("fsdp2", "fsdp2 mixed", "fsdp2 kept", "ddp")


@pytest.fixture(autouse=True)
def plain_products() -> Iterator[None]:
    """Products without oneDNN: on a processor with bfloat16 instructions it packs factors into tensors of its own."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


def build(kind: str, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    blocks = [nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)) for _ in range(3)]
    model: nn.Module = nn.Sequential(*blocks, nn.Linear(WIDTH, 33)).to(device)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32) if kind == "fsdp2 mixed" else MixedPrecisionPolicy()
        )
        mesh = init_device_mesh(device, (WORLD,))
        for block in model[:3]:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=kind != "fsdp2 kept")
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    for _ in range(2):
        model(torch.ones(16, WIDTH, device=device)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def run_rank(kind: str, rank: int, file: Path) -> list[int]:
    """Train as one rank; return what rank 0 allocated and freed."""
    if rank:
        torch.set_num_threads(1)  # a forked process has none of the threads that its parent's pool counts on
    if kind == "ddp":
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        return train_alone(kind, rank)
    finally:  # after the model: a reducer that holds gloo's group last waits for a thread that waits for it
        dist.destroy_process_group()


def train_alone(kind: str, rank: int) -> list[int]:
    """Train a model that lives no longer; return what rank 0 allocated and freed."""
    parts = build(kind, "cpu")
    if rank:
        train(*parts, "cpu")
        return []
    return profiled_changes(lambda: train(*parts, "cpu"), without=SCRATCH)


def executed(kind: str, folder: Path) -> list[int]:
    if kind != "ddp":
        return run_rank(kind, 0, folder)
    # The other rank first: forked before this process has threads of gloo's.
    other = multiprocessing.get_context("fork").Process(target=run_rank, args=(kind, 1, folder / "store"))
    other.start()
    found = run_rank(kind, 0, folder / "store")
    other.join()
    assert other.exitcode == 0
    return found


def planned(kind: str) -> list[int]:
    with VirtualGpu(CARD, world=WORLD) as gpu:
        dist.init_process_group("nccl")
        parts = build(kind, "cuda")
        before = gpu.ledger.trace()
        train(*parts, "cuda")
        trace = gpu.ledger.trace()
    known = len(before.sizes)  # torch's profiler does not tell when something older than itself is freed
    events = [event for event in trace.events[len(before.events) :] if event >= 0 or ~event >= known]
    changes = [trace.sizes[event] if event >= 0 else -trace.sizes[~event] for event in events]
    return [change for change in changes if abs(change) != CARD.cublas_workspace_bytes]


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_of_a_rank_is_torchs_own(kind: str, tmp_path: Path) -> None:
    sizes, peak, left = summary(planned(kind), SMALL)
    true_sizes, true_peak, true_left = summary(executed(kind, tmp_path), SMALL)
    assert (peak, left) == (true_peak, true_left)
    assert sizes == true_sizes
