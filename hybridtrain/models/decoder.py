"""The one decoder, put together from the parts that its family's entry names (``families.FAMILIES``).

B batch, T sequence, D width, V vocabulary, N query heads, K key/value heads, H head dim, F feed-forward.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridkernels.geglu import geglu
from hybridkernels.rotary import rotary
from hybridkernels.swiglu import swiglu
from hybridtrain.models.block_model import Documents
from hybridtrain.models.experts import BalanceLoss, mix_experts
from hybridtrain.models.layers import ATTENTION, AttentionFunction, LayerNorm, RmsNorm, RotaryTable
from hybridtrain.models.linear import Linear, add_linear, dropout
from hybridtrain.models.model_config import Experts, ModelConfig
from hybridtrain.plan.memory_plan import Attention

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


_GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"silu": swiglu, "gelu_tanh": geglu}
"""Of gate and up projection: activation(gate) * up."""


def norm_of(config: ModelConfig, size: int, dtype: torch.dtype) -> nn.Module:
    """Return the family's norm over ``size`` elements."""
    if config.architecture.norm == "layer":
        return LayerNorm(size, config.norm_eps, dtype)
    return RmsNorm(size, config.norm_eps, dtype, plus_one=config.architecture.norm == "rms_plus_one")


def _rounded(value: float, dtype: torch.dtype) -> float:
    """Return ``value`` as ``dtype`` holds it, without a tensor that a ledger would count."""
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(fraction, bits)), exponent - bits)


class Embedding(nn.Module):
    """Token embedding, scaled or not, and learned positions where they do not enter in the attention."""

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
        positions_BTD = self._positions(token_ids_BT.shape[1], documents)
        hidden_BTD = functional.embedding(token_ids_BT, self.token)
        if self.scale:  # transformers rounds the factor before it multiplies
            hidden_BTD = hidden_BTD * _rounded(self.scale, self.token.dtype)
        if positions_BTD is not None:
            hidden_BTD = hidden_BTD + positions_BTD
        return dropout(hidden_BTD, self.dropout, training=self.training)

    def _positions(self, seq_len: int, documents: Documents | None) -> Tensor | None:
        """Return the learned positions, of one row for all or of each row; None: they are not learned."""
        if self.position is None:
            return None
        if documents is None:
            return self.position[:seq_len]
        return functional.embedding(documents.positions_BT, self.position)


