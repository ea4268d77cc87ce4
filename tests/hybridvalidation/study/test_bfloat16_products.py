from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybridvalidation.study.bfloat16_products import fast_bfloat16

PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((7, 33), (33, 5))),
    "addmm": (torch.addmm, ((5,), (7, 33), (33, 5))),
    "bmm": (torch.bmm, ((3, 7, 33), (3, 33, 5))),
}


def factors(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_rounded_once(name: str) -> None:
    product, shapes = PRODUCTS[name]
    given = factors(shapes, torch.bfloat16)
    with fast_bfloat16():
        found = product(*given)
    exact = product(*(factor.double() for factor in given))
    assert found.dtype is torch.bfloat16
    # Half of bfloat16's last bit, 2^-8 relative, for the one rounding; 34 sums of terms below 16 in float32 before it.
    assert (found.double() - exact).abs().le(exact.abs() * 2**-8 + 34 * 16 * 2**-24).all()


@pytest.mark.parametrize("name", PRODUCTS)
def test_other_types_are_left_alone(name: str) -> None:
    product, shapes = PRODUCTS[name]
    given = factors(shapes, torch.float32)
    plain = product(*given)
    with fast_bfloat16():
        assert torch.equal(product(*given), plain)


def test_gradients_pass_and_all_is_as_before_afterwards() -> None:
    left, right = factors(((4, 8), (8, 3)), torch.bfloat16)
    left.requires_grad_()
    before = left.detach() @ right
    with fast_bfloat16():
        torch.mm(left, right).sum().backward()
    assert left.grad is not None
    assert torch.equal(left.grad, torch.ones(4, 3, dtype=torch.bfloat16) @ right.T)
    assert torch.equal(left.detach() @ right, before)
