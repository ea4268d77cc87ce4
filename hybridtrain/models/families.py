"""Decoder families as data, one entry each: the parts of the decoder, and transformers' names. No torch.

Settings of a single model (sizes, windows, soft caps, angles) are in ``model_config.ModelConfig``. Weight names are
those on disk: transformers 5 stacks experts only in memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

Family: TypeAlias = Literal[
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "mixtral", "qwen3_moe"
]
"""Names of the decoder families."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfMultimodal:
    """transformers' multimodal class around a decoder, whose keys are in ``text_config``."""

    architecture: str
    model_type: str
    is_tied: bool
    """Default of ``tie_word_embeddings``, which is outside of ``text_config``."""
    text: Mapping[str, Any]
    """Default sizes: files on the hub omit the text class's defaults."""
    prefixes: Mapping[str, str]
    """Prefixes of the text part's tensors: hub name and transformers' name -> name in the text model alone."""
    beside: tuple[str, ...]
    """Prefixes of the other parts' tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfFamily:
    """transformers' class of a family: its keys in ``config.json`` and its weight names."""

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    """The class's defaults for keys that may be missing."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys with only one supported value, and that value; missing or null is allowed."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Keys with another name than in LLaMA's class: LLaMA's -> the family's."""
    window: Literal["none", "all", "layers"] = "none"
    """Which blocks have a ``sliding_window``: none, all, or those in layer_types or older keys."""
    multimodal: HfMultimodal | None = None
    block_prefix: str = "model.layers.{block}."
    weights: Mapping[str, str] = field(default_factory=dict)
    """Weight names that differ from ``WEIGHT_NAMES``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The parts of a decoder. Defaults are LLaMA's (2302.13971)."""

    title: str
    """Family name in messages."""
    hf: HfFamily = field(compare=False)
    norm: Literal["layer", "rms", "rms_plus_one"] = "rms"
    """``rms_plus_one``: RMS norm whose stored weight is the weight minus 1."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """pre: before each branch; post: on its output; sandwich: both."""
    positions: Literal["learned", "rotary"] = "rotary"
    fuses_qkv: bool = False
    """Whether query, key and value are one matrix, in this order."""
    fuses_gate_up: bool = False
    """Whether gate and up projection are one matrix, gate first."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Whether attention's and the feed-forward's output projections have a bias."""
    qk_norm: Literal["none", "head", "width"] = "none"
    """Norm of queries and keys: per head, or over all heads as one vector."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    is_gated: bool = True
    """Whether the feed-forward is ``out(activation(gate(x)) * up(x))`` instead of ``out(activation(up(x)))``."""
    scales_embedding: bool = False
    """Whether embeddings are multiplied by sqrt(width), rounded to the weights' dtype."""
    has_experts: bool = False
    groups_heads: bool = True
    """Whether there may be fewer key/value heads than query heads."""
    has_dropout: bool = False


WEIGHT_NAMES: Final[Mapping[str, str]] = {
    "embedding.token": "model.embed_tokens", "head.norm": "model.norm", "head": "lm_head",
    "attention_norm": "input_layernorm", "attention_out_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm", "ffn_out_norm": "post_feedforward_layernorm",
    "qkv": "self_attn.qkv_proj", "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj",
    "query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm", "attention_out": "self_attn.o_proj",
    "ffn_gate_up": "mlp.gate_up_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_out": "mlp.down_proj",
    "router": "mlp.gate", "experts_gate": "mlp.experts.{expert}.gate_proj",
    "experts_up": "mlp.experts.{expert}.up_proj", "experts_out": "mlp.experts.{expert}.down_proj",
}  # fmt: skip
"""Our parameter names -> transformers' usual ones, for embedding, head and block."""

