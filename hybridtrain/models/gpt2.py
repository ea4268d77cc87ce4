"""GPT-2 (Radford et al., 2019). B batch, T sequence, D width, N heads, H head dim."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridtrain.models.block_model import BlockModel, BlockScope
from hybridtrain.models.layers import ATTENTION, AttentionFunction, Head, LayerNorm, Linear, dropout
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.plan.memory_plan import Attention


class Gpt2Embedding(nn.Module):
    """Token plus learned position embedding."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.token = nn.Parameter(torch.empty(config.vocab_size, config.width, dtype=dtype))
        self.position = nn.Parameter(torch.empty(config.max_seq_len, config.width, dtype=dtype))

    def forward(self, token_ids_BT: Tensor) -> Tensor:
        """Return hidden_BTD."""
        positions_TD = self.position[: token_ids_BT.shape[1]]
        hidden_BTD = functional.embedding(token_ids_BT, self.token) + positions_TD
        return dropout(hidden_BTD, self.dropout, training=self.training)


class Gpt2Block(nn.Module):
    """Pre-norm attention and feed-forward, each on a residual branch."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.attention: AttentionFunction = ATTENTION[Attention.FLASH]
        self.attention_norm = LayerNorm(width, config.norm_eps, dtype)
        self.qkv = Linear(width, 3 * width, bias=True, dtype=dtype)
        self.attention_out = Linear(width, width, bias=True, dtype=dtype)
        self.ffn_norm = LayerNorm(width, config.norm_eps, dtype)
        self.ffn_up = Linear(width, config.ffn_width, bias=True, dtype=dtype)
        self.ffn_out = Linear(config.ffn_width, width, bias=True, dtype=dtype)

    def forward(self, hidden_BTD: Tensor, *, computes_output: bool = True) -> Tensor:
        """Return hidden_BTD; without ``computes_output`` its values are undefined, but it can be differentiated."""
        hidden_BTD = hidden_BTD + self._residual(self._attend(self.attention_norm(hidden_BTD)))
        feed_forward_BTD = self._feed_forward(self.ffn_norm(hidden_BTD), computes_output=computes_output)
        return hidden_BTD + self._residual(feed_forward_BTD)

    def _attend(self, normed_BTD: Tensor) -> Tensor:
        batch, seq_len, width = normed_BTD.shape
        q, k, v = self.qkv(normed_BTD).split(width, dim=-1)
        shape_BTNH = (batch, seq_len, self.num_heads, width // self.num_heads)
        out_BTNH = self.attention(q.view(shape_BTNH), k.view(shape_BTNH), v.view(shape_BTNH))
        return self.attention_out(out_BTNH.flatten(-2))  # type: ignore[no-any-return]

    def _feed_forward(self, normed_BTD: Tensor, *, computes_output: bool) -> Tensor:
        inner_BTF = functional.gelu(self.ffn_up(normed_BTD), approximate="tanh")
        return self.ffn_out(inner_BTF, computes_output=computes_output)  # type: ignore[no-any-return]

    def _residual(self, branch_BTD: Tensor) -> Tensor:
        return dropout(branch_BTD, self.dropout, training=self.training)


def build_gpt2(config: ModelConfig, dtype: torch.dtype, block_scope: BlockScope) -> BlockModel:
    """Return GPT-2 with uninitialised parameters on the current default device; each block is made in its scope."""
    embedding = Gpt2Embedding(config, dtype)
    blocks: list[nn.Module] = []
    for block in range(config.num_blocks):
        with block_scope(block):
            blocks.append(Gpt2Block(config, dtype))
    weight_VD = embedding.token
    if not config.tied:
        weight_VD = nn.Parameter(torch.empty(config.vocab_size, config.width, dtype=dtype))
    return BlockModel(config, embedding, blocks, Head(LayerNorm(config.width, config.norm_eps, dtype), weight_VD))
