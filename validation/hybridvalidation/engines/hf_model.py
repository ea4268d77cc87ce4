"""A shape as transformers builds it: its own classes and defaults, random weights."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from hybridtrain.models.model_config import ModelConfig
from hybridvalidation.engines.task import Task


def hf_config(model: ModelConfig) -> Any:
    """Return the configuration of GPT2LMHeadModel or LlamaForCausalLM."""
    common = {"vocab_size": model.vocab_size, "tie_word_embeddings": model.tied, "bos_token_id": 0, "eos_token_id": 0}
    if model.family == "gpt2":
        return GPT2Config(
            n_positions=model.max_seq_len, n_embd=model.width, n_layer=model.num_blocks, n_head=model.num_heads,
            n_inner=model.ffn_width, layer_norm_epsilon=model.norm_eps, resid_pdrop=model.dropout,
            embd_pdrop=model.dropout, attn_pdrop=0.0, use_cache=False, **common,
        )  # fmt: skip
    return LlamaConfig(
        hidden_size=model.width, intermediate_size=model.ffn_width, num_hidden_layers=model.num_blocks,
        num_attention_heads=model.num_heads, num_key_value_heads=model.num_kv_heads,
        max_position_embeddings=model.max_seq_len, rms_norm_eps=model.norm_eps, rope_theta=model.rope_theta,
        use_cache=False, **common,
    )  # fmt: skip


def build_model(task: Task) -> Any:
    """Return the model on the host, in the precision that its weights are kept in."""
    dtype = torch.bfloat16 if task.precision == "bf16" else torch.float32
    return AutoModelForCausalLM.from_config(hf_config(task.model), dtype=dtype)
