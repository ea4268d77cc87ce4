"""The memory plan: placement and format of each tensor class, and settings of the training step.

A setting is declared once, as a field of ``PhasePlan`` with default, description and range. Claims, checks, records and
help follow from it. Contradictory plans raise an error.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from operator import attrgetter
from typing import Final, TypeVar, cast

from hybridtrain.errors import ConfigError, PlanConflictError
from hybridtrain.phase import Phase
from hybridtrain.plan.placement import Codec, Placement


class Schedule(StrEnum):
    """The order of micro-batches and blocks within one optimizer step."""

    HORIZONTAL = "horizontal"
    VERTICAL = "vertical"


class UpdateDevice(StrEnum):
    """Device of the optimizer's arithmetic."""

    DEVICE = "device"
    HOST = "host"


class Attention(StrEnum):
    """The implementation of attention."""

    FLASH = "flash"
    UNFUSED = "unfused"


class LinearKind(StrEnum):
    """The arithmetic of the blocks' matrices."""

    FULL = "full"
    TERNARY = "ternary"
    """-1, 0 or 1 times their mean magnitude, and activations in 8 bits (2402.17764)."""
    INT8 = "int8"
    """Both factors of each product in 8-bit integers, with a scale for each row."""
    FLOAT8 = "float8"
    """Likewise in 8-bit floats (e4m3)."""


class WidenBy(StrEnum):
    """The unit in which coded weights are dequantized."""

    BLOCK = "block"
    MATRIX = "matrix"


class DynamicRange(StrEnum):
    """The unit that shares one range of 8-bit codes."""

    GROUP = "group"
    """256 elements."""
    ROW = "row"
    """A row of a matrix, as 8-bit products take them."""
    TENSOR = "tensor"
    """A whole matrix."""


class AdapterScaling(StrEnum):
    """The scale of an adapter's output."""

    LORA = "lora"
    """alpha / rank (2106.09685)."""
    RSLORA = "rslora"
    """alpha / sqrt(rank) (2312.03732)."""


PlanValue = int | float | str
"""Enumerations are text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Placement and storage format of one tensor class."""

    placement: Placement = Placement.DEVICE
    codec: Codec = Codec.FLOAT32


T = TypeVar("T")
_FLOATS: Final = (Codec.FLOAT32, Codec.BFLOAT16, Codec.FLOAT16)
_TIERS: Final = (Placement.DEVICE, Placement.HOST, Placement.DISK)
_ON_DEVICE_OR_HOST: Final = (Placement.DEVICE, Placement.HOST, Placement.DROPPED)
CODED: Final = frozenset({Codec.INT8_BLOCKS, Codec.NF4})
"""Codecs that must be dequantized before use."""


def setting(
    default: T, description: str, *, least: int | None = None, most: int = 2**31 - 1, codecs: tuple[Codec, ...] = (),
    placements: tuple[Placement, ...] = (), omit_if_default: bool = False,
) -> T:  # fmt: skip
    """Declare a field of the plan: default (plain training), description and range."""
    names = tuple(map(str, codecs))
    allowed = {"placement": tuple(map(str, placements)), "codec": names, "": names}
    limits = {"least": least, "most": most, "allowed": allowed}
    return field(default=default, metadata={"description": description, **limits, "omit_if_default": omit_if_default})


