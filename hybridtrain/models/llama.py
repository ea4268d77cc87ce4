"""LLaMA (Touvron et al., 2302.13971) with grouped key/value heads.

B batch, T sequence, D width, N query heads, K key/value heads, H head dim, F feed-forward.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridkernels.rotary import rotary
from hybridkernels.swiglu import swiglu
from hybridtrain.models.block_model import BlockModel, BlockScope
from hybridtrain.models.layers import ATTENTION, AttentionFunction, Head, Linear, RmsNorm, RotaryTable, add_linear
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.plan.memory_plan import Attention


class LlamaEmbedding(nn.Module):
    """Token embedding; positions enter in the attention."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(config.vocab_size, config.width, dtype=dtype))

    def forward(self, token_ids_BT: Tensor) -> Tensor:
        """Return hidden_BTD."""
        return functional.embedding(token_ids_BT, self.token)


class LlamaBlock(nn.Module):
    """Pre-norm grouped attention and SwiGLU feed-forward, each on a residual branch."""

    def __init__(self, config: ModelConfig, rotary_table: RotaryTable, dtype: torch.dtype) -> None:
        super().__init__()
        width, kv_width = config.width, config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.rotary_table = rotary_table
        self.attention: AttentionFunction = ATTENTION[Attention.FLASH]
        self.attention_norm = RmsNorm(width, config.norm_eps, dtype)
        self.query = Linear(width, width, bias=False, dtype=dtype)
        self.key = Linear(width, kv_width, bias=False, dtype=dtype)
        self.value = Linear(width, kv_width, bias=False, dtype=dtype)
        self.attention_out = Linear(width, width, bias=False, dtype=dtype)
        self.ffn_norm = RmsNorm(width, config.norm_eps, dtype)
        self.ffn_gate = Linear(width, config.ffn_width, bias=False, dtype=dtype)
        self.ffn_up = Linear(width, config.ffn_width, bias=False, dtype=dtype)
        self.ffn_out = Linear(config.ffn_width, width, bias=False, dtype=dtype)

    def forward(self, hidden_BTD: Tensor, *, computes_output: bool = True) -> Tensor:
        """Return hidden_BTD; without ``computes_output`` its values are undefined, but it can be differentiated."""
        attended_BTD = self._attend(self.attention_norm(hidden_BTD))
        hidden_BTD = add_linear(hidden_BTD, attended_BTD, self.attention_out)
        inner_BTF = self._feed_forward(self.ffn_norm(hidden_BTD))
        if computes_output:
            return add_linear(hidden_BTD, inner_BTF, self.ffn_out)
        return hidden_BTD + self.ffn_out(inner_BTF, computes_output=False)  # type: ignore[no-any-return]

    def _attend(self, normed_BTD: Tensor) -> Tensor:
        batch, seq_len, _ = normed_BTD.shape
        heads = (batch, seq_len, -1, self.head_dim)
        cos_TR, sin_TR = self.rotary_table.cos_TR[:seq_len], self.rotary_table.sin_TR[:seq_len]
        q_BTNH = rotary(self.query(normed_BTD).view(heads), cos_TR, sin_TR)
        k_BTKH = rotary(self.key(normed_BTD).view(heads), cos_TR, sin_TR)
        out_BTNH = self.attention(q_BTNH, k_BTKH, self.value(normed_BTD).view(heads))
        return out_BTNH.flatten(-2)

    def _feed_forward(self, normed_BTD: Tensor) -> Tensor:
        return swiglu(self.ffn_gate(normed_BTD), self.ffn_up(normed_BTD))


def build_llama(config: ModelConfig, dtype: torch.dtype, block_scope: BlockScope) -> BlockModel:
    """Return LLaMA with uninitialised parameters on the current default device; each block is made in its scope."""
    embedding = LlamaEmbedding(config, dtype)
    table = RotaryTable(config.max_seq_len, config.head_dim, config.rope_theta)
    blocks: list[nn.Module] = []
    for block in range(config.num_blocks):
        with block_scope(block):
            blocks.append(LlamaBlock(config, table, dtype))
    weight_VD = embedding.token
    if not config.tied:
        weight_VD = nn.Parameter(torch.empty(config.vocab_size, config.width, dtype=dtype))
    return BlockModel(config, embedding, blocks, Head(RmsNorm(config.width, config.norm_eps, dtype), weight_VD))
