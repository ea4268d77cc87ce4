"""Shapes of published models, and of some of our own, by name: the values of a ``ModelConfig`` each. No torch.

Of published ones these are the values of the ``config.json`` beside their weights. A model with other numbers is one
more row.
"""

from collections.abc import Mapping

Values = dict[str, object]


def _gpt2(num_blocks: int, width: int, num_heads: int) -> Values:
    return {
        "family": "gpt2", "vocab_size": 50257, "max_seq_len": 1024, "num_blocks": num_blocks, "width": width,
        "num_heads": num_heads, "num_kv_heads": num_heads, "ffn_width": 4 * width, "tied": True,
    }  # fmt: skip


def _shape(
    family: str, num_blocks: int, width: int, heads: tuple[int, int], ffn_width: int, vocab_size: int,
    max_seq_len: int, **more: object,
) -> Values:  # fmt: skip
    """``heads``: query heads, key/value heads."""
    return {
        "family": family, "vocab_size": vocab_size, "max_seq_len": max_seq_len, "num_blocks": num_blocks,
        "width": width, "num_heads": heads[0], "num_kv_heads": heads[1], "ffn_width": ffn_width, **more,
    }  # fmt: skip


def _llama(
    num_blocks: int, width: int, heads: tuple[int, int], ffn_width: int, max_seq_len: int = 2048, **more: object
) -> Values:
    return _shape("llama", num_blocks, width, heads, ffn_width, 32000, max_seq_len, **more)


def _llama3(
    num_blocks: int, width: int, heads: tuple[int, int], ffn_width: int, factor: int = 0, **more: object
) -> Values:
    """``factor``: by which 3.1 and later stretch their angles to 131072 positions."""
    stretched = {"method": "llama3", "factor": float(factor), "original_max_seq_len": 8192}
    scaling = {"rope_scaling": stretched} if factor else {}
    length = 131072 if factor else 8192
    return _shape("llama", num_blocks, width, heads, ffn_width, 128256, length, rope_theta=500000.0, **scaling, **more)


def _qwen2(
    num_blocks: int, width: int, heads: tuple[int, int], ffn_width: int, vocab_size: int, max_seq_len: int = 131072,
    *, tied: bool = False, norm_eps: float = 1e-6,
) -> Values:  # fmt: skip
    return _shape(
        "qwen2", num_blocks, width, heads, ffn_width, vocab_size, max_seq_len, tied=tied, norm_eps=norm_eps,
        rope_theta=1e6,
    )  # fmt: skip


def _qwen3(
    num_blocks: int, width: int, heads: tuple[int, int], ffn_width: int, *, tied: bool = False, **more: object
) -> Values:
    head_size = {} if heads[0] * 128 == width else {"head_size": 128}
    values = {"family": "qwen3", "tied": tied, "norm_eps": 1e-6, "rope_theta": 1e6, **head_size, **more}
    return _shape(**{  # type: ignore[arg-type]
        "num_blocks": num_blocks, "width": width, "heads": heads, "ffn_width": ffn_width, "vocab_size": 151936,
        "max_seq_len": 40960, **values,
    })  # fmt: skip


def _gemma2(
    num_blocks: int, width: int, heads: tuple[int, int], ffn_width: int, head_size: int, query_scalar: int = 0
) -> Values:
    query_scale = {"query_scale": query_scalar**-0.5} if query_scalar else {}
    return _shape(
        "gemma2", num_blocks, width, heads, ffn_width, 256000, 8192, tied=True, norm_eps=1e-6, head_size=head_size,
        sliding_window=4096, window_pattern=[True, False], attention_softcap=50.0, logit_softcap=30.0, **query_scale,
    )  # fmt: skip


def _gemma3(
    num_blocks: int, width: int, heads: tuple[int, int], ffn_width: int, head_size: int, *, vocab_size: int = 262208,
    max_seq_len: int = 131072, window: int = 1024, query_scalar: int = 0, is_stretched: bool = True,
) -> Values:  # fmt: skip
    more: Values = {"rope_scaling": {"method": "linear", "factor": 8.0}} if is_stretched else {}
    if query_scalar:
        more["query_scale"] = query_scalar**-0.5
    return _shape(
        "gemma3", num_blocks, width, heads, ffn_width, vocab_size, max_seq_len, tied=True, norm_eps=1e-6,
        head_size=head_size, sliding_window=window, window_pattern=[True] * 5 + [False], rope_theta=1e6,
        rope_local_theta=10000.0, **more,
    )  # fmt: skip


def _olmo2(num_blocks: int, width: int, num_heads: int, ffn_width: int) -> Values:
    heads = (num_heads, num_heads)
    return _shape("olmo2", num_blocks, width, heads, ffn_width, 100352, 4096, norm_eps=1e-6, rope_theta=500000.0)


