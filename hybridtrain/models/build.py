"""Construction of a model of any shape. V vocabulary, D width."""

from contextlib import nullcontext

import torch
from torch import nn

from hybridtrain.models.block_model import BlockModel, BlockScope, ModelPart
from hybridtrain.models.decoder import Block, Embedding, norm_of
from hybridtrain.models.layers import Head, RotaryTable
from hybridtrain.models.model_config import ModelConfig


def build_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device,
    block_scope: BlockScope = lambda _: nullcontext(), part: ModelPart | None = None,
) -> BlockModel:  # fmt: skip
    """Return a model with uninitialised parameters of ``dtype`` on ``device`` (``meta`` allocates nothing).

    Each unit is made within ``block_scope``, which may leave its parameters without memory; ``part`` is this process's
    part. A head without the embedding has its own copy of a tied matrix.
    """
    with torch.device(device):
        with block_scope(-1):
            embedding = Embedding(config, dtype)
        table = local_table = None
        if config.rotary_dim:
            table = RotaryTable(config.max_seq_len, config.rotary_dim, config.rope_theta, config.rope_scaling)
            local_table = table
            if config.rope_local_theta:
                local_table = RotaryTable(config.max_seq_len, config.rotary_dim, config.rope_local_theta)
        blocks: list[nn.Module] = []
        for number in range(config.num_blocks):
            with block_scope(number):
                blocks.append(Block(config, number, local_table if config.window_of(number) else table, dtype))
        with block_scope(config.num_blocks):
            weight_VD = embedding.token
            is_apart = part is not None and part.has_head and not part.has_embedding
            if not config.tied or is_apart:
                weight_VD = nn.Parameter(torch.empty(config.vocab_size, config.width, dtype=dtype))
            if config.tied:
                embedding.token = weight_VD
            head = Head(norm_of(config, config.width, dtype), weight_VD, config.logit_softcap)
        return BlockModel(config, embedding, blocks, head, part)
