"""The memory plan: where each tensor class lives, how it is stored, and the few settings of the step loop.

A setting is declared once, as a field of ``PhasePlan`` with its default, its meaning and what is allowed. The paths
that optimizations claim, the checks, what records keep and the help follow from there. A plan that contradicts itself
cannot be made.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from operator import attrgetter
from typing import Final, TypeVar, cast

from hybridtrain.errors import ConfigError, PlanConflictError
from hybridtrain.phase import Phase
from hybridtrain.plan.placement import Codec, Placement


class Schedule(StrEnum):
    """In which order micro-batches and blocks are visited within one optimizer step."""

    HORIZONTAL = "horizontal"
    """Each micro-batch passes all blocks before the next one starts."""
    VERTICAL = "vertical"
    """All micro-batches pass a block before the next block is touched."""


class UpdateDevice(StrEnum):
    """Where the optimizer's arithmetic runs."""

    DEVICE = "device"
    HOST = "host"


class Attention(StrEnum):
    """How attention is computed."""

    FLASH = "flash"
    """By a kernel that never holds the scores of all pairs of tokens."""
    UNFUSED = "unfused"
    """By plain ops, one of which makes them."""


class LinearKind(StrEnum):
    """What the blocks' matrices multiply with."""

    FULL = "full"
    """What they are."""
    TERNARY = "ternary"
    """-1, 0 or 1 times their mean magnitude, and activations in 8 bits (2402.17764)."""


class WidenBy(StrEnum):
    """How much of what is stored as codes has its values at a time."""

    BLOCK = "block"
    """All of a block, once a visit."""
    MATRIX = "matrix"
    """One matrix, wherever it is used, in the backward pass again."""


class DynamicRange(StrEnum):
    """What shares one range of 8-bit codes, taken from its values."""

    GROUP = "group"
    """256 elements."""
    TENSOR = "tensor"
    """A whole matrix."""


class AdapterScaling(StrEnum):
    """What the output of an adapter is multiplied with."""

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
CODED: Final = frozenset({Codec.INT8_BLOCKS, Codec.NF4})
"""Storage that has to be widened before it is computed with."""


