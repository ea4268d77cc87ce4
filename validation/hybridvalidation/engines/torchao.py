"""torchao's benchmark of its optimizers (benchmarks/benchmark_low_bit_adam.py): a vision transformer of timm.

The loop is that script's: batches of equally sized images, one step each; the figure is its final output.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from importlib import import_module
from typing import Any

import bitsandbytes
import torch
from torch import nn

from hybridtrain.virtual_gpu.cards.card import find_card
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu
from hybridvalidation.engines.torchvision_ops import declare_torchvision_ops

_NUM_STEPS = 3
_LOW_BIT = "torchao.prototype.low_bit_optim"


def plan(common: Mapping[str, Any], config: Mapping[str, Any], card: str) -> dict[str, float]:
    """Return the peak of allocated bytes, and whether an allocation failed."""
    gpu = VirtualGpu(find_card(card))
    with suppress(torch.OutOfMemoryError), gpu:
        _train({**common, **config})
    return {"allocated_max": gpu.ledger.allocator.peak_allocated_bytes, "oom": float(gpu.oom is not None)}


def _train(settings: Mapping[str, Any]) -> None:
    declare_torchvision_ops()
    timm = import_module("timm")
    model = timm.create_model(settings["model"], pretrained=False, num_classes=45, **settings.get("model_kwargs", {}))
    if settings.get("checkpoint_activations"):
        model.set_grad_checkpointing()
    if settings.get("full_bf16"):
        model.bfloat16()
    model.to("cuda")
    if settings.get("compile"):
        model.compile(fullgraph=True)
    make = _optimizers()[settings["optim"]]
    wrap = settings.get("optim_cpu_offload")
    if wrap:
        offload = import_module(_LOW_BIT).CPUOffloadOptimizer
        make = partial(offload, optimizer_class=make, offload_gradients=wrap == "ao_offload_grads")
    optimizer = make(model.parameters(), lr=1e-4, weight_decay=0, **settings.get("optim_kwargs", {}))
    model.train()
    for _ in range(_NUM_STEPS):
        images = torch.randn(settings["batch_size"], 3, 224, 224, device="cpu")
        labels = torch.zeros(settings["batch_size"], dtype=torch.int64)
        if settings.get("full_bf16"):
            images = images.bfloat16()
        with torch.autocast("cuda", dtype=torch.bfloat16) if settings.get("amp") else nullcontext():
            loss = nn.functional.cross_entropy(model(images.to("cuda")), labels.to("cuda"))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def _optimizers() -> dict[str, Callable[..., Any]]:
    low_bit = import_module(_LOW_BIT)
    return {
        "AdamW": partial(torch.optim.AdamW, fused=True), "AdamW8bitBnb": bitsandbytes.optim.AdamW8bit,
        "AdamW8bitAo": low_bit.AdamW8bit, "AdamWFp8Ao": low_bit.AdamWFp8, "AdamW4bitAo": low_bit.AdamW4bit,
    }  # fmt: skip
