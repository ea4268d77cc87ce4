"""The owner of gradients: sums in order, one conversion at the end, gone when taken, wherever they wait."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn

from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.grad_store import GradStore
from hybridtrain.memory.shards import Shards
from hybridtrain.memory.tier_tensor import Stored, TierTensor
from hybridtrain.models.block_model import Unit
from hybridtrain.plan.memory_plan import Cell, Schedule
from hybridtrain.plan.placement import Codec, Placement
from hybridtrain.virtual_gpu.account.ledger import StorageLedger
from hybridtrain.virtual_gpu.account.observer import NullObserver
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from memory_parts import new_copies, plan_of
from numerics import assert_bitwise

UNITS = (
    Unit("first", (("first.a", nn.Parameter(torch.empty(3, 2))), ("first.b", nn.Parameter(torch.empty(5))))),
    Unit("second", (("second.a", nn.Parameter(torch.empty(4))),)),
)


@dataclass
class Labels(NullObserver):
    """Remembers what it was told."""

    seen: list[tuple[torch.dtype, TensorClass, str]] = field(default_factory=list)

    def label(self, tensor: Tensor, tensor_class: TensorClass, unit: str) -> None:
        self.seen.append((tensor.dtype, tensor_class, unit))


def make_store(
    codec: Codec = Codec.FLOAT32, observer: NullObserver | StorageLedger | None = None,
    placement: Placement = Placement.DEVICE, copies: CopyEngine | None = None, *, adds_in_float32: bool = False,
) -> GradStore:  # fmt: skip
    plan = replace(plan_of([]), grad=Cell(placement=placement, codec=codec))
    if adds_in_float32:
        plan = replace(plan, schedule=Schedule.VERTICAL, grad_accum_steps=2)
    return GradStore(UNITS, plan, Shards(copies or new_copies(observer=observer)), wants_norm=True)


def random_grads(unit: Unit, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(parameter.shape).to(dtype) for parameter in unit.tensors]


def on_device(stored: Sequence[Stored], copies: CopyEngine) -> list[Tensor]:
    """Return what ``take`` returned, brought back if it waited below the device."""
    tensors = []
    for one in stored:
        if isinstance(one, TierTensor):
            tensors.append(torch.empty(one.shape, dtype=one.dtype))
            copies.wait(copies.fetch(tensors[-1], one.buffer, one.offset))
        else:
            tensors.append(one)
    return tensors


def test_the_first_gradients_are_kept_without_a_copy() -> None:
    store = make_store()
    grads = random_grads(UNITS[0])
    store.accumulate("first", grads)
    store.finish_visit("first", is_last=True)
    assert all(kept is given for kept, given in zip(store.take("first"), grads, strict=True))


@pytest.mark.parametrize("placement", [Placement.DEVICE, Placement.DROPPED, Placement.HOST])
@pytest.mark.parametrize("visits", [(3,), (1, 2), (1, 1, 1)])
def test_later_gradients_are_added_in_order(placement: Placement, visits: tuple[int, ...]) -> None:
    copies = new_copies()
    store = make_store(placement=placement, copies=copies)
    rounds = [random_grads(UNITS[0]) for _ in range(3)]
    expected = [(a + b) + c for a, b, c in zip(*rounds, strict=True)]
    coming = iter(rounds)
    for number, count in enumerate(visits, 1):
        for _ in range(count):
            store.accumulate("first", [grad.clone() for grad in next(coming)])
        store.finish_visit("first", is_last=number == len(visits))
    for actual, wanted in zip(on_device(store.take("first"), copies), expected, strict=True):
        assert_bitwise(actual, wanted)


@pytest.mark.parametrize("placement", [Placement.DEVICE, Placement.HOST])
def test_bfloat16_gradients_are_summed_in_float32_and_rounded_once(placement: Placement) -> None:
    copies = new_copies()
    store = make_store(Codec.BFLOAT16, placement=placement, copies=copies, adds_in_float32=True)
    # 256 + 1 is not a bfloat16: summed in bfloat16 the ones would be lost.
    rounds = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0, 1.0)]
    for grad in rounds:
        store.accumulate("second", [grad])
    store.finish_visit("second", is_last=True)
    (kept,) = on_device(store.take("second"), copies)
    assert_bitwise(kept, torch.tensor([260.0], dtype=torch.bfloat16), "sum")


def test_bfloat16_gradients_of_several_visits_have_one_sum_wherever_they_wait() -> None:
    # Placement changes no bit: what is rounded between visits is rounded on the device too.
    sums = []
    for placement in (Placement.DEVICE, Placement.HOST):
        copies = new_copies()
        store = make_store(Codec.BFLOAT16, placement=placement, copies=copies, adds_in_float32=True)
        for number, values in enumerate(([256.0, 1.0], [1.0, 1.0], [1.0, 1.0])):
            for value in values:
                store.accumulate("second", [torch.tensor([value], dtype=torch.bfloat16)])
            store.finish_visit("second", is_last=number == 2)
        sums += on_device(store.take("second"), copies)
    assert_bitwise(sums[1], sums[0], "sum")


def test_a_bfloat16_accumulator_rounds_after_every_micro_batch() -> None:
    store = make_store(Codec.BFLOAT16)
    for value in (256.0, 1.0, 1.0):
        store.accumulate("second", [torch.tensor([value])])
    store.finish_visit("second", is_last=True)
    (kept,) = store.take("second")
    assert isinstance(kept, Tensor)
    assert_bitwise(kept, torch.tensor([256.0], dtype=torch.bfloat16), "sum")


@pytest.mark.parametrize("placement", [Placement.DEVICE, Placement.DROPPED, Placement.HOST])
def test_the_norm_is_that_of_all_gradients_together(placement: Placement) -> None:
    store = make_store(placement=placement)
    every = []
    for unit in UNITS:
        grads = random_grads(unit)
        every += grads
        store.accumulate(unit.name, grads)
        store.finish_visit(unit.name, is_last=True)
        if placement is Placement.DROPPED:
            store.take(unit.name)
    assert_bitwise(store.norm(), nn.utils.get_total_norm(every), "norm")


def test_the_norm_of_bfloat16_gradients_is_computed_in_float32() -> None:
    store = make_store(Codec.BFLOAT16)
    store.accumulate("first", [torch.full((3, 2), 1.0), torch.full((5,), 1.0)])
    store.accumulate("second", [torch.full((4,), 16.0)])
    for unit in UNITS:
        store.finish_visit(unit.name, is_last=True)
    # sqrt(11 + 1024) = 32.17: bfloat16 would say 32 or 32.25. One rounding of float32.
    torch.testing.assert_close(store.norm(), torch.tensor(1035.0).sqrt(), rtol=2e-7, atol=0)


def test_a_norm_needs_every_unit() -> None:
    store = make_store()
    store.accumulate("first", random_grads(UNITS[0]))
    store.finish_visit("first", is_last=True)
    with pytest.raises(KeyError, match="second"):
        store.norm()


def test_a_norm_needs_the_last_visit_of_every_unit() -> None:
    store = make_store()
    for unit in UNITS:
        store.accumulate(unit.name, random_grads(unit))
        store.finish_visit(unit.name, is_last=unit.name == "first")
    with pytest.raises(KeyError, match="second"):
        store.norm()


@pytest.mark.parametrize("placement", [Placement.DEVICE, Placement.HOST])
def test_gradients_can_be_taken_once(placement: Placement) -> None:
    store = make_store(placement=placement)
    store.accumulate("first", random_grads(UNITS[0]))
    store.finish_visit("first", is_last=True)
    store.take("first")
    with pytest.raises(KeyError, match="first"):
        store.take("first")


@pytest.mark.parametrize("placement", [Placement.DEVICE, Placement.HOST])
def test_nothing_is_left_after_a_drop(placement: Placement) -> None:
    ledger = StorageLedger()
    with ledger:
        store = make_store(observer=ledger, placement=placement)
        store.accumulate("first", random_grads(UNITS[0]))
        store.finish_visit("first", is_last=True)
        assert ledger.live_bytes >= 4 * (6 + 5)
        store.drop()
        assert ledger.live_bytes == 0
    with pytest.raises(KeyError, match="first"):
        store.take("first")
    with pytest.raises(KeyError, match="first"):
        store.norm()


def test_a_missing_gradient_is_an_error() -> None:
    store = make_store()
    store.accumulate("first", random_grads(UNITS[0]))
    with pytest.raises(ValueError, match="zip"):
        store.accumulate("first", random_grads(UNITS[0])[:1])


def test_every_tensor_it_makes_is_named_a_gradient() -> None:
    observer = Labels()
    store = make_store(Codec.BFLOAT16, observer, adds_in_float32=True)
    store.accumulate("second", random_grads(UNITS[1], torch.bfloat16))
    store.finish_visit("second", is_last=True)
    assert observer.seen == [
        (torch.float32, TensorClass.GRAD, "second"),
        (torch.bfloat16, TensorClass.GRAD, "second"),
    ]


def test_gradients_below_the_device_leave_it_with_the_next_ones() -> None:
    # Their memory is free for reuse once the compute queue has waited for the copy; that is when the next copy starts.
    ledger = StorageLedger()
    with ledger:
        store = make_store(observer=ledger, placement=Placement.HOST)
        held = []
        for unit in UNITS:
            store.accumulate(unit.name, [torch.empty_like(tensor) for tensor in unit.tensors])
            store.finish_visit(unit.name, is_last=True)
            held.append(sum(size for size in live_sizes(ledger) if size > 4))  # norms are scalars
    assert held == [4 * (6 + 5), 4 * 4]


def live_sizes(ledger: StorageLedger) -> list[int]:
    return [size for _, size, _ in ledger._alive.values()]


def test_buffers_are_made_once_and_hold_each_gradient_at_a_multiple_of_512_bytes() -> None:
    copies = new_copies()
    store = make_store(placement=Placement.HOST, copies=copies)
    for _ in range(3):
        store.accumulate("first", random_grads(UNITS[0]))
        store.finish_visit("first", is_last=True)
        taken = store.take("first")
        assert [one.offset for one in taken if isinstance(one, TierTensor)] == [0, 512]
    assert copies.transfer.tiers.by_class(Placement.HOST) == {TensorClass.GRAD: 4096}


def test_a_transposed_gradient_arrives_with_its_values() -> None:
    copies = new_copies()
    store = make_store(placement=Placement.HOST, copies=copies)
    transposed = torch.randn(2, 3).t()
    store.accumulate("first", [transposed, torch.randn(5)])
    store.finish_visit("first", is_last=True)
    assert_bitwise(on_device(store.take("first"), copies)[0], transposed.contiguous(), "gradient")


def test_a_slot_needs_room_for_gradients_that_wait_below_the_device_only() -> None:
    for placement, expected in ((Placement.DEVICE, [0, 0, 0]), (Placement.HOST, [512, 512, 0])):
        store = make_store(placement=placement)
        store.accumulate("first", random_grads(UNITS[0]))
        store.finish_visit("first", is_last=True)
        sizes = [store.streamed_bytes("first", index, 1 << 20) for index in range(2)]
        assert [*sizes, store.streamed_bytes("second", 0, 1 << 20)] == expected
