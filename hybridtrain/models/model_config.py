"""Model shapes: the presets by name, and any custom one; and the tokens a model is given. No torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from hybridtrain.config.decode import decode
from hybridtrain.config.rules import AtMost, added_field, below_least, faults_above_most
from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.models.families import FAMILIES, Architecture, Family
from hybridtrain.models.presets import SHAPES
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import MemoryPlan

MOST_TOKENS: Final = 2**26
"""Most tokens of one optimizer step: half a gigabyte of token ids."""
_MOST_PARAMS: Final = 10**14
"""Most parameters: a few times their bytes still fit a 64-bit integer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary angles for longer contexts."""

    method: Literal["linear", "llama3", "yarn"]
    """linear: every frequency / factor (2306.15595). llama3: low frequencies only, blended between two wavelengths
    (Meta, Llama 3.1). yarn: by wavelength, and attention scores by a factor (2309.00071)."""
    factor: float
    """Factor by which contexts are longer."""
    original_max_seq_len: int = 0
    """Original context length; for llama3 and yarn."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original / this are scaled."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original / this are not scaled."""
    beta_fast: float = 32.0
    """yarn: frequencies with more rotations over the original length are not scaled."""
    beta_slow: float = 1.0
    """yarn: frequencies with fewer rotations are scaled."""
    attention_factor: float = 0.0
    """yarn: factor on cosines and sines; 0: 0.1 ln(factor) + 1."""

    def __post_init__(self) -> None:
        faults = []
        if not self.factor >= 1:
            faults.append(f"factor: {self.factor} must be at least 1")
        if self.method != "linear" and self.original_max_seq_len < 1:
            faults.append(f"original_max_seq_len: {self.original_max_seq_len} must be at least 1 for {self.method}")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            faults.append(
                f"low_freq_factor: {self.low_freq_factor} must be above 0 and below high_freq_factor "
                f"({self.high_freq_factor})"
            )
        if not 0 < self.beta_slow < self.beta_fast:
            faults.append(f"beta_slow: {self.beta_slow} must be above 0 and below beta_fast ({self.beta_fast})")
        faults += below_least(self, ("attention_factor",), least=0)
        if faults:
            raise ValueError("\n".join(faults))


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Feed-forward experts that a router chooses from."""

    count: Annotated[int, AtMost(2**16)]
    """E."""
    per_token: int
    """Experts per token."""
    ffn_width: Annotated[int, AtMost(2**22)]
    """F of one expert."""
    shared_ffn_width: int = 0
    """F of a shared expert, used by every token; 0: none."""
    normalizes: bool = True
    """Whether a token's expert weights are normalised to sum to 1."""
    balance_coefficient: float = 0.0
    """Factor of the load-balancing loss (Fedus et al., 2101.03961), pooled over the blocks as in transformers. It adds
    to the gradients, not to the reported loss."""

    def __post_init__(self) -> None:
        faults = below_least(self, ("count", "per_token", "ffn_width")) + faults_above_most(self)
        if self.per_token > self.count:
            faults.append(f"per_token: {self.per_token} must be at most count ({self.count})")
        if self.shared_ffn_width:
            faults.append(f"shared_ffn_width: {self.shared_ffn_width} must be 0; no family here has a shared expert")
        faults += below_least(self, ("balance_coefficient",), least=0)
        if faults:
            raise ValueError("\n".join(faults))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer."""

    family: Family
    """Family of the decoder: an entry of ``families.FAMILIES``."""
    vocab_size: Annotated[int, AtMost(2**24)]
    """Vocabulary size; 256 for bytes."""
    max_seq_len: Annotated[int, AtMost(MOST_TOKENS)]
    """Positions: the longest sequence."""
    num_blocks: Annotated[int, AtMost(2**12)]
    """Decoder blocks."""
    width: Annotated[int, AtMost(2**20)]
    """Model dimension D."""
    num_heads: Annotated[int, AtMost(2**16)]
    """Query heads N."""
    num_kv_heads: int
    """Key/value heads K; GPT-2 has K = N."""
    ffn_width: Annotated[int, AtMost(2**22)]
    """Feed-forward dimension F."""
    dropout: float = 0.0
    """Dropout after the embedding and on each residual branch; GPT-2 only, attention weights have none."""
    tied: bool = False
    """Whether the output projection is the token embedding."""
    norm_eps: float = 1e-5
    """Epsilon added to variances in norms."""
    rope_theta: float = 10000.0
    """Base of the rotary angles, for families with rotary positions."""
    head_size: Annotated[int, AtMost(2**16)] = added_field(0)
    """Head dim H; 0: width / num_heads."""
    rope_scaling: RopeScaling | None = added_field(None)
    """Scaling of rotary angles beyond the original context length."""
    rope_local_theta: float = added_field(0.0)
    """Base of the angles in blocks with a sliding window; 0: rope_theta."""
    rotary_fraction: float = added_field(1.0)
    """Fraction of a head's dimensions with rotary embedding."""
    sliding_window: Annotated[int, AtMost(MOST_TOKENS)] = added_field(0)
    """Tokens that a token attends to, itself included, in blocks with a window; 0: all before it."""
    window_pattern: tuple[bool, ...] = added_field((True,))
    """Which blocks have the window: a pattern repeated over all blocks."""
    attention_softcap: float = added_field(0.0)
    """Soft cap c on scores, c * tanh(score / c); 0: none."""
    logit_softcap: float = added_field(0.0)
    """Soft cap on the logits; 0: none."""
    query_scale: float = added_field(0.0)
    """Factor on attention scores; 0: 1/sqrt(head_dim)."""
    experts: Experts | None = added_field(None)
    """Experts, of which each token uses a few; None: a dense feed-forward."""

    def __post_init__(self) -> None:
        faults = below_least(
            self, ("vocab_size", "max_seq_len", "num_blocks", "width", "num_heads", "num_kv_heads", "ffn_width")
        )
        faults += faults_above_most(self)
        if self.family not in FAMILIES:
            faults.append(f"family: {unknown_name('family', self.family, FAMILIES)}")
        if not faults:
            faults = [*self._head_faults(), *self._position_faults(), *self._number_faults()]
        if not faults and self.num_params > _MOST_PARAMS:
            faults = [f"width: {self.num_params} parameters must be at most {_MOST_PARAMS}; lower it, or num_blocks"]
        if faults:
            raise ValueError("\n".join(faults))

    def _head_faults(self) -> Iterator[str]:
        title = self.architecture.title
        if self.head_size == 0 and self.width % self.num_heads:
            yield f"width: {self.width} must be a multiple of num_heads ({self.num_heads})"
        elif self.rotary_dim % 2:
            name, value = ("width", "head dim ") if self.head_size == 0 else ("head_size", "")
            if self.rotary_fraction != 1:
                name, value = "rotary_fraction", f"{self.rotary_fraction} of head dim {self.head_dim} is "
            yield f"{name}: {value}{self.rotary_dim} must be even for rotary positions"
        if self.num_heads % self.num_kv_heads:
            yield f"num_kv_heads: {self.num_kv_heads} must divide num_heads ({self.num_heads})"
        if not self.architecture.groups_heads and self.num_kv_heads != self.num_heads:
            yield f"num_kv_heads: {self.num_kv_heads} must equal num_heads ({self.num_heads}) in {title}"
        if not 0 <= self.dropout < 1:
            yield f"dropout: {self.dropout} must be in [0, 1)"
        elif self.dropout and not self.architecture.has_dropout:
            yield f"dropout: {self.dropout} must be 0 in {title}, which has none"

    def _position_faults(self) -> Iterator[str]:
        if not 0 < self.rotary_fraction <= 1:
            yield f"rotary_fraction: {self.rotary_fraction} must be above 0 and at most 1"
        if self.architecture.positions == "learned":
            for name, default in {"rope_scaling": None, "rope_local_theta": 0.0, "rotary_fraction": 1.0}.items():
                if getattr(self, name) != default:
                    yield f"{name}: {getattr(self, name)} is not used by {self.architecture.title}; remove it"
        elif self.rope_theta <= 0:
            yield f"rope_theta: {self.rope_theta} must be above 0"
        if not self.window_pattern:
            yield "window_pattern: empty; give at least one true or false"
        if self.sliding_window == 0 and (self.window_pattern != (True,) or self.rope_local_theta):
            yield "sliding_window: 0 disables window_pattern and rope_local_theta; set it, or remove them"

    def _number_faults(self) -> Iterator[str]:
        not_negative = (
            "head_size", "sliding_window", "rope_local_theta", "attention_softcap", "logit_softcap", "query_scale",
        )  # fmt: skip
        yield from below_least(self, not_negative, least=0)
        title, experts = self.architecture.title, self.experts
        if self.architecture.has_experts and experts is None:
            yield f"experts: missing; {title} needs a table with count, per_token and ffn_width"
        if experts is not None and not self.architecture.has_experts:
            yield f"experts: {experts.count} experts are given, but {title} is dense; remove the table"

    @property
    def architecture(self) -> Architecture:
        """The parts of this family."""
        return FAMILIES[self.family]

    @property
    def head_dim(self) -> int:
        """H: D / N unless ``head_size`` is set."""
        return self.head_size or self.width // self.num_heads

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of a head; 0: positions are learned."""
        return 0 if self.architecture.positions == "learned" else int(self.head_dim * self.rotary_fraction)

    def window_of(self, block: int) -> int:
        """Return the attention window of a block in tokens, the token itself included; 0: no limit."""
        return self.sliding_window if self.window_pattern[block % len(self.window_pattern)] else 0

    @property
    def num_params(self) -> int:
        """Number of parameters, a tied weight counted once (arithmetic)."""
        embedding = self.vocab_size * self.width
        positions = self.max_seq_len * self.width if self.architecture.positions == "learned" else 0
        norm = 2 * self.width if self.architecture.norm == "layer" else self.width
        outside = embedding + positions + norm + (0 if self.tied else embedding)
        return outside + self.num_blocks * block_params(self)


def block_params(model: ModelConfig) -> int:
    """Return the parameters of one block."""
    return sum(map(math.prod, block_shapes(model).values()))


def block_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a block, by its name within the block: ``query.weight``."""
    parts, width, ffn = model.architecture, model.width, model.ffn_width
    q_width, kv_width = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    before, after = parts.norm_placement != "post", parts.norm_placement != "pre"
    has_qk_norm, per_head = parts.qk_norm != "none", parts.qk_norm == "head"
    is_layer, is_dense, fuses = parts.norm == "layer", model.experts is None, parts.fuses_gate_up
    count, expert_ffn = (model.experts.count, model.experts.ffn_width) if model.experts else (0, 0)
    rows: list[tuple[bool, str, tuple[int, ...], bool]] = [  # is there, name, shape, has a bias
        (before, "attention_norm", (width,), is_layer),
        (parts.fuses_qkv, "qkv", (q_width + 2 * kv_width, width), parts.qkv_bias),
        (not parts.fuses_qkv, "query", (q_width, width), parts.qkv_bias),
        (not parts.fuses_qkv, "key", (kv_width, width), parts.qkv_bias),
        (not parts.fuses_qkv, "value", (kv_width, width), parts.qkv_bias),
        (has_qk_norm, "query_norm", (model.head_dim if per_head else q_width,), is_layer),
        (has_qk_norm, "key_norm", (model.head_dim if per_head else kv_width,), is_layer),
        (True, "attention_out", (width, q_width), parts.out_bias),
        (after, "attention_out_norm", (width,), is_layer),
        (before, "ffn_norm", (width,), is_layer),
        (not is_dense, "router", (count, width), False),
        (not is_dense, "experts_gate", (count, expert_ffn, width), False),
        (not is_dense, "experts_up", (count, expert_ffn, width), False),
        (not is_dense, "experts_out", (count, width, expert_ffn), False),
        (is_dense and fuses, "ffn_gate_up", (2 * ffn, width), parts.out_bias),
        (is_dense and parts.is_gated and not fuses, "ffn_gate", (ffn, width), parts.out_bias),
        (is_dense and not fuses, "ffn_up", (ffn, width), parts.out_bias),
        (is_dense, "ffn_out", (width, ffn), parts.out_bias),
        (after, "ffn_out_norm", (width,), is_layer),
    ]
    shapes: dict[str, tuple[int, ...]] = {}
    for is_there, name, shape, has_bias in rows:
        if is_there:
            shapes[name if name.startswith(("router", "experts")) else f"{name}.weight"] = shape
        if is_there and has_bias:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


