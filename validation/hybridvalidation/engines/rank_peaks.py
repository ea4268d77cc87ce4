"""Peaks of memory of one rank of a world, for engines whose loops are written in this folder."""

from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu


def rank_peaks(gpu: VirtualGpu, train: Callable[[], None]) -> dict[str, float]:
    """Return the largest allocated and reserved bytes of a training loop, up to its end or a full card.

    Args:
        gpu: A card of a world, not entered yet.
        train: The loop; a process group of NCCL is open in it.
    """
    with suppress(torch.OutOfMemoryError), gpu:
        dist.init_process_group("nccl")
        train()
        dist.destroy_process_group()
    counted = gpu.ledger.allocator
    return {"allocated_max": counted.peak_allocated_bytes, "reserved_max": counted.peak_reserved_bytes}
