"""fsdp_qlora's LoRA on several cards (train.py, ``--train_type lora``): FSDP, transformers and PEFT.

Loop, wrapping and settings are that script's, rewritten here: bfloat16 everywhere, AdamW, nothing offloaded. Adapters
of rank 64 on six projections are units of their own; every layer has a reentrant checkpoint. The loss is computed as in
transformers of early 2024: of fp32 logits, shifted and copied.
"""

import functools
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hybridtrain.virtual_gpu.cards.card import find_card
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu


def plan(common: Mapping[str, Any], config: Mapping[str, Any], card: str) -> dict[str, float]:
    """Return the largest reserved bytes of rank 0, which the script prints, and whether it ran out of memory."""
    settings = {**common, **config}
    gpu = VirtualGpu(find_card(card), world=settings["world"])
    with suppress(torch.OutOfMemoryError), gpu:
        dist.init_process_group("nccl")
        _train(settings)
    peak = gpu.ledger.allocator.peak_reserved_bytes
    return {"reserved_max": float(peak), "oom": float(gpu.oom is not None)}


class Llama(LlamaForCausalLM):  # type: ignore[misc]
    """Llama with the loss of transformers 4.38: fp32 logits are kept, and copied when they are shifted."""

    def forward(self, input_ids: Tensor, labels: Tensor, **options: Any) -> Any:
        """Return loss and logits."""
        hidden = self.model(input_ids=input_ids, use_cache=False, **options)[0]
        logits = self.lm_head(hidden).float()
        shifted = logits[..., :-1, :].contiguous().view(-1, self.config.vocab_size)
        return functional.cross_entropy(shifted, labels[..., 1:].contiguous().view(-1)), logits


def _train(settings: Mapping[str, Any]) -> None:
    model: Any = Llama(LlamaConfig(**settings["model"], use_cache=False)).to(torch.bfloat16)
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", **settings["adapter"])
    model = peft.get_peft_model(model, adapter, autocast_adapter_dtype=False)
    model = FullyShardedDataParallel(
        model, sharding_strategy=ShardingStrategy[settings["sharding"]], auto_wrap_policy=_policy(),
        use_orig_params=False, limit_all_gathers=True, device_id=torch.cuda.current_device(), sync_module_states=True,
    )  # fmt: skip
    model.enable_input_require_grads()
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
    apply_activation_checkpointing(model, wrapper, lambda module: isinstance(module, LlamaDecoderLayer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    torch.cuda.reset_peak_memory_stats()
    model.train()
    losses = torch.zeros(2).to("cuda")
    shape = settings["batch_size"], settings["tokens"]
    for _ in range(settings["steps"]):
        ids, labels = (torch.zeros(shape, dtype=torch.int64).to("cuda") for _ in range(2))
        output = model(ids, labels=labels, attention_mask=None)
        loss = output[0] / 1
        loss.backward()
        losses[0] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        del output, loss
        dist.all_reduce(losses)


def _policy() -> Any:
    """Return the FSDP wrapping policy: every layer, and every trained matrix by itself."""

    def is_trained_leaf(module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        return not list(module.children()) and weight is not None and weight.requires_grad

    layers = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    return functools.partial(
        _or_policy, policies=[functools.partial(lambda_auto_wrap_policy, lambda_fn=is_trained_leaf), layers]
    )
