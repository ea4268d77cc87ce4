"""The one decoder, built from the parts of its family's entry (``families.FAMILIES``).

B batch, T sequence, D width, V vocabulary, N query heads, K key/value heads, H head dim, F feed-forward.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridkernels.flash_attention.op import KeptAttention
from hybridkernels.geglu import geglu
from hybridkernels.rotary import rotary
from hybridkernels.swiglu import swiglu
from hybridtrain.models.block_model import Documents
from hybridtrain.models.experts import BalanceLoss, mix_experts
from hybridtrain.models.layers import ATTENTION, AttentionFunction, LayerNorm, RmsNorm, RotaryTable
from hybridtrain.models.linear import Linear, add_linear, dropout
from hybridtrain.models.model_config import ModelConfig, block_shapes
from hybridtrain.models.tiles import in_tiles
from hybridtrain.plan.memory_plan import Attention

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
_GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"silu": swiglu, "gelu_tanh": geglu}
"""activation(gate) * up, by activation."""
_FEED_FORWARD = "ffn_"
"""Names of its parameters begin so."""


def norm_of(config: ModelConfig, size: int, dtype: torch.dtype) -> nn.Module:
    """Return the family's norm layer for ``size`` elements."""
    if config.architecture.norm == "layer":
        return LayerNorm(size, config.norm_eps, dtype)
    return RmsNorm(size, config.norm_eps, dtype, plus_one=config.architecture.norm == "rms_plus_one")


def _rounded(value: float, dtype: torch.dtype) -> float:
    """Return ``value`` as ``dtype`` holds it, without a tensor that a ledger would count."""
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(fraction, bits)), exponent - bits)


