"""Defaults of the source documents beside those of this program: read from its classes, with a reason."""

from collections.abc import Callable
from dataclasses import dataclass, fields

from hybridtrain.config.aliases import KINDS, OPTIONS
from hybridtrain.hybrid.forecast.rssm import NUM_MEMBERS
from hybridtrain.hybrid.forecast.rssm_cell import HIDDEN, NUM_CATEGORICALS, NUM_CLASSES
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations.grad_accumulation import GradAccumulation
from hybridtrain.optimizations.gradient_checkpointing import GradientCheckpointing
from hybridtrain.optimizations.int8_weights import Int8Weights
from hybridtrain.optimizations.mixed_precision import MixedPrecision
from hybridtrain.optimizations.weight_streaming import WeightStreaming
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import compose
from hybridtrain.reports.tables import MARKDOWN, table
from hybridtrain.training_file import TrainFile

_CHECKPOINTED = ("full", "correct")
_STREAMED = ("full",)
_INT8 = ("predict",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """A default that the documents state."""

    option: str
    documented: object
    ours: Callable[[], object]
    """Reads it from the program."""
    reason: str = ""
    """Why it is another; empty: it is the same."""


def _of(cls: type, name: str) -> Callable[[], object]:
    def read() -> object:
        value = next(field.default for field in fields(cls) if field.name == name)
        return tuple(map(str, value)) if isinstance(value, tuple) else value

    return read


DEFAULTS = (
    Default(
        option="optimizations of a run", documented="checkpointing", reason=(
            "Plain training, to the bit, is the baseline of every saving. `hybridtrain fit` names the gentlest "
            "stack that fits."
        ), ours=lambda: _of(TrainFile, "optimizations")() or "none",
    ),
    Default(option="checkpointing: interval", documented=8, ours=_of(GradientCheckpointing, "recompute_every")),
    Default(
        option="checkpointing: phases", documented=_CHECKPOINTED, ours=_of(GradientCheckpointing, "active_phases"),
        reason="WARMUP runs backward passes too: without checkpointing there, it would hold the peak.",
    ),
    Default(option="offloading: max_active_layers", documented=2, ours=_of(WeightStreaming, "max_active_layers")),
    Default(
        option="offloading: prefetch_distance", documented=1,
        ours=lambda: compose([WeightStreaming()]).for_phase(Phase.FULL).prefetch_distance,
    ),
    Default(
        option="offloading: phases", documented=_STREAMED, ours=_of(WeightStreaming, "active_phases"),
        reason="A model that needs streaming in FULL does not fit the card in the other phases either.",
    ),
    Default(option="8-bit weights: symmetric", documented=True, ours=_of(Int8Weights, "symmetric")),
    Default(
        option="8-bit weights: dynamic_range", documented="tensor", ours=_of(Int8Weights, "dynamic_range"),
        reason="One outlier then costs 256 elements their precision, not a matrix; a scale per 256 takes 1.6 %.",
    ),
    Default(
        option="8-bit weights: phases", documented=_INT8, ours=_of(Int8Weights, "active_phases"),
        reason="The peak is in FULL: 8 bits in PREDICT alone do not lower it.",
    ),
    Default(
        option="mixed precision: element type", documented="float16", ours=_of(MixedPrecision, "compute_dtype"),
        reason="bfloat16 takes as many bytes, has the range of float32, and needs no loss scale.",
    ),
    Default(
        option="accumulation, aggressive", documented=4,
        ours=lambda: GradAccumulation.PRESETS["aggressive"]["grad_accum_steps"],
    ),
    Default(option="AdamW: beta1", documented=0.9, ours=_of(AdamWConfig, "beta1")),
    Default(
        option="AdamW: beta2", documented=0.999, ours=_of(AdamWConfig, "beta2"),
        reason="Language models are trained with 0.95 (GPT-3, LLaMA): the second moment follows spikes sooner.",
    ),
    Default(option="AdamW: eps", documented=1e-8, ours=_of(AdamWConfig, "eps")),
    Default(option="RSSM: deterministic state", documented=256, ours=lambda: HIDDEN),
    Default(option="RSSM: stochastic state", documented=(32, 32), ours=lambda: (NUM_CATEGORICALS, NUM_CLASSES)),
    Default(option="RSSM: ensemble", documented=3, ours=lambda: NUM_MEMBERS),
)  # fmt: skip


def defaults_table() -> str:
    """Return every documented default beside ours, as Markdown."""
    rows = [[row.option, _cell(row.documented), _cell(row.ours()), row.reason or "the same"] for row in DEFAULTS]
    headers = ["option", "documents", "hybridtrain", "why"]
    return table(headers, rows, MARKDOWN)


def names_table() -> str:
    """Return the documents' names of options and kinds, and ours, as Markdown; files may use either."""
    rows = [[f"`{alias}`", f"`{name}`"] for names in OPTIONS.values() for alias, name in names.items()]
    rows += [[f'`kind = "{alias}"`', f'`kind = "{name}"`'] for alias, name in KINDS.items()]
    return table(["documents", "hybridtrain"], rows, MARKDOWN)


def _cell(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value}"