def _mixtral(
    num_blocks: int, width: int, heads: tuple[int, int], ffn_width: int, vocab_size: int, length: int
) -> Values:
    experts = {"count": 8, "per_token": 2, "ffn_width": ffn_width}
    return _shape("mixtral", num_blocks, width, heads, ffn_width, vocab_size, length, rope_theta=1e6, experts=experts)


SHAPES: Mapping[str, Values] = {
    "gpt2-small": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt2-1b": _gpt2(20, 2048, 16),
    "llama-1b": _llama(22, 2048, (32, 4), 5632),  # TinyLlama's shape
    "llama-7b": _llama(32, 4096, (32, 32), 11008),
    "llama-13b-57l": _llama(57, 4096, (32, 32), 12928),
    "llama-50b": _llama(64, 8192, (64, 8), 25344),
    "llama-2-7b": _llama(32, 4096, (32, 32), 11008, 4096),
    "llama-2-13b": _llama(40, 5120, (40, 40), 13824, 4096),
    "llama-2-70b": _llama(80, 8192, (64, 8), 28672, 4096),
    "llama-3-8b": _llama3(32, 4096, (32, 8), 14336),
    "llama-3-70b": _llama3(80, 8192, (64, 8), 28672),
    "llama-3.1-8b": _llama3(32, 4096, (32, 8), 14336, 8),
    "llama-3.1-70b": _llama3(80, 8192, (64, 8), 28672, 8),
    "llama-3.2-1b": _llama3(16, 2048, (32, 8), 8192, 32, tied=True),
    "llama-3.2-3b": _llama3(28, 3072, (24, 8), 8192, 32, tied=True),
    "mistral-7b-v0.1": _shape("mistral", 32, 4096, (32, 8), 14336, 32000, 32768, sliding_window=4096),
    "mistral-7b-v0.3": _shape("mistral", 32, 4096, (32, 8), 14336, 32768, 32768, rope_theta=1e6),
    "qwen2.5-0.5b": _qwen2(24, 896, (14, 2), 4864, 151936, 32768, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, (12, 2), 8960, 151936, tied=True),
    "qwen2.5-3b": _qwen2(36, 2048, (16, 2), 11008, 151936, 32768, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, (28, 4), 18944, 152064),
    "qwen2.5-14b": _qwen2(48, 5120, (40, 8), 13824, 152064, norm_eps=1e-5),
    "qwen2.5-32b": _qwen2(64, 5120, (40, 8), 27648, 152064, norm_eps=1e-5),
    "qwen2.5-72b": _qwen2(80, 8192, (64, 8), 29568, 152064, norm_eps=1e-5),
    "qwen3-0.6b": _qwen3(28, 1024, (16, 8), 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, (16, 8), 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, (32, 8), 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, (32, 8), 12288),
    "qwen3-14b": _qwen3(40, 5120, (40, 8), 17408),
    "qwen3-32b": _qwen3(64, 5120, (64, 8), 25600),
    "qwen3-30b-a3b": _qwen3(
        48, 2048, (32, 4), 6144, family="qwen3_moe",
        experts={"count": 128, "per_token": 8, "ffn_width": 768},
    ),
    "gemma-2-2b": _gemma2(26, 2304, (8, 4), 9216, 256),
    "gemma-2-9b": _gemma2(42, 3584, (16, 8), 14336, 256),
    "gemma-2-27b": _gemma2(46, 4608, (32, 16), 36864, 128, 144),
    "gemma-3-1b": _gemma3(
        26, 1152, (4, 1), 6912, 256, vocab_size=262144, max_seq_len=32768, window=512, is_stretched=False
    ),
    "gemma-3-4b": _gemma3(34, 2560, (8, 4), 10240, 256),
    "gemma-3-12b": _gemma3(48, 3840, (16, 8), 15360, 256),
    "gemma-3-27b": _gemma3(62, 5376, (32, 16), 21504, 128, query_scalar=168),
    "phi-3-mini-4k": _shape("phi3", 32, 3072, (32, 32), 8192, 32064, 4096, sliding_window=2047),
    "phi-3-medium-4k": _shape("phi3", 40, 5120, (40, 10), 17920, 32064, 4096, sliding_window=2047),
    "phi-4": _shape("phi3", 40, 5120, (40, 10), 17920, 100352, 16384, rope_theta=250000.0),
    "olmo-2-1b": _olmo2(16, 2048, 16, 8192),
    "olmo-2-7b": _olmo2(32, 4096, 32, 11008),
    "olmo-2-13b": _olmo2(40, 5120, 40, 13824),
    "mixtral-8x7b": _mixtral(32, 4096, (32, 8), 14336, 32000, 32768),
    "mixtral-8x22b": _mixtral(56, 6144, (48, 8), 16384, 32768, 65536),
}  # fmt: skip
"""Gemma 3 above 1b is the text part. A window of ``qwen2.5`` is not in use."""