class Embedding(nn.Module):
    """Token embedding, scaled in some families, and learned positions unless they are rotary."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.token = nn.Parameter(torch.empty(config.vocab_size, config.width, dtype=dtype))
        self.position: nn.Parameter | None = None
        if config.architecture.positions == "learned":
            self.position = nn.Parameter(torch.empty(config.max_seq_len, config.width, dtype=dtype))
        self.scale = config.width**0.5 if config.architecture.scales_embedding else 0.0

    def forward(self, token_ids_BT: Tensor, documents: Documents | None = None) -> Tensor:
        """Return hidden_BTD."""
        positions_BTD = None
        if self.position is not None:
            positions_BTD = self.position[: token_ids_BT.shape[1]]
            if documents is not None:
                positions_BTD = functional.embedding(documents.positions_BT, self.position)
        hidden_BTD = functional.embedding(token_ids_BT, self.token)
        if self.scale:  # transformers rounds the factor before it multiplies
            hidden_BTD = hidden_BTD * _rounded(self.scale, self.token.dtype)
        if positions_BTD is not None:
            hidden_BTD = hidden_BTD + positions_BTD
        return dropout(hidden_BTD, self.dropout, training=self.training)


class Block(nn.Module):
    """Attention and feed-forward, each on a residual branch, with the parameters of ``block_shapes``."""

    attention_norm: nn.Module
    qkv: Linear
    query: Linear
    key: Linear
    value: Linear
    query_norm: nn.Module
    key_norm: nn.Module
    attention_out: Linear
    attention_out_norm: nn.Module
    ffn_norm: nn.Module
    router: nn.Parameter
    experts_gate: nn.Parameter
    experts_up: nn.Parameter
    experts_out: nn.Parameter
    ffn_gate_up: Linear
    ffn_gate: Linear
    ffn_up: Linear
    ffn_out: Linear
    ffn_out_norm: nn.Module

    def __init__(self, config: ModelConfig, number: int, rotary_table: RotaryTable | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = config.architecture
        self.head_dim = config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.qkv_widths = (config.num_heads * config.head_dim, kv_width, kv_width)
        self.dropout = config.dropout
        self.rotary_table = rotary_table
        self.window = config.window_of(number)
        self.scale_and_softcap = config.query_scale or None, config.attention_softcap
        self.attention: AttentionFunction = ATTENTION[Attention.FLASH]
        self.adds_in_matmul = not (self.parts.norm_placement != "pre" or self.parts.out_bias or config.dropout)
        """Whether the last matmul of a branch adds the residual stream itself."""
        self.tile_tokens = 0
        """Tokens of a slice of the feed-forward branch; 0: all."""
        self.experts = config.experts
        shapes = block_shapes(config)
        for path, shape in shapes.items():
            name, _, part = path.partition(".")
            if not part:
                self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype)))
            elif part == "weight" and name.endswith("norm"):
                self.add_module(name, norm_of(config, shape[0], dtype))
            elif part == "weight":
                self.add_module(name, Linear(shape[1], shape[0], bias=f"{name}.bias" in shapes, dtype=dtype))
        for name in Block.__annotations__:
            if name.endswith("norm") and name not in self._modules:
                self.add_module(name, nn.Identity())

    def forward(
        self, hidden_BTD: Tensor, documents: Documents | None = None, balance: BalanceLoss | None = None, *,
        computes_output: bool = True, kept: KeptAttention | None = None,
    ) -> Tensor:  # fmt: skip
        """Return hidden_BTD; without ``computes_output`` its values are undefined, but gradients are right."""
        if self.adds_in_matmul:
            attended_BTD = self._attend(self.attention_norm(hidden_BTD), documents, kept)
            hidden_BTD = add_linear(hidden_BTD, attended_BTD, self.attention_out)
        else:
            hidden_BTD = hidden_BTD + dropout(
                self.attention_out_norm(self._attend(self.attention_norm(hidden_BTD), documents, kept)),
                self.dropout, training=self.training,
            )  # fmt: skip
        add = partial(self._add_feed_forward, balance)
        if not self.tile_tokens:
            return add(hidden_BTD, computes_output=computes_output)
        parameters = [
            parameter
            for name, parameter in self.named_parameters()
            if name.startswith(_FEED_FORWARD) and parameter.requires_grad
        ]
        tokens = self.tile_tokens
        return in_tiles(add, hidden_BTD, parameters, tile_tokens=tokens, computes_output=computes_output)

    def _add_feed_forward(self, balance: BalanceLoss | None, hidden_BTD: Tensor, *, computes_output: bool) -> Tensor:
        """Return hidden_BTD with the feed-forward branch added."""
        if self.adds_in_matmul and self.experts is None:
            inner_BTF = self._inner(self.ffn_norm(hidden_BTD))
            if computes_output:
                return add_linear(hidden_BTD, inner_BTF, self.ffn_out)
            return hidden_BTD + self.ffn_out(inner_BTF, computes_output=False)  # type: ignore[no-any-return]
        feed_forward_BTD = self._feed_forward(self.ffn_norm(hidden_BTD), balance, computes_output=computes_output)
        return hidden_BTD + dropout(self.ffn_out_norm(feed_forward_BTD), self.dropout, training=self.training)

    def _attend(self, normed_BTD: Tensor, documents: Documents | None, kept: KeptAttention | None) -> Tensor:
        """Return the heads' outputs, projected unless the projection adds to the residual stream itself."""
        scale, softcap = self.scale_and_softcap
        ids_BT = None if documents is None else documents.ids_BT
        attention = partial(self.attention, scale=scale, softcap=softcap, window=self.window, document_ids_BT=ids_BT)
        if kept is not None:
            attention = partial(attention, kept=kept)
        if self.parts.fuses_qkv:
            q, k, v = self.qkv(normed_BTD).split(self.qkv_widths, dim=-1)
            q_BTNH, k_BTKH = self._heads(q, self.query_norm, documents), self._heads(k, self.key_norm, documents)
            out_BTNH = attention(q_BTNH, k_BTKH, self._split(v))
        else:
            q_BTNH = self._heads(self.query(normed_BTD), self.query_norm, documents)
            k_BTKH = self._heads(self.key(normed_BTD), self.key_norm, documents)
            # It holds the values alone: they go when it is done.
            out_BTNH = attention(q_BTNH, k_BTKH, self._split(self.value(normed_BTD)))
        out_BTD = out_BTNH.flatten(-2)
        return out_BTD if self.adds_in_matmul else self.attention_out(out_BTD)

    def _heads(self, x_BTX: Tensor, norm: nn.Module, documents: Documents | None) -> Tensor:
        """Return queries or keys by heads: normalised, turned by their positions."""
        if self.parts.qk_norm == "width":
            return self._turn(self._split(norm(x_BTX)), documents)
        return self._turn(norm(self._split(x_BTX)), documents)

    def _split(self, x_BTX: Tensor) -> Tensor:
        return x_BTX.view(*x_BTX.shape[:-1], -1, self.head_dim)

    def _turn(self, x_BTNH: Tensor, documents: Documents | None) -> Tensor:
        if self.rotary_table is None:
            return x_BTNH
        seq_len = x_BTNH.shape[1]
        tables = self.rotary_table.cos_TR[:seq_len], self.rotary_table.sin_TR[:seq_len]
        return rotary(x_BTNH, *tables, None if documents is None else documents.positions_BT)

    def _feed_forward(self, normed_BTD: Tensor, balance: BalanceLoss | None, *, computes_output: bool) -> Tensor:
        if self.experts is not None:
            weights = self.experts_gate, self.experts_up, self.experts_out
            activation = _GATED[self.parts.activation]
            return mix_experts(normed_BTD, self.router, weights, self.experts, activation, balance)
        inner_BTF = self._inner(normed_BTD)
        # A norm after the projection keeps what it normalises.
        computes_output = computes_output or self.parts.norm_placement != "pre"
        return self.ffn_out(inner_BTF, computes_output=computes_output)  # type: ignore[no-any-return]

    def _inner(self, normed_BTD: Tensor) -> Tensor:
        """Return the input of the feed-forward part's last projection."""
        if not self.parts.is_gated:
            return _ACTIVATIONS[self.parts.activation](self.ffn_up(normed_BTD))
        if self.parts.fuses_gate_up:
            return _GATED[self.parts.activation](*self.ffn_gate_up(normed_BTD).chunk(2, dim=-1))
        return _GATED[self.parts.activation](self.ffn_gate(normed_BTD), self.ffn_up(normed_BTD))