PRESETS: dict[str, ModelConfig] = {
    name: decode(ModelConfig, values, source=f"preset {name}") for name, values in SHAPES.items()
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
        _check_tokens(self, "micro_batch_size", self.micro_batch_size * self.seq_len)


def asked_workload(micro_batch_size: int, seq_len: int) -> Workload:
    """Return the workload of a command's options; raises ``ConfigError`` for values that are not allowed."""
    return decode(Workload, {"micro_batch_size": micro_batch_size, "seq_len": seq_len}, source="workload")


def _check_tokens(workload: object, sequences: str, num_tokens: int) -> None:
    faults = below_least(workload, (sequences, "seq_len"))
    if num_tokens > MOST_TOKENS:
        faults.append(
            f"seq_len times {sequences} is {num_tokens} tokens; allowed are at most {MOST_TOKENS}; lower one of them"
        )
    if faults:
        raise ValueError("\n".join(faults))


def check_workload(model: ModelConfig, workload: Workload) -> None:
    """Raise ``ConfigError`` if the workload's sequences exceed the model's positions."""
    if workload.seq_len > model.max_seq_len:
        fault = f"seq_len: {workload.seq_len} is above the model's max_seq_len ({model.max_seq_len}); lower it"
        raise ConfigError("workload", [fault])


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWorkload:
    """The batch of one optimizer step, equal for all stacks; accumulation splits it into micro-batches."""

    batch_size: int
    """Sequences per optimizer step."""
    seq_len: int
    """Tokens per sequence."""

    def __post_init__(self) -> None:
        _check_tokens(self, "batch_size", self.batch_size * self.seq_len)

    def micro_batch(self, plan: MemoryPlan) -> Workload:
        """Return a micro-batch's workload under a plan; raises ``ConfigError`` if the batch is not divisible."""
        steps = plan.for_phase(Phase.FULL).grad_accum_steps
        if self.batch_size % steps:
            fault = f"batch_size: {self.batch_size} must be a multiple of grad_accum_steps ({steps})"
            raise ConfigError("workload", [f"{fault}; change batch_size, or grad_accumulation's grad_accum_steps"])
        return Workload(micro_batch_size=self.batch_size // steps, seq_len=self.seq_len)
