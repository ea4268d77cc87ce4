"""Models of a few thousand parameters, and random tokens for them."""

from dataclasses import replace

import numpy as np

from hybridtrain.data.batches import TokenBatch
from hybridtrain.models.model_config import Experts, ModelConfig, RopeScaling

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
_ODD: dict[str, int] = {
    "vocab_size": 101, "max_seq_len": 17, "num_blocks": 3, "width": 36, "num_heads": 3, "num_kv_heads": 1,
    "ffn_width": 50,
}  # fmt: skip
FAMILIES = {
    "llama-stretched": ModelConfig(
        family="llama", **_ODD, rope_scaling=RopeScaling(method="llama3", factor=8.0, original_max_seq_len=8)
    ),
    "mistral": ModelConfig(family="mistral", **_ODD, sliding_window=5, head_size=10),
    "qwen2": ModelConfig(
        family="qwen2", **_ODD, tied=True, sliding_window=6, window_pattern=(False, True, True),
        rope_scaling=RopeScaling(method="yarn", factor=4.0, original_max_seq_len=8),
    ),
    "qwen3": ModelConfig(family="qwen3", **_ODD, head_size=16),
    "gemma2": ModelConfig(
        family="gemma2", **_ODD, tied=True, head_size=8, sliding_window=4, window_pattern=(True, False),
        attention_softcap=3.0, logit_softcap=2.0, query_scale=24**-0.5,
    ),
    "gemma3": ModelConfig(
        family="gemma3", **_ODD, tied=True, head_size=8, sliding_window=4, window_pattern=(True, True, False),
        rope_theta=1e6, rope_local_theta=1e4, rope_scaling=RopeScaling(method="linear", factor=8.0),
    ),
    "phi3": ModelConfig(family="phi3", **_ODD, rotary_fraction=0.5, sliding_window=7),
    "olmo2": ModelConfig(family="olmo2", **_ODD),
    "mixtral": ModelConfig(family="mixtral", **_ODD, experts=Experts(count=5, per_token=2, ffn_width=50)),
    "qwen3-moe": ModelConfig(
        family="qwen3_moe", **_ODD, experts=Experts(count=7, per_token=3, ffn_width=20, normalizes=False)
    ),
}  # fmt: skip
"""Those beside GPT-2 and LLaMA: odd sizes, and every number that a member of the family may have."""


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
