"""Shapes of published models, and of some of our own, by name: the values of a ``ModelConfig`` each. No torch.

Of published ones these are the values of the ``config.json`` beside their weights.
"""

from collections.abc import Mapping

Values = dict[str, object]

_COMMON: Mapping[str, Values] = {
    "gpt2": {"vocab_size": 50257, "max_seq_len": 1024, "tied": True},
    "llama": {"vocab_size": 32000, "max_seq_len": 2048},
    "mistral": {"max_seq_len": 32768},
    "qwen2": {"vocab_size": 152064, "max_seq_len": 131072, "norm_eps": 1e-6, "rope_theta": 1e6},
    "qwen3": {"vocab_size": 151936, "max_seq_len": 40960, "norm_eps": 1e-6, "rope_theta": 1e6},
    "qwen3_moe": {"vocab_size": 151936, "max_seq_len": 40960, "norm_eps": 1e-6, "rope_theta": 1e6},
    "gemma2": {
        "vocab_size": 256000, "max_seq_len": 8192, "tied": True, "norm_eps": 1e-6, "sliding_window": 4096,
        "window_pattern": [True, False], "attention_softcap": 50.0, "logit_softcap": 30.0,
    },
    "gemma3": {
        "vocab_size": 262208, "max_seq_len": 131072, "tied": True, "norm_eps": 1e-6, "rope_theta": 1e6,
        "rope_local_theta": 10000.0, "sliding_window": 1024, "window_pattern": [True] * 5 + [False],
        "rope_scaling": {"method": "linear", "factor": 8.0},
    },
    "phi3": {"vocab_size": 32064, "max_seq_len": 4096},
    "olmo2": {"vocab_size": 100352, "max_seq_len": 4096, "norm_eps": 1e-6, "rope_theta": 500000.0},
    "mixtral": {"rope_theta": 1e6},
}  # fmt: skip
"""Common values of a family's presets."""


def _shape(
    family: str, num_blocks: int, width: int, heads: tuple[int, int], ffn_width: int, **more: object
) -> Values:  # fmt: skip
    """``heads``: query heads, key/value heads."""
    return {
        "family": family, "num_blocks": num_blocks, "width": width, "num_heads": heads[0], "num_kv_heads": heads[1],
        "ffn_width": ffn_width, **_COMMON[family], **more,
    }  # fmt: skip


def _gpt2(num_blocks: int, width: int, num_heads: int) -> Values:
    return _shape("gpt2", num_blocks, width, (num_heads, num_heads), 4 * width)


def _llama3(
    num_blocks: int, width: int, heads: tuple[int, int], ffn_width: int, factor: int = 0, **more: object
) -> Values:
    """``factor``: by which 3.1 and later stretch their angles to 131072 positions."""
    if factor:
        more["rope_scaling"] = {"method": "llama3", "factor": float(factor), "original_max_seq_len": 8192}
    length = 131072 if factor else 8192
    more |= {"vocab_size": 128256, "max_seq_len": length, "rope_theta": 500000.0}
    return _shape("llama", num_blocks, width, heads, ffn_width, **more)


def _smollm2(num_blocks: int, width: int, heads: tuple[int, int], ffn_width: int, rope_theta: float) -> Values:
    return _shape(
        "llama", num_blocks, width, heads, ffn_width, vocab_size=49152, max_seq_len=8192, tied=True,
        rope_theta=rope_theta,
    )  # fmt: skip


def _falcon3(num_blocks: int) -> Values:
    return _shape(
        "llama", num_blocks, 3072, (12, 4), 23040, vocab_size=131072, max_seq_len=32768, norm_eps=1e-6,
        rope_theta=1000042.0,
    )  # fmt: skip


def _mixtral(num_blocks: int, width: int, num_heads: int, ffn_width: int, vocab_size: int, length: int) -> Values:
    experts = {"count": 8, "per_token": 2, "ffn_width": ffn_width}
    return _shape(
        "mixtral", num_blocks, width, (num_heads, 8), ffn_width, vocab_size=vocab_size, max_seq_len=length,
        experts=experts,
    )  # fmt: skip


