"""A stack becomes one plan: the order never matters, two owners of one cell are named, defaults fill the rest."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, permutations
from typing import ClassVar

import pytest

from hybridtrain.errors import PlanConflictError
from hybridtrain.optimizations import (
    OPTIMIZATIONS,
    ActivationOffload,
    Bf16Optimizer,
    Bitnet,
    ChunkedLoss,
    FlashAttention,
    FusedUpdate,
    GradAccumulation,
    GradientCheckpointing,
    Int8Optimizer,
    Int8Weights,
    Lora,
    LowBitMatmul,
    MixedPrecision,
    Nf4Weights,
    OptimizerOffload,
    Pipeline,
    PredictMemory,
    PredictorState,
    TiledMlp,
    WeightStreaming,
    Zero,
)
from hybridtrain.phase import Phase
from hybridtrain.plan.claim import Claim
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import (
    SETTINGS,
    Attention,
    Cell,
    MemoryPlan,
    PhasePlan,
    PlanValue,
    Schedule,
    Setting,
    UpdateDevice,
    describe_settings,
    resolve,
)
from hybridtrain.plan.placement import Codec, Placement

STACK: tuple[Optimization, ...] = (
    GradientCheckpointing(recompute_every=2),
    MixedPrecision(master="absent"),
    Int8Optimizer(),
    Int8Weights(),
    GradAccumulation(grad_accum_steps=4, schedule="vertical"),
    ChunkedLoss(loss_chunk_tokens=256),
    FlashAttention(),
    WeightStreaming(),
    Zero(),
    OptimizerOffload(offload_grads=False),
    ActivationOffload(),
    FusedUpdate(),
    PredictMemory(),
    PredictorState(),
    TiledMlp(),
)
OTHER_PRODUCTS: tuple[Optimization, ...] = (LowBitMatmul(),)
"""In place of BitNet."""
OTHER_MOMENTS: tuple[Optimization, ...] = (Bf16Optimizer(),)
"""Each in place of the 8-bit optimizer."""
OTHER_WEIGHTS: tuple[Optimization, ...] = (Lora(), Nf4Weights(), Bitnet())
"""In place of int8 weights."""
OTHER_CUTS: tuple[Optimization, ...] = (Pipeline(),)
"""In place of zero."""


@dataclass(frozen=True)
class Wish:
    """An optimization made of given claims."""

    kind: ClassVar[str] = "wish"
    wanted: tuple[Claim, ...]

    def claims(self) -> Iterable[Claim]:
        return self.wanted


class OtherWish(Wish):
    """A second owner."""

    kind: ClassVar[str] = "other_wish"


def on_device(codec: Codec) -> Cell:
    return Cell(placement=Placement.DEVICE, codec=codec)


def test_the_stacks_of_this_file_hold_every_optimization() -> None:
    everything = STACK + OTHER_PRODUCTS + OTHER_MOMENTS + OTHER_WEIGHTS + OTHER_CUTS
    assert {optimization.kind for optimization in everything} == set(OPTIMIZATIONS)


@pytest.mark.parametrize("size", [2, 5])
def test_the_order_of_a_stack_never_matters(size: int) -> None:
    for start in range(0, len(STACK), size):
        expected = compose(STACK)
        rest = STACK[:start] + STACK[start + size :]
        for order in permutations(STACK[start : start + size]):
            assert compose(rest + order) == compose(order + rest) == expected


MIDDLE = range(4, len(STACK) - 1)
"""Sizes with most of the 2^15 subsets; what two or three optimizations do to each other shows in smaller ones."""


@pytest.mark.parametrize(
    "size",
    [pytest.param(size, marks=[pytest.mark.every_case] * (size in MIDDLE)) for size in range(len(STACK) + 1)],
)
def test_every_subset_composes_to_a_plan_of_its_own(size: int) -> None:
    plans = [compose(subset) for subset in combinations(STACK, size) if not lacks_checkpointing(subset)]
    assert plans
    assert len({repr(plan) for plan in plans}) == len(plans)


def lacks_checkpointing(subset: Sequence[Optimization]) -> bool:
    kinds = {optimization.kind for optimization in subset}
    return "activation_offload" in kinds and "gradient_checkpointing" not in kinds


@pytest.mark.parametrize("other", OTHER_MOMENTS, ids=lambda other: other.kind)
def test_moments_have_one_format(other: Optimization) -> None:
    with pytest.raises(PlanConflictError, match=r"^optim_state\.codec: 'int8_optimizer' requires int8_blocks, "):
        compose([*STACK, other])
    without = [optimization for optimization in STACK if optimization.kind != "int8_optimizer"]
    assert compose([*without, other]) != compose(without)


def test_a_subset_changes_only_what_its_members_claim() -> None:
    everything, nothing = compose(STACK).for_phase(Phase.FULL), compose([]).for_phase(Phase.FULL)
    without_int8 = compose([item for item in STACK if item.kind != "int8_optimizer"]).for_phase(Phase.FULL)
    assert everything.optim_state == Cell(placement=Placement.HOST, codec=Codec.INT8_BLOCKS)
    assert without_int8.optim_state == Cell(placement=Placement.HOST, codec=Codec.FLOAT32)
    assert nothing.optim_state == on_device(Codec.FLOAT32)
    assert without_int8.master == everything.master


def test_a_conflict_names_the_cell_both_owners_and_both_values() -> None:
    wish = Wish((Claim("recompute_every", 3),))
    with pytest.raises(PlanConflictError) as raised:
        compose([GradientCheckpointing(recompute_every=2), wish])
    assert str(raised.value) == (
        "recompute_every: 'gradient_checkpointing' requires 2, but 'wish' requires 3; drop one of them, or make them "
        "agree."
    )


def test_owners_that_agree_do_not_conflict() -> None:
    plan = compose([GradientCheckpointing(recompute_every=2), Wish((Claim("recompute_every", 2),))])
    assert plan.for_phase(Phase.FULL).recompute_every == 2


def test_a_conflict_within_one_phase_is_found() -> None:
    first = Wish((Claim("recompute_every", 1, Phase.PREDICT),))
    second = OtherWish((Claim("recompute_every", 2, Phase.PREDICT),))
    with pytest.raises(PlanConflictError, match="'wish' requires 1, but 'other_wish' requires 2"):
        compose([first, second])


def test_claims_for_different_phases_do_not_conflict() -> None:
    first = Wish((Claim("recompute_every", 1, Phase.WARMUP),))
    second = OtherWish((Claim("recompute_every", 2, Phase.PREDICT),))
    plan = compose([first, second])
    assert {phase: plan.for_phase(phase).recompute_every for phase in Phase} == {
        Phase.WARMUP: 1,
        Phase.FULL: 0,
        Phase.PREDICT: 2,
        Phase.CORRECT: 0,
    }


@pytest.mark.parametrize("reverse", [False, True])
def test_a_claim_for_one_phase_wins_over_one_for_every_phase(*, reverse: bool) -> None:
    stack = [GradientCheckpointing(recompute_every=2), Wish((Claim("recompute_every", 5, Phase.PREDICT),))]
    plan = compose(stack[::-1] if reverse else stack)
    assert plan.for_phase(Phase.PREDICT).recompute_every == 5
    assert plan.for_phase(Phase.FULL).recompute_every == 2


def test_one_owner_may_differ_from_itself_in_one_phase() -> None:
    wish = Wish((Claim("loss_chunk_tokens", 64), Claim("loss_chunk_tokens", 0, Phase.CORRECT)))
    plan = compose([wish])
    assert plan.for_phase(Phase.FULL).loss_chunk_tokens == 64
    assert plan.for_phase(Phase.CORRECT).loss_chunk_tokens == 0


def test_one_kind_twice_is_refused_even_with_equal_settings() -> None:
    stack = [Int8Optimizer(), MixedPrecision(), Int8Optimizer()]
    with pytest.raises(PlanConflictError, match="'int8_optimizer' appears 2 times in the stack; keep one of them"):
        compose(stack)


def test_a_claim_on_a_path_that_does_not_exist_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match=r"no such path in the memory plan: weight\.colour"):
        Claim("weight.colour", 1)


def test_nothing_claimed_is_plain_fp32_training() -> None:
    assert resolve({}) == PhasePlan(
        weight=on_device(Codec.FLOAT32),
        master=on_device(Codec.ABSENT),
        grad=on_device(Codec.FLOAT32),
        optim_state=on_device(Codec.FLOAT32),
        boundary=on_device(Codec.FLOAT32),
        compute_dtype=Codec.FLOAT32,
        recompute_every=0,
        kept_blocks=0,
        grad_accum_steps=1,
        schedule=Schedule.HORIZONTAL,
        visit_micro_batches=0,
        loss_chunk_tokens=0,
        max_active_layers=2,
        prefetch_distance=1,
        resident_layers=0,
        static_scales=False,
        update_on=UpdateDevice.DEVICE,
        attention=Attention.FLASH,
        history_codec=Codec.ABSENT,
        history_tensors=0,
    )


def test_a_compute_dtype_brings_its_storage_and_a_master() -> None:
    plan = resolve({"compute_dtype": Codec.BFLOAT16})
    assert plan.weight == plan.grad == plan.boundary == on_device(Codec.BFLOAT16)
    assert plan.master == plan.optim_state == on_device(Codec.FLOAT32)


def test_weights_kept_exact_need_no_master() -> None:
    plan = resolve({"compute_dtype": Codec.BFLOAT16, "weight.codec": Codec.FLOAT32})
    assert plan.weight == on_device(Codec.FLOAT32)
    assert plan.master == on_device(Codec.ABSENT)
    assert plan.grad == plan.boundary == on_device(Codec.BFLOAT16)


def test_gradients_of_8_bit_weights_have_the_compute_dtype() -> None:
    plan = resolve({"weight.codec": Codec.INT8_BLOCKS})
    assert plan.grad == on_device(Codec.FLOAT32)
    assert plan.master == on_device(Codec.FLOAT32)


@pytest.mark.parametrize(("slots", "wish", "distance"), [(1, None, 0), (1, 0, 0), (2, None, 1), (3, 1, 1), (3, 2, 2)])
def test_fetching_ahead_leaves_a_slot_for_the_block_at_work(slots: int, wish: int | None, distance: int) -> None:
    plan = compose([WeightStreaming(max_active_layers=slots, prefetch_distance=wish)])
    assert plan.for_phase(Phase.FULL).prefetch_distance == distance


def another_value(path: str) -> PlanValue:
    """Return an allowed value that is not the default."""
    setting = SETTINGS[path]
    if type(setting.default) is str:
        return "query"
    if setting.least is not None:
        return type(setting.default)(
            setting.least if setting.default != setting.least else min(setting.least + 7, setting.most)
        )
    if setting.allowed:
        return type(setting.default)(next(value for value in setting.allowed if value != setting.default))
    return not setting.default


NEEDS: dict[str, dict[str, PlanValue]] = {
    "boundary.placement": {"recompute_every": 1},
    "keep_attention": {"recompute_every": 1},
    "history_codec": {"history_tensors": 1},
    "adapter_rank": {"adapter_targets": "query"},
    "zero_stage": {"weight.placement": "host"},
    "visit_micro_batches": {"grad_accum_steps": 8},
    "max_active_layers": {"prefetch_distance": 0},
    "zero_prefetch": {"zero_stage": 3, "weight.placement": "host", "max_active_layers": 8, "prefetch_distance": 7},
}
"""What a value needs beside it."""


@pytest.mark.parametrize("path", SETTINGS)
def test_a_claim_reaches_its_cell_or_setting(path: str) -> None:
    value = another_value(path)
    plan = resolve({path: value, **NEEDS.get(path, {})})
    name, _, column = path.partition(".")
    found = getattr(getattr(plan, name), column) if column else getattr(plan, name)
    assert found == plan.values()[path] == value
    assert type(found) is type(SETTINGS[path].default)


@pytest.mark.parametrize("setting", list(describe_settings()), ids=lambda setting: setting.path)
def test_a_setting_is_described_where_it_is_declared(setting: Setting) -> None:
    assert setting.description.endswith(".") or setting.description.endswith("everything.")
    assert setting.default == PhasePlan().values()[setting.path]
    assert not setting.allowed or str(setting.default) in setting.allowed
    assert setting.words


WRONG: dict[str, dict[str, object]] = {
    "recompute_every: -1 must be at least 0.": {"recompute_every": -1},
    "grad_accum_steps: 0 must be at least 1.": {"grad_accum_steps": 0},
    "prefetch_distance: 2 must be below max_active_layers (2), which includes the current block; lower it, or set "
    "max_active_layers = 3.": {"prefetch_distance": 2},
    "weight.codec: split16 is not one of float32, bfloat16, float16, int8_blocks, nf4; claim one of these.": {
        "weight": on_device(Codec.SPLIT16)
    },
    "grad.placement: fused_update with 4 micro-batches needs grad_accumulation with schedule = 'vertical' and all "
    "micro-batches in one visit.": {
        "grad": Cell(placement=Placement.DROPPED, codec=Codec.FLOAT32),
        "grad_accum_steps": 4,
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_a_plan_that_contradicts_itself_cannot_be_made(message: str) -> None:
    for make in (lambda: PhasePlan(**WRONG[message]), lambda: replace(PhasePlan(), **WRONG[message])):
        with pytest.raises(PlanConflictError) as raised:
            make()
        assert str(raised.value) == message


def test_a_plan_whose_phases_cannot_follow_one_another_cannot_be_made() -> None:
    full = PhasePlan()
    tables = dict.fromkeys(Phase, full) | {Phase.PREDICT: replace(full, grad_accum_steps=2)}
    with pytest.raises(PlanConflictError, match=r"^grad_accum_steps: 2 in predict, 1 in full; it must be equal:"):
        MemoryPlan(phases=tables)


IMPOSSIBLE: dict[str, list[Optimization]] = {
    "boundary.placement: activation_offload needs gradient_checkpointing": [ActivationOffload()],
    "grad.placement: fused_update with 3 micro-batches needs": [
        FusedUpdate(),
        GradAccumulation(grad_accum_steps=3),
    ],
    "grad.placement: fused_update with 4 micro-batches needs": [
        FusedUpdate(),
        GradAccumulation(grad_accum_steps=4, schedule="vertical", visit_micro_batches=2),
    ],
    "master.codec: split16 works with bfloat16 weights only": [Int8Weights(), MixedPrecision(master="split16")],
    "grad.placement: 'fused_update' requires dropped, but 'optimizer_offload' requires host": [
        FusedUpdate(),
        OptimizerOffload(),
    ],
}


@pytest.mark.parametrize("beginning", IMPOSSIBLE)
def test_values_that_together_describe_nothing_that_could_run_are_refused(beginning: str) -> None:
    with pytest.raises(PlanConflictError) as raised:
        compose(IMPOSSIBLE[beginning])
    assert str(raised.value).startswith(beginning)
    assert len(str(raised.value).splitlines()) == 1  # one fault, though every phase has it


def test_an_update_on_the_host_cannot_work_on_weights_on_disk() -> None:
    with pytest.raises(PlanConflictError, match=r"^update_on: "):
        compose([OptimizerOffload(update_on="host"), WeightStreaming(tier="disk")])


def test_every_contradiction_is_listed() -> None:
    stack = [ActivationOffload(), FusedUpdate(), GradAccumulation(grad_accum_steps=3)]
    with pytest.raises(PlanConflictError) as raised:
        compose(stack)
    assert [line.partition(":")[0] for line in str(raised.value).splitlines()] == [
        "boundary.placement",
        "grad.placement",
    ]


def test_every_phase_has_a_table() -> None:
    assert list(compose(STACK).phases) == list(Phase)


def test_every_claim_of_every_optimization_is_for_a_known_path() -> None:
    claims = list(chain.from_iterable(optimization.claims() for optimization in STACK))
    assert {claim.path for claim in claims} <= set(SETTINGS)
    assert len({(claim.path, claim.phase) for claim in claims}) == len(claims)  # no two ever meet in one cell
