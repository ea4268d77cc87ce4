"""What the optimizations that move and shrink storage make of a plan, and the words with which they refuse."""

import re
from collections.abc import Callable
from dataclasses import asdict

import pytest

from hybridtrain.errors import PlanConflictError
from hybridtrain.optimizations import (
    ActivationOffload,
    Bf16Optimizer,
    FusedUpdate,
    GradAccumulation,
    GradientCheckpointing,
    Int8Optimizer,
    Int8Weights,
    Lora,
    MixedPrecision,
    OptimizerOffload,
    PredictMemory,
    WeightStreaming,
)
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import Schedule, UpdateDevice
from hybridtrain.plan.placement import Codec, Placement

PLAIN = {phase: asdict(compose([]).for_phase(phase)) for phase in Phase}
Changes = dict[str, object]


def changes(*stack: Optimization, phase: Phase = Phase.FULL) -> Changes:
    """Return what a stack changes in plain training's table, by dotted path."""
    found: Changes = {}
    for name, value in asdict(compose(stack).for_phase(phase)).items():
        plain = PLAIN[phase][name]
        if isinstance(value, dict):
            found |= {f"{name}.{column}": entry for column, entry in value.items() if entry != plain[column]}
        elif value != plain:
            found[name] = value
    return found


MAKES: dict[str, tuple[list[Optimization], Changes]] = {
    "weights-host": ([WeightStreaming()], {"weight.placement": Placement.HOST}),
    "weights-disk": (
        [WeightStreaming(max_active_layers=4, prefetch_distance=3, resident_layers=5, tier="disk")],
        {"weight.placement": Placement.DISK, "max_active_layers": 4, "prefetch_distance": 3, "resident_layers": 5},
    ),
    "weights-one-slot": (
        [WeightStreaming(max_active_layers=1)],
        {"weight.placement": Placement.HOST, "max_active_layers": 1, "prefetch_distance": 0},
    ),
    "boundaries-host": (
        [ActivationOffload(), GradientCheckpointing(recompute_every=2)],
        {"boundary.placement": Placement.HOST, "recompute_every": 2},
    ),
    "boundaries-disk": (
        [ActivationOffload(tier="disk"), GradientCheckpointing(recompute_every=1, kept_blocks=3)],
        {"boundary.placement": Placement.DISK, "recompute_every": 1, "kept_blocks": 3},
    ),
    "state-host": (
        [OptimizerOffload()],
        {f"{name}.placement": Placement.HOST for name in ("master", "optim_state", "grad")},
    ),
    "state-disk-grads-here": (
        [OptimizerOffload(tier="disk", offload_grads=False)],
        {f"{name}.placement": Placement.DISK for name in ("master", "optim_state")},
    ),
    "update-on-host": (
        [OptimizerOffload(update_on="host")],
        {"update_on": UpdateDevice.HOST}
        | {f"{name}.placement": Placement.HOST for name in ("master", "optim_state", "grad")},
    ),
    "int8-weights": ([Int8Weights()], {"weight.codec": Codec.INT8_BLOCKS, "master.codec": Codec.FLOAT32}),
    "int8-weights-trained": ([Int8Weights(master="absent")], {"weight.codec": Codec.INT8_BLOCKS}),
    "int8-weights-static": (
        [Int8Weights(master="float32", static_scales=True)],
        {"weight.codec": Codec.INT8_BLOCKS, "master.codec": Codec.FLOAT32, "static_scales": True},
    ),
    "int8-weights-follow-mixed-precision": (
        [Int8Weights(), MixedPrecision(master="absent")],
        {
            "weight.codec": Codec.INT8_BLOCKS,
            "grad.codec": Codec.BFLOAT16,
            "boundary.codec": Codec.BFLOAT16,
            "compute_dtype": Codec.BFLOAT16,
        },
    ),
    "bf16-moments": ([Bf16Optimizer()], {"optim_state.codec": Codec.BFLOAT16}),
    "int8-moments": ([Int8Optimizer()], {"optim_state.codec": Codec.INT8_BLOCKS}),
    "fused": ([FusedUpdate()], {"grad.placement": Placement.DROPPED}),
    "fused-vertical": (
        [FusedUpdate(), GradAccumulation(grad_accum_steps=4, schedule="vertical", visit_micro_batches=4)],
        {
            "grad.placement": Placement.DROPPED,
            "grad_accum_steps": 4,
            "schedule": Schedule.VERTICAL,
            "visit_micro_batches": 4,
        },
    ),
    "visits-of-two": (
        [GradAccumulation(grad_accum_steps=6, schedule="vertical", visit_micro_batches=2)],
        {"grad_accum_steps": 6, "schedule": Schedule.VERTICAL, "visit_micro_batches": 2},
    ),
    "keep-last": (
        [GradientCheckpointing(recompute_every=4, kept_blocks=2)],
        {"recompute_every": 4, "kept_blocks": 2},
    ),
}


