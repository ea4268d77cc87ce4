"""The Triton kernels on a real card, against float32 and torch's own kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridkernels.flash_attention import causal_attention
from hybridkernels.flash_attention.reference import causal_attention_reference
from hybridkernels.provider import use_provider
from hybridkernels.triton_launch import cuda_backend
from numerics import assert_bitwise, assert_error_bound

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.usefixtures("triton_runs"),
]

FLOORS = {torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""About one rounding of a result near 1, for cases where the plain formula happens to be exact."""
# B, T, N, K, H
SHAPES = [
    *((2, 1000, 4, 2, head_dim) for head_dim in (64, 80, 96, 128)),
    (1, 1, 2, 2, 64),
    (1, 4096, 8, 1, 128),
    (2, 300, 3, 3, 20),
]


@pytest.fixture
def triton_runs() -> None:
    if cuda_backend() != "triton":
        pytest.skip("Triton cannot run kernels here")


def results(inputs: tuple[Tensor, ...], grad: Tensor, provider: str | None) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    if provider is None:
        out = causal_attention_reference(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))
    with use_provider(f"causal_attention/head{grad.shape[3]}", provider):
        out = causal_attention(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)


def random_inputs(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor]:
    batch, seq_len, num_heads, num_kv_heads, head_dim = shape
    heads = (num_heads, num_kv_heads, num_kv_heads)
    qkv = torch.randn(batch, seq_len, sum(heads), head_dim, device="cuda").to(dtype)
    return qkv.split(heads, dim=2), torch.randn(batch, seq_len, num_heads, head_dim, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_card_is_as_exact_as_the_plain_formula(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    inputs, grad = random_inputs(shape, dtype)
    actual, same_dtype = results(inputs, grad, "triton"), results(inputs, grad, None)
    exact = results(tuple(tensor.float() for tensor in inputs), grad, None)
    for name, *tensors in zip(("out", "dq", "dk", "dv"), actual, same_dtype, exact, strict=True):
        assert_error_bound(*tensors, floor=FLOORS[dtype], name=name)


@pytest.mark.parametrize("head_dim", [80, 128, 256])
@pytest.mark.parametrize(
    "options",
    [{"window": 300}, {"softcap": 5.0, "window": 700}, {"packed": True}, {"packed": True, "scale": 0.2}],
    ids=str,
)
def test_options_on_a_card_are_as_exact_as_the_plain_formula(options: dict[str, Any], head_dim: int) -> None:
    inputs, grad = random_inputs((2, 1000, 4, 2, head_dim), torch.bfloat16)
    ids_BT = torch.arange(1000, device="cuda").div(270, rounding_mode="floor").int().expand(2, -1)
    chosen = {name: value for name, value in options.items() if name != "packed"}
    chosen["document_ids_BT"] = ids_BT if "packed" in options else None
    found = [
        with_gradients(attention, inputs, grad, **chosen)
        for attention in (causal_attention, causal_attention_reference)
    ]
    exact = with_gradients(causal_attention_reference, tuple(tensor.float() for tensor in inputs), grad, **chosen)
    for name, *tensors in zip(("out", "dq", "dk", "dv"), *found, exact, strict=True):
        assert_error_bound(*tensors, floor=FLOORS[torch.bfloat16], name=name)


def with_gradients(
    attention: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = attention(*leaves, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))


@pytest.mark.parametrize("forward", ["triton", "sdpa_flash"])
def test_each_backward_takes_what_the_other_forward_saved(forward: str) -> None:
    backward = "sdpa_flash" if forward == "triton" else "triton"
    inputs, grad = random_inputs((2, 1000, 4, 2, 64), torch.bfloat16)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with use_provider("causal_attention/head64", forward):
        out = causal_attention(*leaves)
    with use_provider("causal_attention/head64", backward):
        grads = torch.autograd.grad(out, leaves, grad)
    same_dtype = results(inputs, grad, None)
    exact = results(tuple(tensor.float() for tensor in inputs), grad, None)
    for name, *tensors in zip(("dq", "dk", "dv"), grads, same_dtype[1:], exact[1:], strict=True):
        assert_error_bound(*tensors, floor=FLOORS[torch.bfloat16], name=name)


def test_results_do_not_vary_from_run_to_run() -> None:
    inputs, grad = random_inputs((2, 2000, 8, 2, 128), torch.bfloat16)
    first = results(inputs, grad, "triton")
    for _ in range(5):
        for tensor, again in zip(first, results(inputs, grad, "triton"), strict=True):
            assert_bitwise(again, tensor)
