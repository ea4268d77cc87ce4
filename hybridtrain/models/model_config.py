"""Model shapes: the presets by name, and any custom one; and the tokens a model is given. No torch."""

from dataclasses import dataclass, replace
from typing import Literal

from hybridtrain.config.rules import below_least
from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer."""

    family: Literal["gpt2", "llama"]
    vocab_size: int
    max_seq_len: int
    num_blocks: int
    width: int
    """Model dimension D."""
    num_heads: int
    num_kv_heads: int
    """Key/value heads K; GPT-2 has K = N."""
    ffn_width: int
    """Feed-forward dimension F."""
    dropout: float = 0.0
    """Probability after the embedding and on each residual branch; GPT-2 only, attention weights are never dropped."""
    tied: bool = False
    """The output projection is the token embedding."""
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    """Base of the rotary angles; LLaMA only."""

    def __post_init__(self) -> None:
        faults = below_least(
            self, ("vocab_size", "max_seq_len", "num_blocks", "width", "num_heads", "num_kv_heads", "ffn_width")
        )
        if not faults:
            faults = self._shape_faults()
        if faults:
            raise ValueError("\n".join(faults))

    def _shape_faults(self) -> list[str]:
        faults = []
        if self.width % self.num_heads:
            faults.append(f"width: {self.width} must be a multiple of num_heads ({self.num_heads})")
        elif self.family == "llama" and self.head_dim % 2:
            faults.append(f"width: head dim {self.head_dim} must be even for rotary positions")
        if self.num_heads % self.num_kv_heads:
            faults.append(f"num_kv_heads: {self.num_kv_heads} must divide num_heads ({self.num_heads})")
        if self.family == "gpt2" and self.num_kv_heads != self.num_heads:
            faults.append(f"num_kv_heads: {self.num_kv_heads} must equal num_heads ({self.num_heads}) in GPT-2")
        if not 0 <= self.dropout < 1:
            faults.append(f"dropout: {self.dropout} must be in [0, 1)")
        if self.family == "llama" and self.dropout:
            faults.append(f"dropout: {self.dropout} must be 0 in LLaMA, which has none")
        return faults

    @property
    def head_dim(self) -> int:
        """H = D / N."""
        return self.width // self.num_heads

    @property
    def num_params(self) -> int:
        """Parameters, a tied weight counted once (arithmetic)."""
        width, ffn = self.width, self.ffn_width
        embedding = self.vocab_size * width
        output = 0 if self.tied else embedding
        if self.family == "gpt2":
            block = 4 * width * width + 2 * width * ffn + 9 * width + ffn
            return embedding + output + self.max_seq_len * width + self.num_blocks * block + 2 * width
        kv_width = self.num_kv_heads * self.head_dim
        block = 2 * width * width + 2 * width * kv_width + 3 * width * ffn + 2 * width
        return embedding + output + self.num_blocks * block + width


def _gpt2(num_blocks: int, width: int, num_heads: int) -> ModelConfig:
    return ModelConfig(
        family="gpt2", vocab_size=50257, max_seq_len=1024, num_blocks=num_blocks, width=width, num_heads=num_heads,
        num_kv_heads=num_heads, ffn_width=4 * width, tied=True,
    )  # fmt: skip


def _llama(num_blocks: int, width: int, num_heads: int, num_kv_heads: int, ffn_width: int) -> ModelConfig:
    return ModelConfig(
        family="llama", vocab_size=32000, max_seq_len=2048, num_blocks=num_blocks, width=width, num_heads=num_heads,
        num_kv_heads=num_kv_heads, ffn_width=ffn_width,
    )  # fmt: skip


PRESETS: dict[str, ModelConfig] = {
    "gpt2-small": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt2-1b": _gpt2(20, 2048, 16),
    "llama-1b": _llama(22, 2048, 32, 4, 5632),  # TinyLlama's shape
    "llama-7b": _llama(32, 4096, 32, 32, 11008),
    "llama-13b-57l": _llama(57, 4096, 32, 32, 12928),
    "llama-50b": _llama(64, 8192, 64, 8, 25344),
}


def model_preset(name: str) -> ModelConfig:
    """Return a preset; raises ``ConfigError`` with the nearest name for an unknown one."""
    if name not in PRESETS:
        raise ConfigError("model", [unknown_name("model", name, PRESETS)])
    return PRESETS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Tokens of one optimizer step: micro-batches of B sequences of T tokens."""

    micro_batch_size: int
    seq_len: int

    def __post_init__(self) -> None:
        faults = below_least(self, ("micro_batch_size", "seq_len"))
        if faults:
            raise ValueError("\n".join(faults))


def check_workload(model: ModelConfig, workload: Workload) -> None:
    """Raise ``ConfigError`` when the model has fewer positions than the workload asks for."""
    if workload.seq_len > model.max_seq_len:
        raise ConfigError(
            "workload",
            [f"seq_len: {workload.seq_len} is above the model's max_seq_len ({model.max_seq_len}); lower it"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A preset by name, or a shape of one's own."""

    preset: str | None = None
    shape: ModelConfig | None = None

    def __post_init__(self) -> None:
        if (self.preset is None) == (self.shape is None):
            raise ValueError('give either preset = "name" or a table [model.shape], not both and not neither')
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"preset: {unknown_name('model', self.preset, PRESETS)}")

    def resolve(self) -> ModelConfig:
        """Return the shape."""
        if self.shape is not None:
            return self.shape
        assert self.preset is not None, "checked at construction"
        return model_preset(self.preset)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWorkload:
    """The batch of one optimizer step, the same for every stack; accumulation splits it into micro-batches."""

    batch_size: int
    """Sequences per optimizer step."""
    seq_len: int

    def __post_init__(self) -> None:
        faults = below_least(self, ("batch_size", "seq_len"))
        if faults:
            raise ValueError("\n".join(faults))

    def micro_batch(self, plan: MemoryPlan) -> Workload:
        """Return what one micro-batch has when the plan splits the batch."""
        return Workload(
            micro_batch_size=self.batch_size // plan.for_phase(Phase.FULL).grad_accum_steps, seq_len=self.seq_len
        )


def block_params(model: ModelConfig) -> int:
    """Return the parameters of one block."""
    return replace(model, num_blocks=model.num_blocks + 1).num_params - model.num_params
