"""Decoder families as data: which parts a decoder of each is made of. No torch.

The numbers of one model (sizes, windows, soft caps, angles) are ``model_config.ModelConfig``'s; what a family's members
share is here. A family whose parts are all known is one more entry.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Family: TypeAlias = Literal[
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "mixtral", "qwen3_moe"
]
"""Names of the decoder families."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The parts of a decoder. Defaults are LLaMA's (2302.13971)."""

    title: str
    """Its name in sentences."""
    norm: Literal["layer", "rms", "rms_plus_one"] = "rms"
    """``rms_plus_one``: root mean square, and what is stored is the weight less 1."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """Before each branch, on what it adds to the residual stream, or both."""
    positions: Literal["learned", "rotary"] = "rotary"
    fuses_qkv: bool = False
    """Query, key and value come from one matrix, in this order."""
    fuses_gate_up: bool = False
    """Gate and up projection are one matrix, the gate first."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Of the projections onto the residual stream, and of the feed-forward's first."""
    qk_norm: Literal["none", "head", "width"] = "none"
    """Queries and keys are normalised: each head by itself, or all heads as one vector."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    is_gated: bool = True
    """The feed-forward part is ``out(activation(gate(x)) * up(x))``, not ``out(activation(up(x)))``."""
    scales_embedding: bool = False
    """Embeddings are multiplied by sqrt(width), rounded to the type of the weights."""
    has_experts: bool = False
    groups_heads: bool = True
    """There may be fewer key/value heads than query heads."""
    has_dropout: bool = False


FAMILIES: dict[Family, Architecture] = {
    "gpt2": Architecture(
        title="GPT-2", norm="layer", positions="learned", fuses_qkv=True, qkv_bias=True, out_bias=True,
        activation="gelu_tanh", is_gated=False, groups_heads=False, has_dropout=True,
    ),  # Radford et al., 2019
    "llama": Architecture(title="LLaMA"),
    "mistral": Architecture(title="Mistral"),  # 2310.06825
    "qwen2": Architecture(title="Qwen2", qkv_bias=True),  # 2412.15115
    "qwen3": Architecture(title="Qwen3", qk_norm="head"),  # 2505.09388
    "gemma2": Architecture(
        title="Gemma 2", norm="rms_plus_one", norm_placement="sandwich", activation="gelu_tanh", scales_embedding=True
    ),  # 2408.00118
    "gemma3": Architecture(
        title="Gemma 3", norm="rms_plus_one", norm_placement="sandwich", qk_norm="head", activation="gelu_tanh",
        scales_embedding=True,
    ),  # 2503.19786
    "phi3": Architecture(title="Phi-3", fuses_qkv=True, fuses_gate_up=True),  # 2404.14219
    "olmo2": Architecture(title="OLMo 2", norm_placement="post", qk_norm="width"),  # 2501.00656
    "mixtral": Architecture(title="Mixtral", has_experts=True),  # 2401.04088
    "qwen3_moe": Architecture(title="Qwen3-MoE", qk_norm="head", has_experts=True),  # 2505.09388
}  # fmt: skip
