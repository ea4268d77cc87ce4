"""Parameter names of transformers' GPT2LMHeadModel and LlamaForCausalLM, for loading and for parity tests."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridtrain.errors import ConfigError
from hybridtrain.models.block_model import BlockModel

_GPT2_BLOCK = {
    "attention_norm": "ln_1", "qkv": "attn.c_attn", "attention_out": "attn.c_proj",
    "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_out": "mlp.c_proj",
}  # fmt: skip
_LLAMA_BLOCK = {
    "attention_norm": "input_layernorm", "query": "self_attn.q_proj", "key": "self_attn.k_proj",
    "value": "self_attn.v_proj", "attention_out": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_out": "mlp.down_proj",
}  # fmt: skip
_FIXED = {
    "gpt2": {
        "embedding.token": "transformer.wte.weight", "embedding.position": "transformer.wpe.weight",
        "head.norm.weight": "transformer.ln_f.weight", "head.norm.bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
    },
    "llama": {
        "embedding.token": "model.embed_tokens.weight", "head.norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    },
}  # fmt: skip


def hf_name(family: str, name: str) -> str:
    """Return the transformers name of one of our qualified parameter names."""
    if name in _FIXED[family]:
        return _FIXED[family][name]
    _, block, layer, part = name.split(".")
    if family == "gpt2":
        return f"transformer.h.{block}.{_GPT2_BLOCK[layer]}.{part}"
    return f"model.layers.{block}.{_LLAMA_BLOCK[layer]}.{part}"


def is_transposed(family: str, name: str) -> bool:
    """Return whether transformers stores this weight as (in, out): GPT-2's Conv1D layers do."""
    return family == "gpt2" and name.startswith("block.") and name.endswith(".weight") and "norm" not in name


@torch.no_grad()
def load_hf_weights(model: BlockModel, state: Mapping[str, Tensor]) -> None:
    """Copy a transformers state dict into ``model``; raises ``ConfigError`` with every missing or misshapen weight."""
    family = model.config.family
    faults = []
    for name, parameter in model.named_unit_parameters():
        source = state.get(hf_name(family, name))
        if source is None:
            faults.append(f"{hf_name(family, name)}: missing")
            continue
        source = source.t() if is_transposed(family, name) else source
        if source.shape != parameter.shape:
            faults.append(f"{hf_name(family, name)}: {tuple(source.shape)} must be {tuple(parameter.shape)}")
            continue
        parameter.copy_(source)
    if faults:
        raise ConfigError("transformers weights", faults)