@pytest.mark.parametrize("name", MAKES)
def test_a_stack_changes_its_own_cells_and_no_other(name: str) -> None:
    stack, expected = MAKES[name]
    for phase in Phase:
        assert changes(*stack, phase=phase) == expected


AWAY: Changes = {"optim_state.placement": Placement.HOST, "master.placement": Placement.HOST}
NO_BOUNDARY: Changes = {"boundary.placement": Placement.DROPPED}
IN_PREDICT: dict[str, tuple[PredictMemory, Changes]] = {
    "none": (PredictMemory(optimizer_state="none"), NO_BOUNDARY),
    "cpu": (PredictMemory(), AWAY | NO_BOUNDARY),
    "pinned": (PredictMemory(optimizer_state="pinned"), AWAY | NO_BOUNDARY),
    "compress": (PredictMemory(optimizer_state="compress"), {"optim_state.codec": Codec.INT8_BLOCKS} | NO_BOUNDARY),
    "drop": (PredictMemory(optimizer_state="drop"), {"optim_state.placement": Placement.DROPPED} | NO_BOUNDARY),
    "boundaries-stay": (PredictMemory(discard_activations=False), AWAY),
    "ahead": (PredictMemory(restore_lookahead=2), AWAY | NO_BOUNDARY | {"restore_lookahead": 2}),
    "waits": (PredictMemory(async_restore=False), AWAY | NO_BOUNDARY | {"async_restore": False}),
}


@pytest.mark.parametrize("name", IN_PREDICT)
def test_predict_memory_changes_predict_alone(name: str) -> None:
    optimization, expected = IN_PREDICT[name]
    assert {phase: changes(optimization, phase=phase) for phase in Phase} == {
        phase: expected if phase is Phase.PREDICT else {} for phase in Phase
    }


def test_predict_memory_wins_over_what_holds_in_every_phase() -> None:
    stack = [
        OptimizerOffload(tier="disk"),
        ActivationOffload(),
        GradientCheckpointing(),
        PredictMemory(optimizer_state="drop"),
    ]
    plan = compose(stack)
    assert plan.for_phase(Phase.FULL).optim_state.placement is Placement.DISK
    assert plan.for_phase(Phase.FULL).boundary.placement is Placement.HOST
    assert plan.for_phase(Phase.PREDICT).optim_state.placement is Placement.DROPPED
    assert plan.for_phase(Phase.PREDICT).boundary.placement is Placement.DROPPED
    assert plan.for_phase(Phase.PREDICT).master.placement is Placement.DISK  # nobody moved it


@pytest.mark.parametrize("active", [(Phase.PREDICT,), (Phase.FULL, Phase.CORRECT), tuple(Phase)])
def test_weights_stream_in_active_phases_only(active: tuple[Phase, ...]) -> None:
    plan = compose([WeightStreaming(active_phases=active, max_active_layers=3)])
    assert {phase for phase in Phase if plan.for_phase(phase).weight.placement is Placement.HOST} == set(active)
    assert {plan.for_phase(phase).max_active_layers for phase in Phase} == {3}


