from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridkernels.flash_attention.op import causal_attention
from hybridkernels.flash_attention.reference import causal_attention_reference
from hybridvalidation.study import bfloat16_products
from hybridvalidation.study.bfloat16_products import fast_bfloat16, product_unit

PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((7, 33), (33, 5))),
    "addmm": (torch.addmm, ((5,), (7, 33), (33, 5))),
    "bmm": (torch.bmm, ((3, 7, 33), (3, 33, 5))),
}


@pytest.fixture(params=[False, True], ids=["without instructions", "with instructions"], autouse=True)
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed with instructions that are not there is torch's own affair: slow, and as exact."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: request.param)


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
def test_products_are_replaced_where_the_processor_has_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    product, shapes = PRODUCTS[name]
    calls: list[str] = []
    own = getattr(bfloat16_products, f"_{name}")
    monkeypatch.setattr(
        bfloat16_products, f"_{name}", lambda *given, **options: (calls.append(name), own(*given, **options))[1]
    )
    with fast_bfloat16():
        product(*factors(shapes, torch.bfloat16))
    assert calls == ([] if product_unit() == "processor" else [name])


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


def attention_grads(attention: Callable[..., Tensor], given: list[Tensor], grad_BTNH: Tensor) -> list[Tensor]:
    leaves = [value.detach().requires_grad_() for value in given]
    return list(torch.autograd.grad(attention(*leaves), leaves, grad_BTNH.to(given[0].dtype)))


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", [(3, 33, 2, 16), (1, 64, 4, 8)])
def test_attentions_gradients_are_as_exact_as_torchs(shape: tuple[int, ...]) -> None:
    *given, grad_BTNH = factors((shape,) * 4, torch.bfloat16)
    exact = attention_grads(causal_attention_reference, [value.double() for value in given], grad_BTNH)
    torchs = attention_grads(causal_attention, given, grad_BTNH)
    with fast_bfloat16():
        ours = attention_grads(causal_attention, given, grad_BTNH)
    assert any(not torch.equal(own, other) for own, other in zip(ours, torchs, strict=True))  # it rounds more
    for own, other, true in zip(ours, torchs, exact, strict=True):
        assert relative_error(own, true) <= 2 * relative_error(other, true)  # as every kernel; 1.4 in 60 draws


@pytest.mark.parametrize(("dtype", "key_heads"), [(torch.float32, 4), (torch.float32, 2), (torch.bfloat16, 2)])
def test_attention_of_other_types_and_of_shared_heads_is_left_alone(dtype: torch.dtype, key_heads: int) -> None:
    given = factors(((2, 16, 4, 8), (2, 16, key_heads, 8), (2, 16, key_heads, 8)), dtype)
    grad_BTNH = torch.randn(2, 16, 4, 8)
    plain = attention_grads(causal_attention, given, grad_BTNH)
    with fast_bfloat16():
        found = attention_grads(causal_attention, given, grad_BTNH)
    assert all(torch.equal(own, other) for own, other in zip(found, plain, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": False}, {"is_causal": True, "scale": 0.5},
        {"attn_mask": torch.ones(16, 16).tril().log()},
    ],
    ids=["all", "scaled", "masked"],
)  # fmt: skip
def test_other_attention_is_left_alone(options: dict[str, Any]) -> None:
    *given, grad_BNTH = factors(((2, 4, 16, 8),) * 4, torch.bfloat16)
    options = {name: v.bfloat16() if isinstance(v, Tensor) else v for name, v in options.items()}

    def attention(*given: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*given, **options)

    plain = attention_grads(attention, given, grad_BNTH)
    with fast_bfloat16():
        found = attention_grads(attention, given, grad_BNTH)
    assert all(torch.equal(own, other) for own, other in zip(found, plain, strict=True))
