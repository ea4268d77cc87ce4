"""The owner of gradients: sums in order, one conversion at the end, gone when taken."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from hybridtrain.memory.grad_store import GradStore
from hybridtrain.models.block_model import Unit
from hybridtrain.plan.tensor_class import TensorClass
from hybridtrain.profiler.observer import NullObserver
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
    sum_dtype: torch.dtype = torch.float32,
    kept_dtype: torch.dtype = torch.float32,
    observer: NullObserver | None = None,
) -> GradStore:
    return GradStore(UNITS, sum_dtype=sum_dtype, kept_dtype=kept_dtype, observer=observer or NullObserver())


def random_grads(unit: Unit, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(parameter.shape).to(dtype) for parameter in unit.tensors]


def test_the_first_gradients_are_kept_without_a_copy() -> None:
    store = make_store()
    grads = random_grads(UNITS[0])
    store.accumulate("first", grads)
    store.seal("first")
    assert all(kept is given for kept, given in zip(store.take("first"), grads, strict=True))


def test_later_gradients_are_added_in_order() -> None:
    store = make_store()
    rounds = [random_grads(UNITS[0]) for _ in range(3)]
    expected = [(a + b) + c for a, b, c in zip(*rounds, strict=True)]
    for grads in rounds:
        store.accumulate("first", grads)
    for actual, wanted in zip(store.take("first"), expected, strict=True):
        assert_bitwise(actual, wanted)


def test_bfloat16_gradients_are_summed_in_float32_and_rounded_once() -> None:
    store = make_store(torch.float32, torch.bfloat16)
    # 256 + 1 is not a bfloat16: summed in bfloat16 the ones would be lost.
    rounds = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0, 1.0)]
    for grad in rounds:
        store.accumulate("second", [grad])
    store.seal("second")
    (kept,) = store.take("second")
    assert_bitwise(kept, torch.tensor([260.0], dtype=torch.bfloat16), "sum")


def test_a_bfloat16_accumulator_rounds_after_every_micro_batch() -> None:
    store = make_store(torch.bfloat16, torch.bfloat16)
    for value in (256.0, 1.0, 1.0):
        store.accumulate("second", [torch.tensor([value])])
    assert_bitwise(store.take("second")[0], torch.tensor([256.0], dtype=torch.bfloat16), "sum")


def test_the_norm_is_that_of_all_gradients_together() -> None:
    store = make_store()
    every = []
    for unit in UNITS:
        grads = random_grads(unit)
        every += grads
        store.accumulate(unit.name, grads)
    assert_bitwise(store.norm(), nn.utils.get_total_norm(every), "norm")


def test_the_norm_of_bfloat16_gradients_is_computed_in_float32() -> None:
    store = make_store(torch.bfloat16, torch.bfloat16)
    store.accumulate("first", [torch.full((3, 2), 1.0), torch.full((5,), 1.0)])
    store.accumulate("second", [torch.full((4,), 16.0)])
    # sqrt(11 + 1024) = 32.17: bfloat16 would say 32 or 32.25. One rounding of float32.
    torch.testing.assert_close(store.norm(), torch.tensor(1035.0).sqrt(), rtol=2e-7, atol=0)


def test_a_norm_needs_every_unit() -> None:
    store = make_store()
    store.accumulate("first", random_grads(UNITS[0]))
    with pytest.raises(KeyError, match="second"):
        store.norm()


def test_scaling_reaches_every_gradient() -> None:
    store = make_store()
    grads = {unit.name: random_grads(unit) for unit in UNITS}
    expected = {name: [grad * 0.5 for grad in listed] for name, listed in grads.items()}
    for name, listed in grads.items():
        store.accumulate(name, listed)
    store.scale(torch.tensor(0.5))
    for name, listed in expected.items():
        for actual, wanted in zip(store.take(name), listed, strict=True):
            assert_bitwise(actual, wanted, name)


def test_gradients_can_be_taken_once() -> None:
    store = make_store()
    store.accumulate("first", random_grads(UNITS[0]))
    store.take("first")
    with pytest.raises(KeyError, match="first"):
        store.take("first")


def test_nothing_is_left_after_a_drop() -> None:
    store = make_store()
    store.accumulate("first", random_grads(UNITS[0]))
    store.drop()
    with pytest.raises(KeyError, match="first"):
        store.take("first")


def test_a_missing_gradient_is_an_error() -> None:
    store = make_store()
    store.accumulate("first", random_grads(UNITS[0]))
    with pytest.raises(ValueError, match="zip"):
        store.accumulate("first", random_grads(UNITS[0])[:1])


def test_every_tensor_it_makes_is_named_a_gradient() -> None:
    observer = Labels()
    store = make_store(torch.float32, torch.bfloat16, observer)
    store.accumulate("second", random_grads(UNITS[1], torch.bfloat16))
    store.seal("second")
    assert observer.seen == [
        (torch.float32, TensorClass.GRAD, "second"),
        (torch.bfloat16, TensorClass.GRAD, "second"),
    ]
