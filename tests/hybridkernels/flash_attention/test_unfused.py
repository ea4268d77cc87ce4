"""Attention without a fused kernel: the plain definition, in ops that the dispatcher sees, with the memory it takes."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridkernels.flash_attention import causal_attention, unfused_attention
from hybridkernels.flash_attention.reference import causal_attention_reference
from numerics import assert_bitwise, assert_error_bound

# B, T, N, K, H
SHAPES = {"plain": (2, 32, 4, 4, 16), "one-token": (2, 1, 2, 2, 8), "grouped": (2, 33, 6, 2, 16)}
FLOORS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""About one rounding of a result near 1, for cases where the plain formula happens to be exact."""


def random_qkv(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    batch, seq_len, num_heads, num_kv_heads, head_dim = shape
    q, k, v = (
        torch.randn(batch, seq_len, heads, head_dim, device=device).to(dtype).requires_grad_()
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    return q, k, v


class OpNames(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_output_and_gradients_are_as_exact_as_the_definition(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    inputs = random_qkv(shape, dtype)
    exact_inputs = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
    weight = torch.randn(inputs[0].shape).to(dtype)
    results = {}
    for name, attention, leaves in (
        ("actual", unfused_attention, inputs),
        ("same dtype", causal_attention_reference, inputs),
        ("exact", causal_attention_reference, exact_inputs),
    ):
        out = attention(*leaves)
        results[name] = (out.detach(), *torch.autograd.grad(out, leaves, weight.to(out.dtype)))
    assert results["actual"][0].is_contiguous()
    for name, *tensors in zip(("out", "dq", "dk", "dv"), *results.values(), strict=True):
        assert_error_bound(*tensors, floor=FLOORS[dtype], name=name)


def test_gradients_are_those_of_the_formula() -> None:
    inputs = random_qkv((1, 5, 4, 2, 3), torch.float64)
    assert torch.autograd.gradcheck(unfused_attention, inputs)


def test_no_token_sees_the_future() -> None:
    q, k, v = (tensor.detach() for tensor in random_qkv(SHAPES["grouped"], torch.bfloat16))
    before = unfused_attention(q, k, v)
    k[:, 20:], v[:, 20:] = 9.0, torch.nan
    after = unfused_attention(q, k, torch.where(v.isnan(), -9.0, v))
    assert_bitwise(after[:, :20], before[:, :20])
    assert not torch.equal(after[:, 20:], before[:, 20:])


def test_the_dispatcher_sees_plain_ops_of_torch_alone() -> None:
    with OpNames() as seen:
        unfused_attention(*random_qkv(SHAPES["grouped"], torch.bfloat16)).sum().backward()
    assert {name.split("::")[0] for name in seen.names} == {"aten"}
    assert not [name for name in seen.names if "attention" in name]
    assert seen.names.count("aten::bmm") == 2 + 4  # scores and output; two gradients of each


def saved_score_bytes(attention, dtype: torch.dtype) -> int:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Return the bytes of the (B, N, T, T) storages that wait for the backward pass."""
    batch, seq_len, num_heads, num_kv_heads, head_dim = 2, 40, 4, 2, 16
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    inputs = random_qkv((batch, seq_len, num_heads, num_kv_heads, head_dim), dtype)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        attention(*inputs)
    return sum(tensor.nbytes for tensor in saved.values() if tensor.numel() == batch * num_heads * seq_len**2)


@pytest.mark.parametrize(("dtype", "bytes_per_weight"), [(torch.float32, 4), (torch.bfloat16, 6)], ids=str)
def test_weights_are_kept_in_fp32_and_rounded(dtype: torch.dtype, bytes_per_weight: int) -> None:
    assert saved_score_bytes(unfused_attention, dtype) == 2 * 4 * 40 * 40 * bytes_per_weight
    assert saved_score_bytes(causal_attention, dtype) == 0


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_meta_tensors_give_the_ops_and_shapes_of_real_ones(dtype: torch.dtype) -> None:
    results = []
    for device in ("cpu", "meta"):
        inputs = random_qkv(SHAPES["grouped"], dtype, device)
        with OpNames() as seen:
            out = unfused_attention(*inputs)
            grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
        results.append(([(tensor.shape, tensor.dtype, tensor.stride()) for tensor in (out, *grads)], seen.names))
    assert results[0] == results[1]