added = partial(setting, omit_if_default=True)
"""Declare a field that older records lack; it is written only if it differs from the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """The plan of one phase; its defaults are plain fp32 training.

    Codecs of weights, gradients and boundaries are the compute dtype unless claimed.

    Raises:
        PlanConflictError: a value is not allowed, or values contradict each other.
    """

    weight: Cell = setting(Cell(), "Weights.", placements=_TIERS, codecs=(*_FLOATS, Codec.INT8_BLOCKS, Codec.NF4))
    master: Cell = setting(
        Cell(codec=Codec.ABSENT), "Master weights, if stored weights are less exact than float32.",
        placements=_TIERS, codecs=(Codec.FLOAT32, Codec.SPLIT16, Codec.ABSENT),
    )  # fmt: skip
    grad: Cell = setting(Cell(), "Gradients until the update.", placements=_ON_DEVICE_OR_HOST, codecs=_FLOATS)
    optim_state: Cell = setting(
        Cell(), "Moments.", placements=tuple(Placement), codecs=(Codec.FLOAT32, Codec.BFLOAT16, Codec.INT8_BLOCKS)
    )
    boundary: Cell = setting(
        Cell(), "Block inputs kept for the backward pass.", placements=tuple(Placement), codecs=_FLOATS
    )
    compute_dtype: Codec = setting(Codec.FLOAT32, "Compute dtype of forward and backward pass.", codecs=_FLOATS)
    recompute_every: int = setting(0, "Blocks per kept boundary; the rest is recomputed. 0: no recomputation.", least=0)
    kept_blocks: int = setting(0, "Number of last blocks that keep their activations.", least=0)
    grad_accum_steps: int = setting(1, "Micro-batches per optimizer step.", least=1, most=2**16)
    schedule: Schedule = setting(
        Schedule.HORIZONTAL, "horizontal: each micro-batch passes all blocks; vertical: all pass block by block."
    )
    visit_micro_batches: int = setting(0, "Micro-batches per visit of a vertical schedule; 0: all.", least=0)
    normalize_gradients: bool = added(True, "Average gradients over micro-batches; otherwise they are summed.")
    scale_lr: bool = added(False, "Multiply the learning rate by the number of micro-batches (1706.02677).")
    loss_chunk_tokens: int = setting(0, "Tokens per slice of the logits; 0 computes them in one piece.", least=0)
    mlp_tile_tokens: int = added(
        0, "Tokens per slice of a block's feed-forward part; 0 computes them in one piece.", least=0
    )
    keep_attention: bool = added(False, "Recomputed blocks keep attention's output, which is not computed again.")
    max_active_layers: int = setting(
        2, "Streamed blocks on the device at a time, including those in transfer.", least=1
    )
    prefetch_distance: int = setting(1, "Blocks fetched ahead; below max_active_layers.", least=0)
    resident_layers: int = setting(0, "Blocks whose weights stay on the device despite streaming.", least=0)
    widen_by: WidenBy = added(
        WidenBy.BLOCK, "Dequantization of coded weights. block: once per visit; matrix: less memory."
    )
    static_scales: bool = setting(False, "int8 weights keep their initial scales.")
    symmetric: bool = added(True, "Ranges of int8 weights are symmetric about zero; false: with a zero point.")
    dynamic_range: DynamicRange = added(
        DynamicRange.GROUP, "Elements that share an int8 range: group, 256; row, of a matrix; tensor, a matrix."
    )
    update_on: UpdateDevice = setting(UpdateDevice.DEVICE, "Device of the optimizer's arithmetic.")
    attention: Attention = added(Attention.FLASH, "flash: without storing the scores; unfused: separate ops.")
    linear: LinearKind = added(
        LinearKind.FULL,
        "full: matrices as stored; ternary: rounded to three values when used (BitNet); int8, float8: 8-bit products.",
    )
    zero_stage: int = added(
        0, "ZeRO stage. 1: state sharded over ranks; 2: gradients too; 3: weights too; 0: none.", least=0, most=3
    )
    zero_prefetch: int = added(0, "Blocks whose sharded weights are gathered ahead.", least=0)
    pipeline_stages: int = added(1, "Pipeline stages, one rank each; 1: no pipeline.", least=1, most=2**16)
    history_codec: Codec = added(
        Codec.ABSENT, "Storage of a predictor's history, beside the optimizer state.",
        codecs=(Codec.ABSENT, Codec.FLOAT32, Codec.BFLOAT16, Codec.INT8_BLOCKS),
    )  # fmt: skip
    history_tensors: int = added(0, "History tensors per parameter; 0 without a predictor.", least=0, most=16)
    async_restore: bool = added(True, "State offloaded in PREDICT returns in parallel to the next step.")
    restore_lookahead: int = added(0, "Predicted steps before the end of PREDICT at which it returns.", least=0)
    full_ends: int = added(0, "Blocks at either end whose products stay in the compute dtype.", least=0)
    adapter_rank: int = added(
        0, "Rank of adapters beside frozen matrices; 0: all weights are trained.", least=0, most=2**16
    )
    adapter_alpha: float = added(0.0, "Numerator of an adapter's scale.", least=0)
    adapter_scaling: AdapterScaling = added(AdapterScaling.LORA, "lora: alpha / rank; rslora: alpha / sqrt(rank).")
    adapter_dropout: float = added(0.0, "Dropout probability of an adapter's input.", least=0)
    adapter_targets: str = added("", "Matrices with an adapter, by name, separated by commas.")
    adapter_magnitude: bool = added(False, "Adapters also train each row's magnitude (DoRA).")

    @property
    def multiplies_codes(self) -> bool:
        """Whether 8-bit products take stored codes as they are, so that they are not dequantized."""
        is_coded = self.weight.codec is Codec.INT8_BLOCKS and self.dynamic_range is DynamicRange.ROW
        return is_coded and self.linear is LinearKind.INT8

    @property
    def adapter_scale(self) -> float:
        """The scale of an adapter's output."""
        is_lora = self.adapter_scaling is AdapterScaling.LORA
        return self.adapter_alpha / (self.adapter_rank if is_lora else math.sqrt(self.adapter_rank))

    def __post_init__(self) -> None:
        _refuse(
            [
                *_value_faults(self),
                *_contradictions(self),
                *_row_faults(self),
                *_kept_attention_faults(self),
                *_rank_faults(self),
            ]
        )

    def values(self) -> dict[str, PlanValue]:
        """Return all values by path, in the order of declaration."""
        return {path: attrgetter(path)(self) for path in SETTINGS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting of the plan: a path that ``PhasePlan`` declares."""

    path: str
    default: PlanValue
    allowed: tuple[str, ...]
    """Allowed values of an enum; empty for a number."""
    least: int | None
    most: int
    """Range of a number."""
    description: str
    omit_if_default: bool

    def read(self, value: object) -> PlanValue:
        """Return a value as the type of the setting.

        Raises:
            PlanConflictError: wrong type, unknown enum member, or a number that would be rounded.
        """
        kind: Callable[..., PlanValue] = type(self.default)
        try:
            made = kind(value)
        except (TypeError, ValueError):
            made = None
        if made is None or made != value or (isinstance(value, bool) and not isinstance(made, bool)):
            raise PlanConflictError(f"{self.path}: {value!r} is not {self.words}; set one of those.")
        return made

    @property
    def words(self) -> str:
        """Describe the allowed values."""
        if isinstance(self.default, bool):
            return "true or false"
        if type(self.default) is str:
            return "names separated by commas"
        if self.allowed:
            return " | ".join(self.allowed)
        return f"{'a' if isinstance(self.default, float) else 'a whole'} number of at least {self.least}"


def describe_settings() -> Iterator[Setting]:
    """Yield every setting of the plan with default, description and range."""
    for item in fields(PhasePlan):
        default, declared = cast("PlanValue | Cell", item.default), dict(item.metadata)
        allowed = declared.pop("allowed")
        is_cell = isinstance(default, Cell)
        for column in ("placement", "codec") if is_cell else ("",):
            value: PlanValue = getattr(default, column) if column else cast("PlanValue", default)
            members = tuple(map(str, type(value))) if isinstance(value, StrEnum) else ()
            path = f"{item.name}.{column}" if column else item.name
            yield Setting(path=path, default=value, allowed=allowed[column] or members, **declared)


SETTINGS: Final[Mapping[str, Setting]] = {found.path: found for found in describe_settings()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Plans of all phases. Raises: PlanConflictError: phases differ in what cannot change between them."""

    phases: Mapping[Phase, PhasePlan]

    def __post_init__(self) -> None:
        assert set(self.phases) == set(Phase), "a plan without one table per phase"
        full = self.phases[Phase.FULL]
        _refuse(fault for phase in Phase for fault in border_faults(full, self.phases[phase], phase))

    def for_phase(self, phase: Phase) -> PhasePlan:
        """Return the plan of ``phase``."""
        return self.phases[phase]


def resolve(claims: Mapping[str, PlanValue]) -> PhasePlan:
    """Fill unclaimed cells and settings.

    Weights, gradients and boundaries are stored in the compute dtype; a master exists only if stored weights are less
    exact than fp32; all else has its default.

    Raises:
        PlanConflictError: as ``PhasePlan``.
    """
    values = {path: setting.default for path, setting in SETTINGS.items()} | dict(claims)
    for path in ("weight.codec", "grad.codec", "boundary.codec"):
        values[path] = claims.get(path, values["compute_dtype"])
    is_exact = values["compute_dtype" if values["adapter_rank"] else "weight.codec"] == Codec.FLOAT32
    values["master.codec"] = claims.get("master.codec", Codec.ABSENT if is_exact else Codec.FLOAT32)
    arguments: dict[str, object] = {}
    cells: dict[str, dict[str, PlanValue]] = {}
    for path, setting in SETTINGS.items():
        name, _, column = path.partition(".")
        (cells.setdefault(name, {}) if column else arguments)[column or name] = setting.read(values[path])
    make_cell: Callable[..., Cell] = Cell
    make_plan: Callable[..., PhasePlan] = PhasePlan
    return make_plan(**arguments, **{name: make_cell(**cell) for name, cell in cells.items()})


def suited(plan: PhasePlan, num_blocks: int) -> PhasePlan:
    """Return a plan whose numbers of blocks are limited to ``num_blocks``.

    ``hybridtrain.planning.plan_changes`` lists the differences.
    """
    most: dict[str, int] = {}
    if plan.recompute_every:
        most |= {"recompute_every": num_blocks, "kept_blocks": num_blocks}
    if plan.weight.placement is not Placement.DEVICE:
        streamed = max(1, num_blocks - plan.resident_layers)
        most |= {"resident_layers": num_blocks, "max_active_layers": streamed}
        most |= {"prefetch_distance": streamed - 1, "zero_prefetch": streamed - 1}
    if plan.weight.codec in CODED:  # their values take places of resident blocks too
        most |= {"max_active_layers": num_blocks}
        most.setdefault("prefetch_distance", num_blocks - 1)
    changed = {name: count for name, count in most.items() if getattr(plan, name) > count}
    change: Callable[..., PhasePlan] = replace
    return change(plan, **changed) if changed else plan


def check_history(plan: PhasePlan, is_needed: bool, owner: str, *, num_tensors: int = 1) -> None:
    """Raise ``ConfigError`` unless a plan stores the history that ``owner`` needs."""
    if is_needed and plan.history_tensors != num_tensors:
        fault = (
            f"needs {num_tensors} tensor{'s' * (num_tensors > 1)} per parameter for its history, but the stack stores "
            f"{plan.history_tensors}; add an optimization of kind 'predictor_state' for this predictor"
        )
        raise ConfigError(owner, [fault])


def _refuse(faults: Iterable[str]) -> None:
    if lines := list(dict.fromkeys(faults)):
        raise PlanConflictError("\n".join(lines))


def _value_faults(plan: PhasePlan) -> Iterator[str]:
    """Yield a sentence for each value that its declaration does not allow."""
    for path, value in plan.values().items():
        declared = SETTINGS[path]
        if declared.allowed and value not in declared.allowed:
            yield f"{path}: {value} is not one of {', '.join(declared.allowed)}; claim one of these."
        if declared.least is not None and int(value) < declared.least:
            yield f"{path}: {value} must be at least {declared.least}."
        if declared.least is not None and float(value) > declared.most:
            yield f"{path}: {value} must be at most {declared.most}."


def _contradictions(plan: PhasePlan) -> Iterator[str]:
    """Yield a sentence for each combination of values that could not run."""
    if plan.prefetch_distance >= plan.max_active_layers > 0:
        yield (
            f"prefetch_distance: {plan.prefetch_distance} must be below max_active_layers ({plan.max_active_layers}), "
            f"which includes the current block; lower it, or set max_active_layers = {plan.prefetch_distance + 1}."
        )
    if plan.visit_micro_batches > plan.grad_accum_steps:
        yield (
            f"visit_micro_batches: {plan.visit_micro_batches} must be at most grad_accum_steps "
            f"({plan.grad_accum_steps}); lower it, or set 0 for all of a step."
        )
    if plan.boundary.placement in {Placement.HOST, Placement.DISK} and not plan.recompute_every:
        yield (
            "boundary.placement: activation_offload needs gradient_checkpointing in the stack; without it activations "
            "inside the blocks stay on the device."
        )
    in_one_visit = plan.schedule is Schedule.VERTICAL and plan.visit_micro_batches in {0, plan.grad_accum_steps}
    if plan.grad.placement is Placement.DROPPED and plan.grad_accum_steps > 1 and not in_one_visit:
        yield (
            f"grad.placement: fused_update with {plan.grad_accum_steps} micro-batches needs grad_accumulation with "
            f"schedule = 'vertical' and all micro-batches in one visit."
        )
    if plan.update_on is UpdateDevice.HOST and plan.weight.placement is Placement.DISK:
        yield "update_on: updates on the host need weights in host memory; set weight_streaming's tier = 'host'."
    if plan.weight.codec is Codec.INT8_BLOCKS and plan.master.codec is Codec.SPLIT16:
        yield "master.codec: split16 works with bfloat16 weights only; with int8_weights use float32 or absent."
    if plan.mlp_tile_tokens and plan.adapter_dropout:
        yield "mlp_tile_tokens: a tile runs again in backward, where dropout would differ; set lora's dropout = 0."
    if plan.adapter_rank:
        yield from _adapter_faults(plan)
    elif plan.weight.codec is Codec.NF4:
        yield "weight.codec: nf4 weights cannot be trained; add an optimization of kind 'lora', or use int8_weights."


def _row_faults(plan: PhasePlan) -> Iterator[str]:
    """Yield a sentence for each plan value that codes with a range per row do not support."""
    if plan.weight.codec is not Codec.INT8_BLOCKS or plan.dynamic_range is not DynamicRange.ROW:
        return
    if plan.master.codec is Codec.ABSENT and not plan.adapter_rank:
        yield "dynamic_range: codes by row are rounded from a master; set int8_weights' master = 'float32', or 'group'."
    if plan.static_scales or not plan.symmetric:
        yield "dynamic_range: codes by row have new symmetric ranges; drop static_scales and symmetric, or set 'group'."


def _kept_attention_faults(plan: PhasePlan) -> Iterator[str]:
    if plan.keep_attention and plan.recompute_every != 1:
        yield f"keep_attention: needs gradient_checkpointing's recompute_every = 1, not {plan.recompute_every}."
    if plan.keep_attention and plan.attention is Attention.UNFUSED:
        yield "keep_attention: unfused attention leaves nothing to keep; set flash_attention's attention = 'flash'."


def _rank_faults(plan: PhasePlan) -> Iterator[str]:
    """Yield a sentence for each plan value that cannot be sharded or split into stages."""
    if plan.zero_stage and plan.update_on is UpdateDevice.HOST:
        yield "zero_stage: updates on the host need whole parameters; set optimizer_offload's update_on = 'device'."
    if plan.zero_stage and plan.dynamic_range is not DynamicRange.GROUP:
        yield (
            "dynamic_range: ranks update parts of a matrix, which cannot share a range; set "
            "int8_weights' dynamic_range = 'group', or drop zero."
        )
    if plan.zero_stage == 3 and plan.weight.placement is Placement.DEVICE:
        yield (
            "zero_stage: stage 3 gathers blocks into weight_streaming's slots; add weight_streaming, or set stage = 2."
        )
    if plan.zero_prefetch > (plan.prefetch_distance if plan.zero_stage == 3 else 0):
        yield (
            f"zero_prefetch: {plan.zero_prefetch} needs zero's stage = 3, and at most weight_streaming's "
            f"prefetch_distance ({plan.prefetch_distance}); lower zero's prefetch."
        )
    if plan.zero_prefetch and plan.weight.placement is Placement.DISK:
        yield "zero_prefetch: weights on disk cannot be gathered ahead; set weight_streaming's tier = 'host', or 0."
    if plan.zero_stage == 3 and plan.adapter_rank:
        yield "zero_stage: stage 3 shards trained weights, which lora freezes; set stage = 2, or drop zero."
    is_pipeline = plan.pipeline_stages > 1
    if is_pipeline and plan.zero_stage:
        yield "pipeline_stages: stages hold different weights, so zero has nothing to shard; drop zero, or pipeline."
    if is_pipeline and 1 < plan.visit_micro_batches < plan.grad_accum_steps:
        yield (
            f"pipeline_stages: with {plan.visit_micro_batches} micro-batches a visit, stages wait for each other; "
            "set grad_accumulation's visit_micro_batches to 0, or 1."
        )
    if is_pipeline and plan.grad.placement is Placement.DROPPED:
        yield (
            "pipeline_stages: fused_update would change a stage before the others have checked their gradients; drop "
            "fused_update, or pipeline."
        )


def _adapter_faults(plan: PhasePlan) -> Iterator[str]:
    """Yield a sentence for each plan value that adapters do not support."""
    if plan.linear is LinearKind.TERNARY:
        yield "linear: bitnet trains the matrices, which lora freezes; drop one of them."
    if plan.linear is not LinearKind.FULL and plan.adapter_magnitude:
        yield "linear: DoRA measures its matrices in the compute dtype; drop low_bit_matmul, or lora's magnitude."
    if plan.static_scales:
        yield "static_scales: lora freezes the matrices, whose scales never change; remove static_scales."
    if plan.compute_dtype is Codec.FLOAT32 and plan.master.codec is not Codec.ABSENT:
        fault = f"master.codec: {plan.master.codec} is not used, as adapters are float32 themselves"
        yield f"{fault}; remove master, or add mixed_precision."
    if not plan.adapter_targets:
        yield "adapter_targets: adapters need at least one matrix; set lora's targets."


# ---- from one phase to the next: what leaves what FULL trains as it is, to the bit

_SAME_EVERYWHERE = (
    "grad_accum_steps", "update_on", "linear", "full_ends", "zero_stage", "zero_prefetch", "pipeline_stages",
    "history_codec", "history_tensors", *(item.name for item in fields(PhasePlan) if item.name.startswith("adapter_")),
)  # fmt: skip
_SAME_IN_STEPS = ("optim_state", *_SAME_EVERYWHERE)
"""Of phases with true steps; PREDICT puts optimizer state elsewhere."""


def weight_storage(plan: PhasePlan) -> tuple[object, ...]:
    """Return the settings of weight storage; if they differ between phases, weights are converted."""
    is_coded, is_streamed = plan.weight.codec in CODED, plan.weight.placement is not Placement.DEVICE
    return (
        *(plan.weight, plan.master.codec, plan.compute_dtype),
        plan.max_active_layers if is_coded or is_streamed else None,
        (plan.prefetch_distance, plan.resident_layers) if is_streamed else None,
        (plan.static_scales, plan.symmetric, plan.dynamic_range, plan.widen_by) if is_coded else None,
    )


def border_faults(full: PhasePlan, other: PhasePlan, phase: Phase) -> Iterator[str]:
    """Yield a sentence for each value that must not change between FULL and ``phase``."""
    for name in _SAME_EVERYWHERE if phase is Phase.PREDICT else _SAME_IN_STEPS:
        if getattr(other, name) != getattr(full, name):
            yield (
                f"{name}: {_words(getattr(other, name))} in {phase}, {_words(getattr(full, name))} in full; it must "
                f"be equal: let the optimization act in every phase."
            )
    if full.adapter_rank:
        master_stays = phase is Phase.PREDICT or full.master == other.master
        if weight_storage(full) != weight_storage(other) or not master_stays:
            yield (
                f"weight: storage in {phase} differs from full, but frozen weights are not converted: let "
                f"mixed_precision, int8_weights and weight_streaming act in every phase or in none."
            )
        return
    yield from _losses(full, other, phase)


def _losses(full: PhasePlan, other: PhasePlan, phase: Phase) -> Iterator[str]:
    """Yield a sentence where a phase cannot keep all that FULL trains."""
    for what, trained, kept in zip(("matrices", "vectors"), _exactness(full), _exactness(other), strict=True):
        is_wider = kept[0] is Codec.FLOAT32 and trained[0] is not Codec.INT8_BLOCKS
        if kept == trained or is_wider:
            continue
        allowed = f"{trained[0]} values"
        if trained[0] is Codec.INT8_BLOCKS:
            allowed = "int8 codes without a master and with equal scales"
        elif trained[0] is not Codec.FLOAT32:
            allowed += " or wider ones"
        yield (
            f"weight: {what} are trained as {trained[0]} in full, but {phase} would keep {kept[0]}, which is not "
            f"exact; allowed in {phase}: {allowed}. Set master = 'float32' (or 'split16' with bfloat16 "
            f"weights) where only {phase} is meant, or let the optimization act in every phase."
        )
        return


def _exactness(plan: PhasePlan) -> tuple[tuple[Codec, object], tuple[Codec, object]]:
    """Return the codec of exact values of matrices and of vectors, and how ranges are taken."""
    exact: tuple[Codec, object] = (Codec.FLOAT32, None)
    has_master = plan.master.codec is not Codec.ABSENT
    is_int8 = plan.weight.codec is Codec.INT8_BLOCKS
    values = exact if has_master else (plan.compute_dtype if is_int8 else plan.weight.codec, None)
    if not is_int8:
        return values, values
    ranges = (plan.static_scales, plan.symmetric, plan.dynamic_range)
    return (exact if has_master else (Codec.INT8_BLOCKS, ranges)), values


def _words(value: object) -> str:
    placement, codec = getattr(value, "placement", None), getattr(value, "codec", None)
    return str(value) if placement is None else f"{codec} on {placement}"
