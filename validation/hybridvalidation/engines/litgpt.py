"""LitGPT's fine-tuning (litgpt/finetune/lora.py, full.py): its model, Fabric and loss, all batches equally long.

The loop is that script's: logits in chunks of 128 rows, gradients kept over micro-batches, AdamW after the last. As in
the version of the recorded figures: embeddings are no StableEmbedding (added in October 2024, #1770), and products with
quantized weights are bitsandbytes 0.42's.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from unittest import mock

import bitsandbytes
import lightning as L  # noqa: N812  the name that its own documentation uses
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import StableEmbedding
from lightning.fabric.plugins import BitsandbytesPrecision
from litgpt.config import Config as FullConfig
from litgpt.lora import GPT, Config, mark_only_lora_as_trainable
from litgpt.model import GPT as FullGPT  # noqa: N811  an abbreviation
from litgpt.utils import chunked_cross_entropy, instantiate_bnb_optimizer, instantiate_torch_optimizer
from torch import Tensor, nn

from hybridtrain.models.model_config import ModelConfig
from hybridtrain.virtual_gpu.cards.card import find_card
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu
from hybridvalidation.engines.task import Task

_NUM_STEPS = 2


def plan(common: Mapping[str, Any], config: Mapping[str, Any], card: str) -> dict[str, float]:
    """Return the peak of allocated bytes, and whether an allocation failed."""
    settings = {**common, **config}
    name, length = settings["model"], settings["seq_len"]
    make = partial(FullConfig.from_name, name) if settings.get("lora") is None else partial(Config.from_name, name)
    gpu = VirtualGpu(find_card(card))
    batches = [[[0] * length] * settings["batch"]] * settings["micro_batches"]
    old_product = mock.patch.object(bitsandbytes.autograd._functions, "MatMul4Bit", _MatMul4Bit)
    old_embedding = mock.patch(f"{__name__}._make_embedding_stable")
    with suppress(torch.OutOfMemoryError), gpu, old_product, old_embedding:
        _run(make, settings, batches, precision="bf16-true", device="cuda", num_steps=_NUM_STEPS)
    return {"allocated_max": gpu.ledger.allocator.peak_allocated_bytes, "oom": float(gpu.oom is not None)}


def train(task: Task) -> list[float]:
    """Run the steps of a task. Settings: ``lora`` (of its ``Config``; none: full), ``quantize``, ``optimizer``."""
    settings = task.settings
    make = partial(FullConfig if settings.get("lora") is None else Config, **_shape(task.model))
    precision = "bf16-true" if task.precision == "bf16" else "bf16-mixed"
    device = task.device
    return _run(make, settings, task.batches, precision=precision, device=device, num_steps=task.num_steps)


def _shape(model: ModelConfig) -> dict[str, Any]:
    """Return a LLaMA as LitGPT's configurations describe it."""
    if model.family != "llama":
        raise ValueError(f"family: '{model.family}' is not supported by this engine; use 'llama'")
    return {
        "name": "llama", "block_size": model.max_seq_len, "n_layer": model.num_blocks, "n_embd": model.width,
        "vocab_size": model.vocab_size, "padded_vocab_size": model.vocab_size, "n_head": model.num_heads,
        "n_query_groups": model.num_kv_heads, "intermediate_size": model.ffn_width, "norm_eps": model.norm_eps,
        "rope_base": round(model.rope_theta), "rotary_percentage": 1.0, "parallel_residual": False, "bias": False,
        "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP",
    }  # fmt: skip


def _run(
    make: Callable[..., Any], settings: Mapping[str, Any], batches: Sequence[Sequence[Sequence[int]]], *,
    precision: str, device: str, num_steps: int,
) -> list[float]:  # fmt: skip
    """Fine-tune with the micro-batches of a step, the same ones each step; return the loss of each."""
    quantize = settings.get("quantize")
    plugins = BitsandbytesPrecision(quantize.removeprefix("bnb."), torch.bfloat16) if quantize else None
    fabric = L.Fabric(
        accelerator=device, devices=1, strategy="auto", precision=None if quantize else precision, plugins=plugins
    )
    is_full = settings.get("lora") is None
    with fabric.init_module(empty_init=False):
        if is_full:
            model = FullGPT(make())
        else:
            model = GPT(make(**settings["lora"]))
            mark_only_lora_as_trainable(model)
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(_make_optimizer(model, settings, is_quantized=bool(quantize)))
    model.max_seq_length = len(batches[0][0])
    losses = []
    for _ in range(num_steps):
        total = 0.0
        for batch in batches:
            ids = torch.tensor(batch, dtype=torch.int64)
            ids, targets = fabric.to_device(ids), fabric.to_device(ids.clone())
            if is_full:
                logits = model(ids)
                loss = chunked_cross_entropy(logits[..., :-1, :], targets[..., 1:])
            else:
                logits = model(ids, lm_head_chunk_size=128)
                logits[-1] = logits[-1][..., :-1, :]
                loss = chunked_cross_entropy(logits, targets[..., 1:])
            fabric.backward(loss / len(batches))
            total += loss.item() / len(batches)
            del logits, loss
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _make_optimizer(model: Any, settings: Mapping[str, Any], *, is_quantized: bool) -> Any:
    name = settings.get("optimizer", "torch.optim.AdamW")
    arguments = {"class_path": name, "init_args": {"lr": settings.get("lr", 2e-4)}}
    if not is_quantized:
        return instantiate_torch_optimizer(arguments, model.parameters())
    made = instantiate_bnb_optimizer(arguments, model.parameters())
    _make_embedding_stable(model)
    return made


def _make_embedding_stable(model: Any) -> None:
    """Replace the embedding as the script does where weights are quantized."""
    old = model.transformer.wte
    stable = StableEmbedding(old.num_embeddings, old.embedding_dim)
    with torch.no_grad():
        stable.weight.copy_(old.weight)
    model.transformer.wte = stable.to(device=old.weight.device, dtype=old.weight.dtype)


class _MatMul4Bit(torch.autograd.Function):
    """A product with a quantized weight, as in bitsandbytes 0.42: it dequantizes the weight, and keeps its input.

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
