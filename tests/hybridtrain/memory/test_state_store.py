"""The owner of masters and moments: what it allocates, when, and what it starts from."""

import pytest
import torch
from torch import nn

from hybridkernels.adamw_int8 import QUANT_GROUP_SIZE, dequantize
from hybridtrain.memory.master_codec import ExactWeight, Float32Master, MasterCodec, Split16Master, StochasticWeight
from hybridtrain.memory.state_store import SMALLEST_INT8_TENSOR, StateStore
from hybridtrain.models.block_model import Unit
from hybridtrain.plan.tensor_class import Codec, TensorClass
from hybridtrain.profiler.observer import NullObserver
from hybridtrain.profiler.storage_ledger import StorageLedger
from numerics import assert_bitwise

ODD_ELEMENTS = SMALLEST_INT8_TENSOR + 5
GROUPS = 17
"""Of 256 that hold 4101 elements."""


def make_unit(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Unit:
    return Unit("unit", tuple((f"unit.{i}", nn.Parameter(torch.zeros(s, dtype=dtype))) for i, s in enumerate(shapes)))


def make_store(
    unit: Unit, codec: Codec, master: MasterCodec | None = None, observer: NullObserver | StorageLedger | None = None
) -> StateStore:
    store = StateStore(codec, master or ExactWeight(), observer or NullObserver())
    for _, parameter in unit.parameters:
        store.initialize(unit.name, parameter, torch.randn(parameter.shape))
    return store


def test_fp32_moments_have_the_parameters_shape_and_start_at_zero() -> None:
    unit = make_unit((3, 5))
    (state,) = make_store(unit, Codec.FLOAT32).acquire(unit)
    assert not state.is_int8
    assert len(state.moments) == 2
    for moment in state.moments:
        assert_bitwise(moment, torch.zeros(3, 5), "moment")


def test_int8_moments_are_flat_whole_groups_that_decode_to_zero() -> None:
    unit = make_unit((ODD_ELEMENTS,))
    (state,) = make_store(unit, Codec.INT8_BLOCKS).acquire(unit)
    assert state.is_int8
    m_codes, m_scale, v_codes, v_scale = state.moments
    for codes, scale, signed in ((m_codes, m_scale, True), (v_codes, v_scale, False)):
        assert (codes.dtype, codes.shape) == (torch.uint8, (GROUPS * QUANT_GROUP_SIZE,))
        assert (scale.dtype, scale.shape) == (torch.float32, (GROUPS,))
        # Not only because the scale is zero: the code itself is that of zero.
        assert (dequantize(codes.view(GROUPS, -1), torch.ones(GROUPS), signed=signed) == 0).all()


@pytest.mark.parametrize(("num_elements", "is_int8"), [(4095, False), (4096, True)])
def test_small_tensors_keep_fp32_moments(num_elements: int, *, is_int8: bool) -> None:
    unit = make_unit((num_elements,))
    (state,) = make_store(unit, Codec.INT8_BLOCKS).acquire(unit)
    assert state.is_int8 is is_int8


def test_moments_are_allocated_by_the_first_acquire_and_then_kept() -> None:
    unit = make_unit((3, 5), (7,))
    store = make_store(unit, Codec.FLOAT32)
    assert [state.moments for _, states in store.items() for state in states] == [(), ()]
    first = [state.moments for state in store.acquire(unit)]
    again = [state.moments for state in store.acquire(unit)]
    assert all(a is b for a, b in zip(first, again, strict=True))


def test_states_come_in_the_order_of_the_units_parameters() -> None:
    unit = make_unit((3, 5), (7,), (2,))
    states = make_store(unit, Codec.FLOAT32).acquire(unit)
    assert [state.parameter for state in states] == list(unit.tensors)


@pytest.mark.parametrize(
    ("master", "bytes_per_parameter"), [(Float32Master(), 4), (Split16Master(), 2), (StochasticWeight(), 0)]
)
def test_a_master_costs_its_companion(master: MasterCodec, bytes_per_parameter: int) -> None:
    unit = make_unit((3, 5), dtype=torch.bfloat16)
    (state,) = make_store(unit, Codec.FLOAT32, master).acquire(unit)
    size = 0 if state.companion is None else state.companion.nbytes
    assert size == 15 * bytes_per_parameter


def test_the_initial_value_is_written_into_the_parameter() -> None:
    unit = make_unit((3, 5))
    store = StateStore(Codec.FLOAT32, ExactWeight(), NullObserver())
    initial = torch.randn(3, 5)
    store.initialize("unit", unit.tensors[0], initial)
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


@pytest.mark.parametrize("codec", [Codec.BFLOAT16, Codec.FLOAT16, Codec.SPLIT16, Codec.ABSENT])
def test_a_format_that_moments_cannot_have_is_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match=rf"optim_state\.codec: {codec}"):
        StateStore(codec, ExactWeight(), NullObserver())
