"""Models of a few thousand parameters, and random tokens for them."""

from dataclasses import replace

import numpy as np

from hybridtrain.data.batches import TokenBatch
from hybridtrain.models.model_config import ModelConfig

GPT2_UNTIED = ModelConfig(
    family="gpt2", vocab_size=101, max_seq_len=32, num_blocks=4, width=32, num_heads=4, num_kv_heads=4,
    ffn_width=64,
)  # fmt: skip
GPT2_TIED_DROPOUT = replace(GPT2_UNTIED, tied=True, dropout=0.1)
GPT2_ODD = ModelConfig(
    family="gpt2", vocab_size=101, max_seq_len=17, num_blocks=2, width=36, num_heads=3, num_kv_heads=3,
    ffn_width=50, tied=True,
)  # fmt: skip
"""No power of two but the number of blocks; every position is used."""
LLAMA_GROUPED = ModelConfig(
    family="llama", vocab_size=101, max_seq_len=32, num_blocks=4, width=32, num_heads=4, num_kv_heads=2,
    ffn_width=48,
)  # fmt: skip
LLAMA_ODD = ModelConfig(
    family="llama", vocab_size=101, max_seq_len=17, num_blocks=2, width=36, num_heads=3, num_kv_heads=1,
    ffn_width=50,
)  # fmt: skip


def random_batch(config: ModelConfig, rng: np.random.Generator, batch_size: int = 2, seq_len: int = 17) -> TokenBatch:
    """Return independent random tokens and targets."""
    shape = (batch_size, seq_len)
    return TokenBatch(
        token_ids_BT=rng.integers(0, config.vocab_size, shape),
        target_ids_BT=rng.integers(0, config.vocab_size, shape),
    )


def random_steps(
    config: ModelConfig, num_steps: int, accum_steps: int = 1, batch_size: int = 2, seq_len: int = 17
) -> list[list[TokenBatch]]:
    """Return the micro-batches of each step; the same for every call."""
    rng = np.random.default_rng(0)
    return [[random_batch(config, rng, batch_size, seq_len) for _ in range(accum_steps)] for _ in range(num_steps)]