FAULTS: dict[str, Callable[[], Optimization]] = {
    "restore_lookahead: -1 must be at least 0": lambda: PredictMemory(restore_lookahead=-1),
    "restore_lookahead: 1 needs async_restore = true": lambda: PredictMemory(restore_lookahead=1, async_restore=False),
    "async_restore, restore_lookahead: optimizer_state = 'drop' has no state to restore; set 'cpu' or 'pinned', or "
    "remove both": lambda: PredictMemory(optimizer_state="drop", async_restore=False),
    "max_active_layers: 0 must be at least 1": lambda: WeightStreaming(max_active_layers=0),
    "prefetch_distance: -1 must be at least 0": lambda: WeightStreaming(prefetch_distance=-1),
    "resident_layers: -2 must be at least 0": lambda: WeightStreaming(resident_layers=-2),
    "max_active_layers: 0 must be at least 1\nresident_layers: -1 must be at least 0\n"
    "active_phases: empty; name at least one phase or drop the optimization": lambda: WeightStreaming(
        max_active_layers=0, resident_layers=-1, active_phases=()
    ),
    "tier: disk needs update_on = 'device'; an update on the host works in host memory": lambda: OptimizerOffload(
        update_on="host", tier="disk"
    ),
    "offload_grads: false needs update_on = 'device'; an update on the host reads gradients in host memory": lambda: (
        OptimizerOffload(update_on="host", offload_grads=False)
    ),
    "recompute_every: 0 must be at least 1; drop the optimization instead\n"
    "kept_blocks: -1 must be at least 0": lambda: GradientCheckpointing(recompute_every=0, kept_blocks=-1),
    "visit_micro_batches: -3 must be at least 0": lambda: GradAccumulation(schedule="vertical", visit_micro_batches=-3),
    "visit_micro_batches: needs schedule = 'vertical'; remove it, or set the schedule": lambda: GradAccumulation(
        visit_micro_batches=1
    ),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_wrong_setting_is_refused_in_these_words(message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        FAULTS[message]()


FUSED_FAULT = (
    "grad.placement: fused_update with 4 micro-batches needs grad_accumulation with schedule = 'vertical' and all "
    "micro-batches in one visit."
)
BOUNDARY_FAULT = (
    "boundary.placement: activation_offload needs gradient_checkpointing in the stack; without it activations inside "
    "the blocks stay on the device."
)
PREFETCH_FAULT = (
    "prefetch_distance: 3 must be below max_active_layers (1), which includes the current block; lower it, or set "
    "max_active_layers = 4."
)
SPLIT_FAULT = "master.codec: split16 works with bfloat16 weights only; with int8_weights use float32 or absent."
REFUSED: list[tuple[str, list[Optimization]]] = [
    (BOUNDARY_FAULT, [ActivationOffload()]),
    (BOUNDARY_FAULT, [ActivationOffload(tier="disk"), WeightStreaming()]),
    (FUSED_FAULT, [FusedUpdate(), GradAccumulation()]),
    (FUSED_FAULT, [FusedUpdate(), GradAccumulation(schedule="vertical", visit_micro_batches=3)]),
    (SPLIT_FAULT, [Int8Weights(), MixedPrecision(master="split16")]),
    (
        PREFETCH_FAULT,
        [WeightStreaming(max_active_layers=1, prefetch_distance=3)],
    ),
    (
        "visit_micro_batches: 3 must be at most grad_accum_steps (2); lower it, or set 0 for all of a step.",
        [GradAccumulation(grad_accum_steps=2, schedule="vertical", visit_micro_batches=3)],
    ),
    (
        "static_scales: lora freezes the matrices, whose scales never change; remove static_scales.",
        [Lora(), Int8Weights(static_scales=True)],
    ),
    (
        "master.codec: float32 is not used, as adapters are float32 themselves; remove master, or add mixed_precision.",
        [Lora(), Int8Weights(master="float32")],
    ),
    (f"{BOUNDARY_FAULT}\n{FUSED_FAULT}", [ActivationOffload(), FusedUpdate(), GradAccumulation()]),
]


@pytest.mark.parametrize(("message", "stack"), REFUSED)
def test_a_plan_that_contradicts_itself_is_refused_in_these_words(message: str, stack: list[Optimization]) -> None:
    with pytest.raises(PlanConflictError) as raised:
        compose(stack)
    assert str(raised.value) == message


ALLOWED: list[list[Optimization]] = [
    [FusedUpdate(), GradAccumulation(grad_accum_steps=1)],
    [FusedUpdate(), GradAccumulation(schedule="vertical")],
    [Int8Weights(), MixedPrecision(master="absent")],
    [OptimizerOffload(update_on="host"), WeightStreaming()],
    [OptimizerOffload(), WeightStreaming(tier="disk")],
]


@pytest.mark.parametrize("stack", ALLOWED)
def test_its_nearest_neighbour_is_not(stack: list[Optimization]) -> None:
    assert set(compose(stack).phases) == set(Phase)


def test_an_update_on_the_host_refuses_weights_on_disk() -> None:
    with pytest.raises(
        PlanConflictError, match=r"^\S+: updates on the host need weights in host memory; .*tier = 'host'"
    ):
        compose([OptimizerOffload(update_on="host"), WeightStreaming(tier="disk")])


CONFLICTS: dict[str, list[Optimization]] = {
    "optim_state.codec: 'bf16_optimizer' requires bfloat16, but 'int8_optimizer' requires int8_blocks": [
        Bf16Optimizer(),
        Int8Optimizer(),
    ],
    "grad.placement: 'fused_update' requires dropped, but 'optimizer_offload' requires host": [
        FusedUpdate(),
        OptimizerOffload(),
    ],
    "master.codec: 'int8_weights' requires absent, but 'mixed_precision' requires float32": [
        Int8Weights(master="absent"),
        MixedPrecision(),
    ],
}


@pytest.mark.parametrize("beginning", CONFLICTS)
def test_two_owners_of_a_cell_are_named(beginning: str) -> None:
    with pytest.raises(PlanConflictError) as raised:
        compose(CONFLICTS[beginning])
    assert str(raised.value).startswith(f"{beginning}; drop one of them")
