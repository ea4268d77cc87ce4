"""Names of weights in transformers' checkpoints, for every family.

These are the names on disk: transformers 5 stacks experts in memory, and writes one tensor for each expert as
transformers 4 did.
"""

from dataclasses import dataclass

from hybridtrain.models.families import Family
from hybridtrain.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class HfWeight:
    """Where a checkpoint keeps one of our parameters."""

    names: tuple[str, ...]
    """One tensor; of experts one for each, which are stacked in this order."""
    is_stacked: bool = False
    """Our parameter has one more dimension, before the others: as many as there are names."""
    is_transposed: bool = False
    """Kept as (in, out): GPT-2's Conv1D layers are."""


_DECODER = "model.layers.{block}."
_OUTSIDE = {
    "embedding.token": "model.embed_tokens.weight", "head.norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}  # fmt: skip
_ATTENTION = {
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj",
    "attention_out": "self_attn.o_proj",
}  # fmt: skip
_QK_NORM = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
_PRE_NORM = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORM = {"attention_out_norm": "post_attention_layernorm", "ffn_out_norm": "post_feedforward_layernorm"}
_SANDWICH = {**_POST_NORM, "attention_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
_FFN = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_out": "mlp.down_proj"}
_LLAMA = {**_PRE_NORM, **_ATTENTION, **_FFN}

BLOCK_NAMES: dict[Family, dict[str, str]] = {
    "gpt2": {
        "attention_norm": "ln_1", "qkv": "attn.c_attn", "attention_out": "attn.c_proj",
        "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_out": "mlp.c_proj",
    },
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, **_QK_NORM},
    "gemma2": {**_SANDWICH, **_ATTENTION, **_FFN},
    "gemma3": {**_SANDWICH, **_ATTENTION, **_FFN, **_QK_NORM},
    "phi3": {
        **_PRE_NORM, "qkv": "self_attn.qkv_proj", "attention_out": "self_attn.o_proj",
        "ffn_gate_up": "mlp.gate_up_proj", "ffn_out": "mlp.down_proj",
    },
    "olmo2": {**_POST_NORM, **_ATTENTION, **_FFN, **_QK_NORM},
    "mixtral": {
        **_PRE_NORM, **_ATTENTION, "router": "block_sparse_moe.gate",
        "experts_gate": "block_sparse_moe.experts.{expert}.w1", "experts_up": "block_sparse_moe.experts.{expert}.w3",
        "experts_out": "block_sparse_moe.experts.{expert}.w2",
    },
    "qwen3_moe": {
        **_PRE_NORM, **_ATTENTION, **_QK_NORM, "router": "mlp.gate",
        "experts_gate": "mlp.experts.{expert}.gate_proj", "experts_up": "mlp.experts.{expert}.up_proj",
        "experts_out": "mlp.experts.{expert}.down_proj",
    },
}  # fmt: skip
"""Of a block: our name and transformers'. Ours end with ``.weight`` or ``.bias``, but for router and experts, which are
parameters themselves; theirs all do."""
PREFIXES: dict[Family, str] = {"gpt2": "transformer.h.{block}."}
"""Before the names of a block, where it is not ``model.layers.{block}.``."""
OUTSIDE_NAMES: dict[Family, dict[str, str]] = {
    "gpt2": {
        "embedding.token": "transformer.wte.weight", "embedding.position": "transformer.wpe.weight",
        "head.norm.weight": "transformer.ln_f.weight", "head.norm.bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
    },
}  # fmt: skip
"""Of embedding and head, where they are not as in most families."""

_TEXT_PREFIXES: dict[Family, dict[str, str]] = {
    "gemma3": {
        "language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model.",
    },
}  # fmt: skip
"""Before the names of a multimodal model's text part, on the hub and in transformers' memory, and what is instead of it
before those of the text model alone."""
_PARTS_BESIDE = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def hf_text_name(family: Family, name: str) -> str | None:
    """Return the name in a checkpoint of the text model alone; None: the tensor is of a part beside the text model.

    Args:
        family: Of the text model.
        name: In a checkpoint of the text model or of a multimodal one that has it.
    """
    prefixes = _TEXT_PREFIXES.get(family, {})
    if prefixes and name.startswith(_PARTS_BESIDE):
        return None
    found = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    return name if found is None else prefixes[found] + name.removeprefix(found)


def hf_weight(config: ModelConfig, name: str) -> HfWeight:
    """Return where transformers' checkpoints keep a parameter.

    Args:
        config: The model's shape.
        name: Qualified, as ``BlockModel.named_unit_parameters`` yields it: ``block.3.query.weight``.
    """
    family = config.family
    outside = OUTSIDE_NAMES.get(family, _OUTSIDE)
    if name in outside:
        return HfWeight((outside[name],))
    _, block, layer, *rest = name.split(".")
    part = rest[0] if rest else "weight"
    theirs = f"{PREFIXES.get(family, _DECODER)}{BLOCK_NAMES[family][layer]}.{part}"
    if "{expert}" in theirs:
        assert config.experts is not None, f"{family} has experts, its shape says how many"
        names = tuple(theirs.format(block=block, expert=expert) for expert in range(config.experts.count))
        return HfWeight(names, is_stacked=True)
    is_transposed = family == "gpt2" and part == "weight" and not layer.endswith("norm")
    return HfWeight((theirs.format(block=block),), is_transposed=is_transposed)