SHAPES: Mapping[str, Values] = {
    "gpt2-small": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt2-1b": _gpt2(20, 2048, 16),
    "llama-1b": _shape("llama", 22, 2048, (32, 4), 5632),  # TinyLlama's shape
    "llama-7b": _shape("llama", 32, 4096, (32, 32), 11008),
    "llama-13b-57l": _shape("llama", 57, 4096, (32, 32), 12928),
    "llama-50b": _shape("llama", 64, 8192, (64, 8), 25344),
    "llama-2-7b": _shape("llama", 32, 4096, (32, 32), 11008, max_seq_len=4096),
    "llama-2-13b": _shape("llama", 40, 5120, (40, 40), 13824, max_seq_len=4096),
    "llama-2-70b": _shape("llama", 80, 8192, (64, 8), 28672, max_seq_len=4096),
    "llama-3-8b": _llama3(32, 4096, (32, 8), 14336),
    "llama-3-70b": _llama3(80, 8192, (64, 8), 28672),
    "llama-3.1-8b": _llama3(32, 4096, (32, 8), 14336, 8),
    "llama-3.1-70b": _llama3(80, 8192, (64, 8), 28672, 8),
    "llama-3.2-1b": _llama3(16, 2048, (32, 8), 8192, 32, tied=True),
    "llama-3.2-3b": _llama3(28, 3072, (24, 8), 8192, 32, tied=True),
    "smollm2-135m": _smollm2(30, 576, (9, 3), 1536, 1e5),
    "smollm2-360m": _smollm2(32, 960, (15, 5), 2560, 1e5),
    "smollm2-1.7b": _smollm2(24, 2048, (32, 32), 8192, 1.3e5),
    "falcon3-7b": _falcon3(28),
    "falcon3-10b": _falcon3(40),
    "mistral-7b-v0.1": _shape("mistral", 32, 4096, (32, 8), 14336, vocab_size=32000, sliding_window=4096),
    "mistral-7b-v0.3": _shape("mistral", 32, 4096, (32, 8), 14336, vocab_size=32768, rope_theta=1e6),
    "mistral-nemo-12b": _shape(
        "mistral", 40, 5120, (32, 8), 14336, head_size=128, vocab_size=131072, max_seq_len=128000, rope_theta=1e6
    ),
    "mistral-small-24b": _shape(
        "mistral", 40, 5120, (32, 8), 32768, head_size=128, vocab_size=131072, rope_theta=1e8
    ),
    "qwen2.5-0.5b": _shape("qwen2", 24, 896, (14, 2), 4864, vocab_size=151936, max_seq_len=32768, tied=True),
    "qwen2.5-1.5b": _shape("qwen2", 28, 1536, (12, 2), 8960, vocab_size=151936, tied=True),
    "qwen2.5-3b": _shape("qwen2", 36, 2048, (16, 2), 11008, vocab_size=151936, max_seq_len=32768, tied=True),
    "qwen2.5-7b": _shape("qwen2", 28, 3584, (28, 4), 18944),
    "qwen2.5-14b": _shape("qwen2", 48, 5120, (40, 8), 13824, norm_eps=1e-5),
    "qwen2.5-32b": _shape("qwen2", 64, 5120, (40, 8), 27648, norm_eps=1e-5),
    "qwen2.5-72b": _shape("qwen2", 80, 8192, (64, 8), 29568, norm_eps=1e-5),
    "qwen3-0.6b": _shape("qwen3", 28, 1024, (16, 8), 3072, tied=True, head_size=128),
    "qwen3-1.7b": _shape("qwen3", 28, 2048, (16, 8), 6144, tied=True),
    "qwen3-4b": _shape("qwen3", 36, 2560, (32, 8), 9728, tied=True, head_size=128),
    "qwen3-8b": _shape("qwen3", 36, 4096, (32, 8), 12288),
    "qwen3-14b": _shape("qwen3", 40, 5120, (40, 8), 17408),
    "qwen3-32b": _shape("qwen3", 64, 5120, (64, 8), 25600, head_size=128),
    "qwen3-30b-a3b": _shape(
        "qwen3_moe", 48, 2048, (32, 4), 6144, head_size=128,
        experts={"count": 128, "per_token": 8, "ffn_width": 768},
    ),
    "gemma-2-2b": _shape("gemma2", 26, 2304, (8, 4), 9216, head_size=256),
    "gemma-2-9b": _shape("gemma2", 42, 3584, (16, 8), 14336, head_size=256),
    "gemma-2-27b": _shape("gemma2", 46, 4608, (32, 16), 36864, head_size=128, query_scale=144**-0.5),
    "gemma-3-270m": _shape(
        "gemma3", 18, 640, (4, 1), 2048, head_size=256, vocab_size=262144, max_seq_len=32768, sliding_window=512,
        rope_scaling=None,
    ),
    "gemma-3-1b": _shape(
        "gemma3", 26, 1152, (4, 1), 6912, head_size=256, vocab_size=262144, max_seq_len=32768, sliding_window=512,
        rope_scaling=None,
    ),
    "gemma-3-4b": _shape("gemma3", 34, 2560, (8, 4), 10240, head_size=256),
    "gemma-3-12b": _shape("gemma3", 48, 3840, (16, 8), 15360, head_size=256),
    "gemma-3-27b": _shape("gemma3", 62, 5376, (32, 16), 21504, head_size=128, query_scale=168**-0.5),
    "phi-3-mini-4k": _shape("phi3", 32, 3072, (32, 32), 8192, sliding_window=2047),
    "phi-3-medium-4k": _shape("phi3", 40, 5120, (40, 10), 17920, sliding_window=2047),
    "phi-4": _shape(
        "phi3", 40, 5120, (40, 10), 17920, vocab_size=100352, max_seq_len=16384, rope_theta=250000.0
    ),
    "olmo-2-1b": _shape("olmo2", 16, 2048, (16, 16), 8192),
    "olmo-2-7b": _shape("olmo2", 32, 4096, (32, 32), 11008),
    "olmo-2-13b": _shape("olmo2", 40, 5120, (40, 40), 13824),
    "olmo-2-32b": _shape("olmo2", 64, 5120, (40, 8), 27648),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14336, 32000, 32768),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16384, 32768, 65536),
}  # fmt: skip
"""Gemma 3 above 1b is the text part. The sliding window of ``qwen2.5`` is disabled, as in its config.json."""