def setting(
    default: T, says: str, *, least: int | None = None, most: int = 2**31 - 1, codecs: tuple[Codec, ...] = (),
    placements: tuple[Placement, ...] = (), is_young: bool = False,
) -> T:  # fmt: skip
    """Declare one field of the plan: its value in plain training, what it means, and what is allowed.

    A young one was not known to the first records, which therefore keep it only where it is not the default.
    """
    names = tuple(map(str, codecs))
    allowed = {"placement": tuple(map(str, placements)), "codec": names, "": names}
    return field(
        default=default, metadata={"says": says, "least": least, "most": most, "allowed": allowed, "is_young": is_young}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """The whole table for one phase; its defaults are plain fp32 training.

    Raises:
        PlanConflictError: a value is not allowed, or the values together describe nothing that could run.
    """

    weight: Cell = setting(
        Cell(), "Weights; their codec is the compute dtype unless claimed.",
        placements=_TIERS, codecs=(*_FLOATS, Codec.INT8_BLOCKS, Codec.NF4),
    )  # fmt: skip
    master: Cell = setting(
        Cell(codec=Codec.ABSENT), "What the update works on where stored weights are less exact than float32.",
        placements=_TIERS, codecs=(Codec.FLOAT32, Codec.SPLIT16, Codec.ABSENT),
    )  # fmt: skip
    grad: Cell = setting(
        Cell(), "Gradients that wait for the update; their codec is the compute dtype unless claimed.",
        placements=(Placement.DEVICE, Placement.HOST, Placement.DROPPED), codecs=_FLOATS,
    )  # fmt: skip
    optim_state: Cell = setting(
        Cell(), "Moments of the optimizer.",
        placements=tuple(Placement), codecs=(Codec.FLOAT32, Codec.BFLOAT16, Codec.INT8_BLOCKS),
    )  # fmt: skip
    boundary: Cell = setting(
        Cell(), "Block inputs kept for the backward pass; their codec is the compute dtype unless claimed.",
        placements=tuple(Placement), codecs=_FLOATS,
    )  # fmt: skip
    compute_dtype: Codec = setting(
        Codec.FLOAT32, "Element type of the forward and backward arithmetic.", codecs=_FLOATS
    )
    recompute_every: int = setting(
        0, "Keep one boundary per this many blocks and recompute the rest in the backward pass; 0 keeps everything.",
        least=0,
    )  # fmt: skip
    kept_blocks: int = setting(
        0, "Last blocks whose activations are kept all the same, where the others' are recomputed.", least=0
    )
    grad_accum_steps: int = setting(1, "Micro-batches per optimizer step.", least=1, most=2**16)
    schedule: Schedule = setting(
        Schedule.HORIZONTAL,
        "horizontal: each micro-batch passes all blocks; vertical: all pass block by block.",
    )
    visit_micro_batches: int = setting(
        0, "Micro-batches that a vertical schedule takes through a block per visit; 0: all of the step.", least=0
    )
    normalize_gradients: bool = setting(
        default=True, says="Gradients are the mean over a step's tokens; without, the sum of micro-batches' means.",
        is_young=True,
    )  # fmt: skip
    scale_lr: bool = setting(
        default=False,
        says="The learning rate is multiplied with the number of micro-batches (1706.02677).",
        is_young=True,
    )
    loss_chunk_tokens: int = setting(0, "Tokens per slice of the logits; 0 computes them in one piece.", least=0)
    max_active_layers: int = setting(
        2, "Blocks whose weights are on the device at a time, where weights live elsewhere; those on the way included.",
        least=1,
    )  # fmt: skip
    prefetch_distance: int = setting(1, "Blocks fetched ahead of the one at work; below max_active_layers.", least=0)
    resident_layers: int = setting(
        0, "Blocks whose weights stay on the device, where the others' live elsewhere.", least=0
    )
    widen_by: WidenBy = setting(
        WidenBy.BLOCK,
        "How much of coded weights has its values at a time: block, once a visit; matrix: less memory, widened anew "
        "in the backward pass.",
        is_young=True,
    )
    static_scales: bool = setting(default=False, says="int8 weights keep the scales of their first values.")
    symmetric: bool = setting(
        default=True, says="Ranges of int8 weights are about zero; false: about the middle of their values.",
        is_young=True,
    )  # fmt: skip
    dynamic_range: DynamicRange = setting(
        DynamicRange.GROUP, "What of int8 weights shares a range: group, 256 elements; tensor, a whole matrix.",
        is_young=True,
    )  # fmt: skip
    update_on: UpdateDevice = setting(UpdateDevice.DEVICE, "Where the optimizer's arithmetic runs.")
    attention: Attention = setting(
        Attention.FLASH, "flash: a kernel that never holds the scores of all pairs; unfused: plain ops.", is_young=True
    )
    linear: LinearKind = setting(
        LinearKind.FULL, "full: matrices as they are; ternary: rounded to three values where they are used (BitNet).",
        is_young=True,
    )  # fmt: skip
    zero_stage: int = setting(
        0,
        "What is cut among ranks: 1 optimizer state and master, 2 gradients too, 3 streamed weights too; 0: nothing.",
        least=0, most=3, is_young=True,
    )  # fmt: skip
    zero_prefetch: int = setting(
        0, "Blocks whose cut weights are gathered from the ranks ahead of the one at work, each beside its place.",
        least=0, is_young=True,
    )  # fmt: skip
    pipeline_stages: int = setting(
        1, "Stages that the ranks are, each with its blocks of the model; 1: every rank has the whole model.",
        least=1, most=2**16, is_young=True,
    )  # fmt: skip
    history_codec: Codec = setting(
        Codec.ABSENT, "How tensors that remember a weight's trajectory are stored; they live with the optimizer state.",
        codecs=(Codec.ABSENT, Codec.FLOAT32, Codec.BFLOAT16, Codec.INT8_BLOCKS), is_young=True,
    )  # fmt: skip
    history_tensors: int = setting(
        0, "How many of them a parameter has: 0 without a predictor that needs them.", least=0, most=16, is_young=True
    )
    async_restore: bool = setting(
        default=True, says="State that waited elsewhere in PREDICT comes back beside the next step's passes.",
        is_young=True,
    )  # fmt: skip
    restore_lookahead: int = setting(
        0, "Predicted steps before the end of PREDICT after which it begins to come back; 0: at the end.",
        least=0, is_young=True,
    )  # fmt: skip
    adapter_rank: int = setting(
        0, "Rank of what is trained beside frozen matrices of the blocks; 0: all weights are trained.",
        least=0, most=2**16, is_young=True,
    )  # fmt: skip
    adapter_alpha: float = setting(0.0, "Numerator of an adapter's scale.", least=0, is_young=True)
    adapter_scaling: AdapterScaling = setting(
        AdapterScaling.LORA, "lora: alpha / rank; rslora: alpha / sqrt(rank).", is_young=True
    )
    adapter_dropout: float = setting(0.0, "Odds of an adapter's input to be dropped.", least=0, is_young=True)
    adapter_targets: str = setting("", "Matrices that have an adapter, by name, separated by commas.", is_young=True)
    adapter_magnitude: bool = setting(
        default=False, says="Adapters learn the length of each row of a matrix by itself (DoRA).", is_young=True
    )

    @property
    def adapter_scale(self) -> float:
        """What the output of an adapter is multiplied with."""
        return self.adapter_alpha / (
            self.adapter_rank if self.adapter_scaling is AdapterScaling.LORA else math.sqrt(self.adapter_rank)
        )

    def __post_init__(self) -> None:
        faults = [*_value_faults(self), *_contradictions(self), *_adapter_faults(self), *_uncut(self)]
        if faults:
            raise PlanConflictError("\n".join(faults))

    def values(self) -> dict[str, PlanValue]:
        """Return every value by its path, in the order of declaration."""
        return {path: attrgetter(path)(self) for path in SETTINGS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One path of the plan, as ``PhasePlan`` declares it."""

    path: str
    default: PlanValue
    allowed: tuple[str, ...]
    """Values of an enum; empty for a number."""
    least: int | None
    most: int
    """Of a number."""
    says: str
    is_young: bool

    def read(self, value: object) -> PlanValue:
        """Return a value as the type of the setting.

        Raises:
            PlanConflictError: it is of another type, the name of no member of an enum, or would be rounded.
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
        """Return what is allowed, in words."""
        if isinstance(self.default, bool):
            return "true or false"
        if type(self.default) is str:
            return "names separated by commas"
        if self.allowed:
            return " | ".join(self.allowed)
        return f"{'a' if isinstance(self.default, float) else 'a whole'} number of at least {self.least}"


def describe_settings() -> Iterator[Setting]:
    """Yield every path of the plan with its default, its meaning and what is allowed."""
    for item in fields(PhasePlan):
        default = cast("PlanValue | Cell", item.default)
        columns: dict[str, PlanValue] = {}
        if isinstance(default, Cell):
            columns = {"placement": default.placement, "codec": default.codec}
        else:
            columns[""] = default
        for column, value in columns.items():
            members = type(value) if isinstance(value, StrEnum) else ()
            yield Setting(
                path=f"{item.name}.{column}" if column else item.name,
                default=value,
                allowed=item.metadata["allowed"][column] or tuple(map(str, members)),
                least=item.metadata["least"],
                most=item.metadata["most"],
                says=item.metadata["says"],
                is_young=item.metadata["is_young"],
            )


SETTINGS: Final[Mapping[str, Setting]] = {found.path: found for found in describe_settings()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """One table per phase.

    Raises:
        PlanConflictError: tables differ in what cannot change between phases.
    """

    phases: Mapping[Phase, PhasePlan]

    def __post_init__(self) -> None:
        assert set(self.phases) == set(Phase), "a plan has one table for every phase"
        faults = [
            fault for phase in Phase for fault in border_faults(self.phases[Phase.FULL], self.phases[phase], phase)
        ]
        if faults:
            raise PlanConflictError("\n".join(dict.fromkeys(faults)))

    def for_phase(self, phase: Phase) -> PhasePlan:
        """Return the table that is in force during ``phase``."""
        return self.phases[phase]


def resolve(claims: Mapping[str, PlanValue]) -> PhasePlan:
    """Fill every cell and setting that nobody claimed.

    Weights are stored in the compute dtype, gradients and boundaries too; a master copy exists only where the
    stored weights are less exact than fp32; all else has the default of its declaration.

    Raises:
        PlanConflictError: as ``PhasePlan``.
    """
    values = {path: setting.default for path, setting in SETTINGS.items()} | dict(claims)
    values["weight.codec"] = claims.get("weight.codec", values["compute_dtype"])
    is_exact = values["compute_dtype" if values["adapter_rank"] else "weight.codec"] == Codec.FLOAT32
    values["master.codec"] = claims.get("master.codec", Codec.ABSENT if is_exact else Codec.FLOAT32)
    for path in ("grad.codec", "boundary.codec"):
        values[path] = claims.get(path, values["compute_dtype"])
    arguments: dict[str, object] = {}
    cells: dict[str, dict[str, PlanValue]] = {}
    for path, setting in SETTINGS.items():
        name, _, column = path.partition(".")
        (cells.setdefault(name, {}) if column else arguments)[column or name] = setting.read(values[path])
    make_cell: Callable[..., Cell] = Cell
    make_plan: Callable[..., PhasePlan] = PhasePlan
    return make_plan(**arguments, **{name: make_cell(**cell) for name, cell in cells.items()})


def suited(plan: PhasePlan, num_blocks: int) -> PhasePlan:
    """Return a plan whose counts of blocks a model of ``num_blocks`` can fill: the one place where they are lowered.

    ``hybridtrain.planning.plan_changes`` tells each difference.
    """
    most: dict[str, int] = {}
    if plan.recompute_every:
        most |= {"recompute_every": num_blocks, "kept_blocks": num_blocks}
    is_coded, is_streamed = plan.weight.codec in CODED, plan.weight.placement is not Placement.DEVICE
    if is_streamed:
        streamed = max(1, num_blocks - plan.resident_layers)
        most |= {"resident_layers": num_blocks, "max_active_layers": streamed}
        most |= {"prefetch_distance": streamed - 1, "zero_prefetch": streamed - 1}
    if is_coded:  # their values take places of resident blocks too
        most |= {"max_active_layers": num_blocks}
        most.setdefault("prefetch_distance", num_blocks - 1)
    changed = {name: count for name, count in most.items() if getattr(plan, name) > count}
    change: Callable[..., PhasePlan] = replace
    return change(plan, **changed) if changed else plan


def check_history(plan: PhasePlan, is_needed: bool, owner: str, *, num_tensors: int = 1) -> None:
    """Raise ``ConfigError`` unless a plan keeps the history that ``owner`` needs."""
    if is_needed and plan.history_tensors != num_tensors:
        fault = (
            f"needs {num_tensors} tensor{'s' * (num_tensors > 1)} per parameter to remember the trajectory, the stack "
            f"keeps {plan.history_tensors}; add an optimization of kind 'predictor_state' for this predictor"
        )
        raise ConfigError(owner, [fault])


def _value_faults(plan: PhasePlan) -> Iterator[str]:
    """Yield a sentence for each value that its declaration does not allow."""
    for path, value in plan.values().items():
        declared = SETTINGS[path]
        if declared.allowed and value not in declared.allowed:
            yield f"{path}: {value} is not one of {', '.join(declared.allowed)}; claim one of those."
        if declared.least is not None and int(value) < declared.least:
            yield f"{path}: {value} must be at least {declared.least}."
        if declared.least is not None and float(value) > declared.most:
            yield f"{path}: {value} must be at most {declared.most}."
    if plan.prefetch_distance >= plan.max_active_layers > 0:
        yield (
            f"prefetch_distance: {plan.prefetch_distance} must be below max_active_layers ({plan.max_active_layers}), "
            f"which counts the block at work too; lower it, or set max_active_layers = {plan.prefetch_distance + 1}."
        )
    if plan.visit_micro_batches > plan.grad_accum_steps:
        yield (
            f"visit_micro_batches: {plan.visit_micro_batches} must be at most grad_accum_steps "
            f"({plan.grad_accum_steps}); lower it, or set 0 for all of a step."
        )


def _uncut(plan: PhasePlan) -> Iterator[str]:
    """Yield a sentence for each setting beside which nothing can be cut among ranks."""
    if plan.zero_stage and plan.update_on is UpdateDevice.HOST:
        yield "zero_stage: the processor updates whole parameters; set optimizer_offload's update_on = 'device'."
    if plan.zero_stage and plan.dynamic_range is DynamicRange.TENSOR:
        yield (
            "dynamic_range: a rank updates a part of a matrix, which shares no range with the others; set "
            "int8_weights' dynamic_range = 'group', or drop zero."
        )
    if plan.zero_stage == 3 and plan.weight.placement is Placement.DEVICE:
        yield (
            "zero_stage: 3 gathers a block into a slot where it is used; add weight_streaming, whose slots they are, "
            "or set stage = 2."
        )
    if plan.zero_prefetch > (plan.prefetch_distance if plan.zero_stage == 3 else 0):
        yield (
            f"zero_prefetch: {plan.zero_prefetch} blocks are gathered ahead, which must be cut (zero's stage = 3) and "
            f"fetched ahead (weight_streaming's prefetch_distance, {plan.prefetch_distance}); lower zero's prefetch."
        )
    if plan.zero_prefetch and plan.weight.placement is Placement.DISK:
        yield "zero_prefetch: a file is awaited before it is gathered; set weight_streaming's tier = 'host', or 0."
    if plan.zero_stage == 3 and plan.adapter_rank:
        yield "zero_stage: 3 cuts weights that are trained, and lora freezes them; set stage = 2, or drop zero."
    if plan.pipeline_stages > 1 and plan.zero_stage:
        yield (
            "pipeline_stages: no two stages hold the same, so that zero has nothing to cut; every rank is a stage. "
            "Drop zero, or pipeline."
        )
    if plan.pipeline_stages > 1 and 1 < plan.visit_micro_batches < plan.grad_accum_steps:
        yield (
            f"pipeline_stages: with {plan.visit_micro_batches} micro-batches a visit, stages wait for each other; "
            "set grad_accumulation's visit_micro_batches to 0, or 1."
        )
    if plan.pipeline_stages > 1 and plan.grad.placement is Placement.DROPPED:
        yield (
            "pipeline_stages: fused_update changes blocks of one stage before another stage has said whether its "
            "gradients are numbers; drop fused_update, or pipeline."
        )


def _contradictions(plan: PhasePlan) -> Iterator[str]:
    """Yield a sentence for each combination of values that could not run."""
    if plan.boundary.placement in {Placement.HOST, Placement.DISK} and not plan.recompute_every:
        yield (
            "boundary.placement: activation_offload needs gradient_checkpointing in the stack; without it the "
            "activations inside the blocks stay on the device and nothing would be saved."
        )
    if plan.grad.placement is Placement.DROPPED and plan.grad_accum_steps > 1:
        in_one_visit = plan.visit_micro_batches in {0, plan.grad_accum_steps}
        if plan.schedule is Schedule.HORIZONTAL or not in_one_visit:
            yield (
                f"grad.placement: fused_update with {plan.grad_accum_steps} accumulated micro-batches needs "
                "grad_accumulation with schedule = 'vertical' and all micro-batches in one visit."
            )
    if plan.update_on is UpdateDevice.HOST and plan.weight.placement is Placement.DISK:
        yield "update_on: an update on the host works in host memory; stream weights with tier = 'host', not 'disk'."
    if plan.weight.codec is Codec.INT8_BLOCKS and plan.master.codec is Codec.SPLIT16:
        yield "master.codec: split16 completes bfloat16 weights only; with int8_weights use float32 or absent."


def _adapter_faults(plan: PhasePlan) -> Iterator[str]:
    """Yield a sentence for what frozen weights and adapters cannot do."""
    if plan.weight.codec is Codec.NF4 and not plan.adapter_rank:
        yield "weight.codec: nf4 weights cannot be trained; add an optimization of kind 'lora', or use int8_weights."
    if plan.adapter_rank and plan.linear is LinearKind.TERNARY:
        yield "linear: bitnet trains the matrices themselves, lora freezes them; drop one of them."
    if plan.adapter_rank and plan.static_scales:
        yield "static_scales: lora freezes the matrices, so that their scales never change; leave static_scales out."
    if plan.adapter_rank and plan.compute_dtype is Codec.FLOAT32 and plan.master.codec is not Codec.ABSENT:
        yield (
            f"master.codec: {plan.master.codec} beside adapters that are float32 themselves; leave master out, or add "
            "mixed_precision."
        )
    if plan.adapter_rank and not plan.adapter_targets:
        yield "adapter_targets: adapters need at least one matrix; name them in lora's targets."


# ---- from one phase to the next: what leaves what FULL trains as it is, to the bit

_ADAPTER = tuple(item.name for item in fields(PhasePlan) if item.name.startswith("adapter_"))
_SAME_EVERYWHERE = (
    "grad_accum_steps",
    "update_on",
    "linear",
    "zero_stage",
    "zero_prefetch",
    "pipeline_stages",
    "history_codec",
    "history_tensors",
    *_ADAPTER,
)
_SAME_IN_STEPS = ("optim_state", *_SAME_EVERYWHERE)
"""Of phases with true steps; PREDICT puts optimizer state elsewhere."""


def weight_storage(plan: PhasePlan) -> tuple[object, ...]:
    """Return what decides how weights are stored; at a border where it changes they are stored anew."""
    is_int8 = plan.weight.codec in CODED
    is_streamed = plan.weight.placement is not Placement.DEVICE
    return (
        plan.weight,
        plan.master.codec,
        plan.compute_dtype,
        plan.max_active_layers if is_int8 or is_streamed else None,
        (plan.prefetch_distance, plan.resident_layers) if is_streamed else None,
        (plan.static_scales, plan.symmetric, plan.dynamic_range, plan.widen_by) if is_int8 else None,
    )


def border_faults(full: PhasePlan, other: PhasePlan, phase: Phase) -> Iterator[str]:
    """Yield what cannot change between FULL and ``phase``, one sentence each."""
    for name in _SAME_EVERYWHERE if phase is Phase.PREDICT else _SAME_IN_STEPS:
        if getattr(other, name) != getattr(full, name):
            yield (
                f"{name}: {_words(getattr(other, name))} in {phase}, {_words(getattr(full, name))} in full; it must be "
                "the same there: let the optimization act in every phase."
            )
    if full.adapter_rank:
        master_stays = phase is Phase.PREDICT or full.master == other.master
        if weight_storage(full) != weight_storage(other) or not master_stays:
            yield (
                f"weight: stored otherwise in {phase} than in full; frozen weights stay as they are: let "
                "mixed_precision, int8_weights and weight_streaming act in every phase or in none."
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
            allowed = "int8 codes without a master and with the same scales, whose grid no other storage returns to"
        elif trained[0] is not Codec.FLOAT32:
            allowed += " or wider ones"
        yield (
            f"weight: {what} are trained as {trained[0]} in full, but {phase} would keep {kept[0]}, and they would not "
            f"come back to the bit; allowed in {phase}: {allowed}. Set master = 'float32' (or 'split16' with bfloat16 "
            f"weights) where only {phase} is meant, or let the optimization act in every phase."
        )
        return


def _exactness(plan: PhasePlan) -> tuple[tuple[Codec, object], tuple[Codec, object]]:
    """Return what is kept of matrices and of vectors, and how its ranges are taken."""
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