class Block(nn.Module):
    """Attention and feed-forward, each on a residual branch."""

    def __init__(self, config: ModelConfig, number: int, rotary_table: RotaryTable | None, dtype: torch.dtype) -> None:
        super().__init__()
        parts, width, head_dim = config.architecture, config.width, config.head_dim
        q_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
        norms_before, norms_after = parts.norm_placement != "post", parts.norm_placement != "pre"
        self.parts = parts
        self.head_dim = head_dim
        self.qkv_widths = (q_width, kv_width, kv_width)
        self.dropout = config.dropout
        self.rotary_table = rotary_table
        self.window = config.window_of(number)
        self.scale_and_softcap = config.query_scale or None, config.attention_softcap
        self.attention: AttentionFunction = ATTENTION[Attention.FLASH]
        self.adds_in_matmul = not (norms_after or parts.out_bias or config.dropout)
        """The last matmul of a branch adds the residual stream itself."""
        self.attention_norm = norm_of(config, width, dtype) if norms_before else nn.Identity()
        if parts.fuses_qkv:
            self.qkv = Linear(width, sum(self.qkv_widths), bias=parts.qkv_bias, dtype=dtype)
        else:
            self.query = Linear(width, q_width, bias=parts.qkv_bias, dtype=dtype)
            self.key = Linear(width, kv_width, bias=parts.qkv_bias, dtype=dtype)
            self.value = Linear(width, kv_width, bias=parts.qkv_bias, dtype=dtype)
        self.query_norm: nn.Module = nn.Identity()
        self.key_norm: nn.Module = nn.Identity()
        if parts.qk_norm != "none":
            self.query_norm = norm_of(config, q_width if parts.qk_norm == "width" else head_dim, dtype)
            self.key_norm = norm_of(config, kv_width if parts.qk_norm == "width" else head_dim, dtype)
        self.attention_out = Linear(q_width, width, bias=parts.out_bias, dtype=dtype)
        self.attention_out_norm = norm_of(config, width, dtype) if norms_after else nn.Identity()
        self.ffn_norm = norm_of(config, width, dtype) if norms_before else nn.Identity()
        self.experts = config.experts
        if config.experts:
            self._add_experts(config.experts, width, dtype)
        else:
            self._add_feed_forward(width, config.ffn_width, dtype)
        self.ffn_out_norm = norm_of(config, width, dtype) if norms_after else nn.Identity()

    def _add_experts(self, experts: Experts, width: int, dtype: torch.dtype) -> None:
        def matrices(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(experts.count, *shape, dtype=dtype))

        self.router = matrices(width)
        self.experts_gate = matrices(experts.ffn_width, width)
        self.experts_up = matrices(experts.ffn_width, width)
        self.experts_out = matrices(width, experts.ffn_width)

    def _add_feed_forward(self, width: int, ffn_width: int, dtype: torch.dtype) -> None:
        bias = self.parts.out_bias
        if self.parts.fuses_gate_up:
            self.ffn_gate_up = Linear(width, 2 * ffn_width, bias=bias, dtype=dtype)
        else:
            if self.parts.is_gated:
                self.ffn_gate = Linear(width, ffn_width, bias=bias, dtype=dtype)
            self.ffn_up = Linear(width, ffn_width, bias=bias, dtype=dtype)
        self.ffn_out = Linear(ffn_width, width, bias=bias, dtype=dtype)

    def forward(
        self, hidden_BTD: Tensor, documents: Documents | None = None, balance: BalanceLoss | None = None, *,
        computes_output: bool = True,
    ) -> Tensor:  # fmt: skip
        """Return hidden_BTD; without ``computes_output`` its values are undefined, but it can be differentiated."""
        if self.adds_in_matmul:
            attended_BTD = self._attend(self.attention_norm(hidden_BTD), documents)
            hidden_BTD = add_linear(hidden_BTD, attended_BTD, self.attention_out)
        else:
            hidden_BTD = hidden_BTD + self._branch(
                self.attention_out_norm(self._attend(self.attention_norm(hidden_BTD), documents))
            )
        if self.adds_in_matmul and self.experts is None:
            inner_BTF = self._inner(self.ffn_norm(hidden_BTD))
            if computes_output:
                return add_linear(hidden_BTD, inner_BTF, self.ffn_out)
            return hidden_BTD + self.ffn_out(inner_BTF, computes_output=False)  # type: ignore[no-any-return]
        feed_forward_BTD = self._feed_forward(self.ffn_norm(hidden_BTD), balance, computes_output=computes_output)
        return hidden_BTD + self._branch(self.ffn_out_norm(feed_forward_BTD))

    def _attend(self, normed_BTD: Tensor, documents: Documents | None) -> Tensor:
        """Return what the heads found, or its projection where that does not add to the residual stream itself."""
        scale, softcap = self.scale_and_softcap
        ids_BT = None if documents is None else documents.ids_BT
        if self.parts.fuses_qkv:
            q, k, v = self.qkv(normed_BTD).split(self.qkv_widths, dim=-1)
            q_BTNH, k_BTKH = self._heads(q, self.query_norm, documents), self._heads(k, self.key_norm, documents)
            out_BTNH = self.attention(
                q_BTNH, k_BTKH, self._split(v), scale=scale, softcap=softcap, window=self.window, document_ids_BT=ids_BT
            )
        else:
            q_BTNH = self._heads(self.query(normed_BTD), self.query_norm, documents)
            k_BTKH = self._heads(self.key(normed_BTD), self.key_norm, documents)
            out_BTNH = self.attention(  # holds the values alone: they go when it is done
                q_BTNH, k_BTKH, self._split(self.value(normed_BTD)), scale=scale, softcap=softcap, window=self.window,
                document_ids_BT=ids_BT,
            )  # fmt: skip
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
        """Return what the feed-forward part's last projection multiplies."""
        if not self.parts.is_gated:
            return _ACTIVATIONS[self.parts.activation](self.ffn_up(normed_BTD))
        if self.parts.fuses_gate_up:
            return _GATED[self.parts.activation](*self.ffn_gate_up(normed_BTD).chunk(2, dim=-1))
        return _GATED[self.parts.activation](self.ffn_gate(normed_BTD), self.ffn_up(normed_BTD))

    def _branch(self, branch_BTD: Tensor) -> Tensor:
        return dropout(branch_BTD, self.dropout, training=self.training)
