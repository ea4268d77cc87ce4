"""The register of training steps that others measured and published: recipes and speeds of recorded_steps.toml.

The head of that file says what each value means. Nothing here plans a step.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hybridtrain.config.decode import decode
from hybridtrain.errors import ConfigError, near_name
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.models.presets import SHAPES
from hybridtrain.virtual_gpu.cards.card import card_catalogue

Kind = Literal[
    "colossalai", "compiled", "cuda", "deepspeed", "diffusion", "eager", "fsdp", "hf-trainer", "lightning",
    "llama-factory", "megatron", "nvidia", "peft", "torchtitan", "torchtune", "unsloth", "vision",
]  # fmt: skip
Role = Literal["fit", "predict", "held"]
Quantity = Literal[
    "tokens_s", "tokens_s_card", "samples_s", "tflops_card", "step_s", "step_ms", "micro_batch_ms", "steps_s",
    "run_s", "run_min",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One published figure and its recipe."""

    kind: Kind
    model: str
    """A preset, a shape or a foreign model of the register."""
    card: str
    cards: int
    sharding: Literal["none", "ddp", "zero1", "zero2", "zero3", "hybrid"]
    micro_batch: int
    """Sequences or pictures of a card; 0: not printed."""
    accumulation: int
    length: int
    """Tokens of a sequence, or edge of a picture in pixels; 0: not printed."""
    checkpointing: Literal["none", "selective", "full", "offload", "unknown"]
    method: Literal["full", "lora", "qlora", "adapter"]
    precision: Literal["fp32", "tf32", "bf16", "bf16-mixed", "fp16-mixed", "fp8", "mxfp8", "int8"]
    engine: Literal["eager", "fused", "compiled", "cuda-graph"]
    attention: Literal["none", "plain", "sdpa", "cudnn", "flash-1", "flash-2", "flash-3", "flash-4", "unknown"]
    quantity: Quantity
    value: float
    """As published."""
    at: str
    """Line of the source's file, or file and line."""
    confidence: Literal["high", "medium", "low"]
    assumed: str = ""
    """What is not printed."""
    recipe: str = ""
    steps: int = 0
    """Steps or micro-batches of a run; 0: the quantity is not a run's."""

    def __post_init__(self) -> None:
        faults = [
            f"{name}: {getattr(self, name)} must be at least {least}"
            for name, least in {"cards": 1, "micro_batch": 0, "accumulation": 1, "length": 0, "steps": 0}.items()
            if getattr(self, name) < least
        ]
        if not self.value > 0:
            faults.append(f"value: {self.value} must be above 0")
        if (self.confidence == "high") == bool(self.assumed):
            faults.append(f"assumed: {self.assumed!r} does not fit {self.confidence}; say what, but of high nothing")
        if self.quantity.startswith("run_") != bool(self.steps):
            faults.append(f"steps: {self.steps} does not fit {self.quantity}; give the steps of a run, else 0")
        if (self.cards == 1) != (self.sharding == "none") and "offload" not in self.recipe:
            faults.append(f"sharding: {self.sharding} does not fit {self.cards} cards; none is for one card")
        if faults:
            raise ValueError("\n".join(faults))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One table at one commit."""

    id: str
    repository: str
    commit: str
    path: str
    date: str
    """Year and month of the figures."""
    role: Role
    software: str
    notes: str
    rows: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """All sources, and the models and cards that the product has not."""

    protocol: Mapping[str, str]
    absent_cards: Mapping[str, str]
    """Cards outside the catalogue, and what they are."""
    foreign: Mapping[str, str]
    """Models that are no decoder of ours, or libraries of them."""
    shapes: Mapping[str, ModelConfig]
    """Decoders without a preset; learned positions are as many as a row's length."""
    source: tuple[Source, ...]

    def __post_init__(self) -> None:
        cards = {*card_catalogue(), *self.absent_cards}
        models = {*SHAPES, *self.shapes, *self.foreign}
        faults = []
        for number, source in enumerate(self.source):
            for place, step in enumerate(source.rows):
                at = f"source[{number}].rows[{place}]"
                if step.card not in cards:
                    near = near_name(step.card, cards)
                    faults.append(f"{at}.card: {step.card!r} is neither in the catalogue nor in absent_cards{near}")
                if step.model not in models and step.model.partition(":")[0] not in self.foreign:
                    near = near_name(step.model, models)
                    faults.append(f"{at}.model: {step.model!r} is no preset, nor in shapes or foreign{near}")
        if faults:
            raise ValueError("\n".join(faults))

    def steps(self, role: Role | None = None) -> Iterator[tuple[Source, Step]]:
        """Return every row with its source; of one role if given."""
        return ((source, step) for source in self.source if role in {None, source.role} for step in source.rows)


def load_register(path: Path) -> Register:
    """Return the register of a TOML file, its rows joined with their columns and with what they share.

    Raises:
        ConfigError: at least one fault; it holds all of them.
        OSError: the file cannot be read.
        tomllib.TOMLDecodeError: the file is not TOML.
    """
    tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    faults = []
    for number, source in enumerate(tables.get("source", [])):
        columns, common = source.pop("columns", []), source.pop("common", {})
        for place, row in enumerate(rows := source.get("rows", [])):
            if len(row) != len(columns):
                place_of = f"$.source[{number}].rows[{place}]"
                faults.append(f"{place_of}: found {len(row)} values; {len(columns)} are required, one a column")
        source["rows"] = [common | dict(zip(columns, row, strict=False)) for row in rows]
    if faults:
        raise ConfigError(str(path), faults)
    return decode(Register, tables, source=str(path))
