"""The owner of masters and moments: what it allocates, where, when, and what it starts from."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hybridkernels.adamw_int8 import QUANT_GROUP_SIZE, dequantize
from hybridtrain.errors import PlanConflictError
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.formats import (
    SMALLEST_INT8_TENSOR,
    DynamicInt8State,
    ExactWeight,
    Float32Master,
    Split16Master,
    StochasticWeight,
    WeightFormat,
    WeightFormats,
    state_format,
)
from hybridtrain.memory.shards import Shards
from hybridtrain.memory.state_store import ParameterState, StateStore
from hybridtrain.memory.tier_tensor import Stored, TierTensor
from hybridtrain.models.block_model import Unit
from hybridtrain.optim import Adafactor, AdamWConfig, Optimizer
from hybridtrain.optim.optimizer import Role
from hybridtrain.plan.memory_plan import Cell, PhasePlan
from hybridtrain.plan.placement import Codec, Placement
from hybridtrain.virtual_gpu.account.ledger import StorageLedger
from hybridtrain.virtual_gpu.account.observer import NullObserver
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from memory_parts import new_copies, plan_of
from numerics import assert_bitwise

ODD_ELEMENTS = SMALLEST_INT8_TENSOR + 5
ADAMW = AdamWConfig()
GROUPS = 17
"""Of 256 that hold 4101 elements."""


def moments_of(state: ParameterState) -> tuple[Stored, ...]:
    return tuple(tensor for slot in state.slots for tensor in slot.tensors)


def is_int8(state: ParameterState) -> bool:
    return all(isinstance(slot.storage, DynamicInt8State) for slot in state.slots)


def make_unit(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Unit:
    return Unit("unit", tuple((f"unit.{i}", nn.Parameter(torch.zeros(s, dtype=dtype))) for i, s in enumerate(shapes)))


def plan_with(codec: Codec, placement: Placement) -> PhasePlan:
    """Return a plan whose moments have a codec; they and the master have a placement."""
    plan = plan_of([])
    return replace(
        plan,
        optim_state=Cell(placement=placement, codec=codec),
        master=replace(plan.master, placement=placement),
    )


def make_store(
    unit: Unit,
    codec: Codec,
    master: WeightFormat | None = None,
    observer: NullObserver | StorageLedger | None = None,
    *,
    placement: Placement = Placement.DEVICE,
    copies: CopyEngine | None = None,
    optimizer: Optimizer = ADAMW,
) -> StateStore:
    codecs = WeightFormats(master or ExactWeight(), master or ExactWeight())
    store = StateStore(plan_with(codec, placement), codecs, Shards(copies or new_copies(observer=observer)))
    for _, parameter in unit.parameters:
        specs = optimizer.state(Role(tuple(parameter.shape), in_block=False))
        store.initialize(unit.name, parameter, torch.randn(parameter.shape), (parameter.data,), specs)
    return store


def test_fp32_moments_have_the_parameters_shape_and_start_at_zero() -> None:
    unit = make_unit((3, 5))
    (state,) = make_store(unit, Codec.FLOAT32).acquire(unit)
    assert not is_int8(state)
    assert len(moments_of(state)) == 2
    for moment in moments_of(state):
        assert_bitwise(moment, torch.zeros(3, 5), "moment")


def test_int8_moments_are_flat_whole_groups_that_decode_to_zero() -> None:
    unit = make_unit((ODD_ELEMENTS,))
    (state,) = make_store(unit, Codec.INT8_BLOCKS).acquire(unit)
    assert is_int8(state)
    m_codes, m_scale, v_codes, v_scale = moments_of(state)
    for codes, scale, signed in ((m_codes, m_scale, True), (v_codes, v_scale, False)):
        assert (codes.dtype, codes.shape) == (torch.uint8, (GROUPS * QUANT_GROUP_SIZE,))
        assert (scale.dtype, scale.shape) == (torch.float32, (GROUPS,))
        # Not only because the scale is zero: the code itself is that of zero.
        assert (dequantize(codes.view(GROUPS, -1), torch.ones(GROUPS), signed=signed) == 0).all()


@pytest.mark.parametrize(("num_elements", "expected"), [(4095, False), (4096, True)])
def test_small_tensors_keep_fp32_moments(num_elements: int, *, expected: bool) -> None:
    unit = make_unit((num_elements,))
    (state,) = make_store(unit, Codec.INT8_BLOCKS).acquire(unit)
    assert is_int8(state) is expected


def test_moments_are_allocated_by_the_first_acquire_and_then_kept() -> None:
    unit = make_unit((3, 5), (7,))
    store = make_store(unit, Codec.FLOAT32)
    assert [moments_of(state) for _, states in store.items() for state in states] == [(), ()]
    first = [moments_of(state) for state in store.acquire(unit)]
    again = [moments_of(state) for state in store.acquire(unit)]
    assert all(a is b for f, g in zip(first, again, strict=True) for a, b in zip(f, g, strict=True))


def test_states_come_in_the_order_of_the_units_parameters() -> None:
    unit = make_unit((3, 5), (7,), (2,))
    states = make_store(unit, Codec.FLOAT32).acquire(unit)
    assert [state.parameter for state in states] == list(unit.tensors)


@pytest.mark.parametrize(
    ("master", "bytes_per_parameter"), [(Float32Master(), 4), (Split16Master(), 2), (StochasticWeight(), 0)]
)
def test_a_master_costs_its_bytes(master: WeightFormat, bytes_per_parameter: int) -> None:
    unit = make_unit((3, 5), dtype=torch.bfloat16)
    (state,) = make_store(unit, Codec.FLOAT32, master).acquire(unit)
    size = 0 if state.master_weight is None else state.master_weight.nbytes
    assert size == 15 * bytes_per_parameter


def test_the_initial_value_is_written_into_the_parameter() -> None:
    unit = make_unit((3, 5))
    codecs = WeightFormats(ExactWeight(), ExactWeight())
    store = StateStore(plan_with(Codec.FLOAT32, Placement.DEVICE), codecs, Shards(new_copies()))
    initial = torch.randn(3, 5)
    store.initialize("unit", unit.tensors[0], initial, (unit.tensors[0].data,), ())
    assert_bitwise(unit.tensors[0].detach(), initial, "weight")


def test_the_observer_learns_what_each_tensor_is_for() -> None:
    unit = make_unit((ODD_ELEMENTS,), dtype=torch.bfloat16)
    ledger = StorageLedger()
    with ledger:
        make_store(unit, Codec.INT8_BLOCKS, Split16Master(), ledger).acquire(unit)
    trace = ledger.trace()
    held = {
        tensor_class: sum(size for size, found in zip(trace.sizes, trace.classes, strict=True) if found is tensor_class)
        for tensor_class in (TensorClass.MASTER, TensorClass.OPTIM_STATE)
    }
    assert held == {
        TensorClass.MASTER: 2 * ODD_ELEMENTS,
        TensorClass.OPTIM_STATE: 2 * GROUPS * (QUANT_GROUP_SIZE + 4),
    }


@pytest.mark.parametrize("codec", [Codec.FLOAT16, Codec.SPLIT16])
def test_a_format_that_moments_cannot_have_is_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match=rf"optim_state\.codec: {codec} cannot hold optimizer state; allowed: float32"):
        state_format(codec, 1, signed=True)
    with pytest.raises(PlanConflictError, match=r"optim_state\.codec"):  # no plan asks for it either
        plan_with(codec, Placement.DEVICE)


def test_bfloat16_moments_take_two_bytes_each() -> None:
    unit = make_unit((3, 5))
    (state,) = make_store(unit, Codec.BFLOAT16).acquire(unit)
    assert [(moment.dtype, moment.shape) for moment in moments_of(state)] == [(torch.bfloat16, (3, 5))] * 2


def test_factored_moments_of_a_matrix_are_its_rows_and_columns() -> None:
    unit = make_unit((3, 5), (7,))
    matrix, vector = make_store(unit, Codec.FLOAT32, optimizer=Adafactor()).acquire(unit)
    assert [(moment.dtype, tuple(moment.shape)) for moment in moments_of(matrix)] == [
        (torch.float32, (3,)),
        (torch.float32, (5,)),
    ]
    assert [(moment.dtype, tuple(moment.shape)) for moment in moments_of(vector)] == [(torch.float32, (7,))]


def test_factored_moments_stay_on_the_device_whatever_the_plan_says() -> None:
    # A few kilobytes a matrix: a place elsewhere would cost copies and save nothing.
    unit = make_unit((3, 5))
    store = make_store(unit, Codec.FLOAT32, placement=Placement.HOST, optimizer=Adafactor())
    (state,) = store.acquire(unit)
    assert all(isinstance(moment, Tensor) for moment in moments_of(state))
    assert store.streamed_bytes(state, 1 << 20) == 0


def test_moments_below_the_device_are_one_buffer_a_unit_and_fresh_until_written() -> None:
    unit = make_unit((3, 5), (7,))
    copies = new_copies()
    states = make_store(unit, Codec.FLOAT32, placement=Placement.HOST, copies=copies).acquire(unit)
    moments = [moment for state in states for moment in moments_of(state)]
    assert [moment.offset for moment in moments if isinstance(moment, TierTensor)] == [0, 512, 1024, 1536]
    assert all(slot.is_fresh for state in states for slot in state.slots)
    assert copies.transfer.tiers.by_class(Placement.HOST) == {TensorClass.OPTIM_STATE: 4096}


def test_moments_on_the_device_are_zero_at_once() -> None:
    unit = make_unit((3, 5))
    (state,) = make_store(unit, Codec.FLOAT32).acquire(unit)
    assert not any(slot.is_fresh for slot in state.slots)


@pytest.mark.parametrize(("master", "dtype"), [(Float32Master(), torch.float32), (Split16Master(), torch.int16)])
def test_a_master_below_the_device_has_the_value_it_would_have_on_it(master: WeightFormat, dtype: torch.dtype) -> None:
    masters: list[Stored | None] = []
    for placement in (Placement.DEVICE, Placement.HOST):
        torch.manual_seed(0)
        unit = make_unit((3, 5), dtype=torch.bfloat16)
        copies = new_copies()
        (state,) = make_store(unit, Codec.FLOAT32, master, placement=placement, copies=copies).of("unit")
        masters.append(state.master_weight)
    resident, away = masters
    assert isinstance(resident, Tensor)
    assert isinstance(away, TierTensor)
    assert (away.dtype, away.shape) == (dtype, (3, 5))
    assert_bitwise(away.on_host(), resident.flatten(), "master_weight")
    assert copies.transfer.tiers.by_class(Placement.HOST) == {TensorClass.MASTER: 4096}


@pytest.mark.parametrize("codec", [Codec.FLOAT32, Codec.BFLOAT16, Codec.INT8_BLOCKS])
@pytest.mark.parametrize("num_elements", [ODD_ELEMENTS, SMALLEST_INT8_TENSOR, 7, 1])
@pytest.mark.parametrize("height", [256, 1024, 1 << 20])
def test_a_slot_is_large_enough_for_any_range_and_not_much_larger(codec: Codec, num_elements: int, height: int) -> None:
    unit = make_unit((num_elements,), dtype=torch.bfloat16)
    store = make_store(unit, codec, Split16Master(), placement=Placement.HOST)
    (state,) = store.acquire(unit)
    count = min(height, num_elements)
    groups = -(-count // QUANT_GROUP_SIZE)
    per_element = {Codec.FLOAT32: 4, Codec.BFLOAT16: 2}
    if codec is Codec.INT8_BLOCKS and is_int8(state):
        parts = [groups * QUANT_GROUP_SIZE, groups * 4] * 2
    else:
        parts = [count * per_element.get(codec, 4)] * 2
    needed = sum(-(-part // 512) * 512 for part in [*parts, count * 2])
    # Shares of a tensor are rounded up, each by less than one group of codes or one element.
    assert needed <= store.streamed_bytes(state, height) <= needed + 512 * len(parts)


def test_nothing_on_the_device_needs_a_slot() -> None:
    unit = make_unit((3, 5), dtype=torch.bfloat16)
    store = make_store(unit, Codec.FLOAT32, Float32Master())
    assert store.streamed_bytes(store.acquire(unit)[0], 1 << 20) == 0
