"""LitGPT's fine-tuning (litgpt/finetune/lora.py, full.py): its model, its Fabric, its loss, a batch as long as any.

The loop is that script's: logits in chunks of 128 rows, gradients kept over micro-batches, AdamW after the last. What
was otherwise when the figures were made is as it was then: embeddings are no StableEmbedding (added in October 2024,
#1770), and products with quantized weights are bitsandbytes 0.42's.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from unittest import mock

import bitsandbytes
import lightning as L  # noqa: N812  the name that its own documentation uses
import torch
from bitsandbytes.functional import dequantize_4bit
from lightning.fabric.plugins import BitsandbytesPrecision
from litgpt.config import Config as FullConfig
from litgpt.lora import GPT, Config, mark_only_lora_as_trainable
from litgpt.model import GPT as FullGPT  # noqa: N811  an abbreviation
from litgpt.utils import chunked_cross_entropy, instantiate_bnb_optimizer, instantiate_torch_optimizer
from torch import Tensor, nn

from hybridtrain.virtual_gpu.card import find_card
from hybridtrain.virtual_gpu.virtual_gpu import VirtualGpu

_NUM_STEPS = 2


def plan(common: Mapping[str, Any], config: Mapping[str, Any], card: str) -> dict[str, float]:
    """Return the peak of allocated bytes, and whether the card refused a request on the way."""
    settings = {**common, **config}
    gpu = VirtualGpu(find_card(card))
    old_product = mock.patch.object(bitsandbytes.autograd._functions, "MatMul4Bit", _MatMul4Bit)
    with suppress(torch.OutOfMemoryError), gpu, old_product:
        _train(settings)
    return {"allocated_max": gpu.ledger.allocator.peak_allocated_bytes, "oom": float(gpu.oom is not None)}


def _train(settings: Mapping[str, Any]) -> None:
    quantize = settings.get("quantize")
    plugins = BitsandbytesPrecision(quantize.removeprefix("bnb."), torch.bfloat16) if quantize else None
    fabric = L.Fabric(
        accelerator="cuda", devices=1, strategy="auto", precision=None if quantize else "bf16-true", plugins=plugins
    )
    is_full = settings.get("lora") is None
    with fabric.init_module(empty_init=False):
        if is_full:
            model = FullGPT(FullConfig.from_name(settings["model"]))
        else:
            model = GPT(Config.from_name(settings["model"], **settings["lora"]))
            mark_only_lora_as_trainable(model)
    model = fabric.setup_module(model)
    arguments = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 2e-4}}
    if quantize:
        made = instantiate_bnb_optimizer(arguments, model.parameters())
    else:
        made = instantiate_torch_optimizer(arguments, model.parameters())
    optimizer = fabric.setup_optimizers(made)
    model.max_seq_length = settings["seq_len"]
    for _ in range(_NUM_STEPS):
        for micro in range(settings["micro_batches"]):
            ids = torch.zeros(settings["batch"], settings["seq_len"], dtype=torch.int64)
            ids, targets = fabric.to_device(ids), fabric.to_device(ids.clone())
            if is_full:
                logits = model(ids)
                loss = chunked_cross_entropy(logits[..., :-1, :], targets[..., 1:])
            else:
                logits = model(ids, lm_head_chunk_size=128)
                logits[-1] = logits[-1][..., :-1, :]
                loss = chunked_cross_entropy(logits, targets[..., 1:])
            fabric.backward(loss / settings["micro_batches"])
            del logits, loss
            if micro == settings["micro_batches"] - 1:
                optimizer.step()
                optimizer.zero_grad()


class _MatMul4Bit(torch.autograd.Function):
    """A product with a quantized weight, as in bitsandbytes 0.42: it makes the weight whole, and keeps its input.

    Every figure planned here was made with 0.41.1, or with 0.42, to which LitGPT held until December 2024. Since
    0.43 (bitsandbytes/autograd/_functions.py) the input is not kept; newer ones multiply in one kernel.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor, _out: None, bias: Tensor | None, state: Any) -> Tensor:
        ctx.state, ctx.kept = state, (inputs, packed)
        return nn.functional.linear(inputs, dequantize_4bit(packed, state).to(inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        _, packed = ctx.kept
        return grad @ dequantize_4bit(packed, ctx.state).to(grad.dtype), None, None, None, None