_LLAMA: Final = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0}
_GEMMA: Final = {
    **_LLAMA, "tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "num_key_value_heads": 4,
    "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA_SPELLING: Final[Mapping[str, Any]] = {
    "fixed": {"attention_bias": False, "use_bidirectional_attention": False}, "window": "layers",
    "renamed": {"hidden_act": "hidden_activation"}, "weights": {"ffn_norm": "pre_feedforward_layernorm"},
}  # fmt: skip
_QWEN: Final = {**_LLAMA, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_EXPERTS: Final = {"output_router_logits": False, "router_aux_loss_coef": 0.001}

FAMILIES: Final[Mapping[Family, Architecture]] = {
    "gpt2": Architecture(  # Radford et al., 2019
        title="GPT-2", norm="layer", positions="learned", fuses_qkv=True, qkv_bias=True, out_bias=True,
        activation="gelu_tanh", is_gated=False, groups_heads=False, has_dropout=True,
        hf=HfFamily(
            architecture="GPT2LMHeadModel", model_type="gpt2",
            renamed={
                "max_position_embeddings": "n_positions", "num_hidden_layers": "n_layer", "hidden_size": "n_embd",
                "num_attention_heads": "n_head", "intermediate_size": "n_inner", "hidden_act": "activation_function",
                "rms_norm_eps": "layer_norm_epsilon",
            },
            defaults={
                "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "activation_function": "gelu_new",
                "resid_pdrop": 0.1, "embd_pdrop": 0.1,
            },
            fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
            block_prefix="transformer.h.{block}.",
            weights={
                "embedding.token": "transformer.wte", "embedding.position": "transformer.wpe",
                "head.norm": "transformer.ln_f", "attention_norm": "ln_1", "qkv": "attn.c_attn",
                "attention_out": "attn.c_proj", "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_out": "mlp.c_proj",
            },
        ),
    ),
    "llama": Architecture(
        title="LLaMA",
        hf=HfFamily(
            architecture="LlamaForCausalLM", model_type="llama", defaults=_LLAMA,
            fixed={"attention_bias": False, "mlp_bias": False},
        ),
    ),
    "mistral": Architecture(  # 2310.06825
        title="Mistral",
        hf=HfFamily(
            architecture="MistralForCausalLM", model_type="mistral", window="all",
            defaults={**_LLAMA, "sliding_window": 4096, "num_key_value_heads": 8},
        ),
    ),
    "qwen2": Architecture(  # 2412.15115
        title="Qwen2", qkv_bias=True,
        hf=HfFamily(architecture="Qwen2ForCausalLM", model_type="qwen2", defaults=_QWEN, window="layers"),
    ),
    "qwen3": Architecture(  # 2505.09388
        title="Qwen3", qk_norm="head",
        hf=HfFamily(
            architecture="Qwen3ForCausalLM", model_type="qwen3", defaults={**_QWEN, "head_dim": 128},
            fixed={"attention_bias": False}, window="layers",
        ),
    ),
    "gemma2": Architecture(  # 2408.00118
        title="Gemma 2", norm="rms_plus_one", norm_placement="sandwich", activation="gelu_tanh", scales_embedding=True,
        hf=HfFamily(
            architecture="Gemma2ForCausalLM", model_type="gemma2", **_GEMMA_SPELLING,
            defaults={
                **_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2
            },
        ),
    ),
    "gemma3": Architecture(  # 2503.19786
        title="Gemma 3", norm="rms_plus_one", norm_placement="sandwich", qk_norm="head", activation="gelu_tanh",
        scales_embedding=True,
        hf=HfFamily(
            architecture="Gemma3ForCausalLM", model_type="gemma3_text", **_GEMMA_SPELLING,
            defaults={
                **_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6,
                "final_logit_softcapping": None,
            },
            multimodal=HfMultimodal(
                architecture="Gemma3ForConditionalGeneration", model_type="gemma3", is_tied=True,
                text={  # of transformers' Gemma3TextConfig
                    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
                    "num_attention_heads": 8, "max_position_embeddings": 131072,
                },
                prefixes={
                    "language_model.model.": "model.", "language_model.lm_head.": "lm_head.",
                    "model.language_model.": "model.",
                },
                beside=(
                    "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."
                ),
            ),
        ),
    ),
    "phi3": Architecture(  # 2404.14219
        title="Phi-3", fuses_qkv=True, fuses_gate_up=True,
        hf=HfFamily(
            architecture="Phi3ForCausalLM", model_type="phi3", window="all",
            defaults={**_LLAMA, "rms_norm_eps": 1e-5, "sliding_window": None},
            fixed={"resid_pdrop": 0, "embd_pdrop": 0},
        ),
    ),
    "olmo2": Architecture(  # 2501.00656
        title="OLMo 2", norm_placement="post", qk_norm="width",
        hf=HfFamily(
            architecture="Olmo2ForCausalLM", model_type="olmo2", defaults={**_LLAMA, "rms_norm_eps": 1e-5},
            fixed={"attention_bias": False},
        ),
    ),
    "mixtral": Architecture(  # 2401.04088
        title="Mixtral", has_experts=True,
        hf=HfFamily(
            architecture="MixtralForCausalLM", model_type="mixtral", window="all",
            defaults={
                **_LLAMA, **_EXPERTS, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
                "num_key_value_heads": 8, "num_experts_per_tok": 2,
            },
            fixed={"router_jitter_noise": 0},
            weights={
                "router": "block_sparse_moe.gate", "experts_gate": "block_sparse_moe.experts.{expert}.w1",
                "experts_up": "block_sparse_moe.experts.{expert}.w3",
                "experts_out": "block_sparse_moe.experts.{expert}.w2",
            },
        ),
    ),
    "qwen3_moe": Architecture(  # 2505.09388
        title="Qwen3-MoE", qk_norm="head", has_experts=True,
        hf=HfFamily(
            architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", window="all",
            defaults={**_QWEN, **_EXPERTS, "num_experts_per_tok": 8, "norm_topk_prob": False},
            fixed={"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        ),
    ),
}  # fmt: skip
