"""Causal attention against its plain definition, and the op's fake against the op."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hybridkernels.flash_attention import backward_workspace_bytes, causal_attention, op, sdpa, unfused_attention
from hybridkernels.flash_attention.reference import causal_attention_reference
from hybridkernels.provider import use_provider
from numerics import assert_bitwise, assert_error_bound

OP = torch.ops.hybridkernels.causal_attention.default
BACKWARD_OP = torch.ops.hybridkernels.causal_attention_backward.default

# B, T, N, K, H
SHAPES = {
    "plain": (2, 32, 4, 4, 16),
    "odd": (1, 17, 3, 3, 12),
    "one-token": (2, 1, 2, 2, 8),
    "grouped": (2, 33, 6, 2, 16),
    "one-kv-head": (1, 40, 3, 1, 20),
    "long": (1, 200, 2, 1, 32),
}
FLOORS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""About one rounding of a result near 1, for cases where the plain formula happens to be exact."""


def random_qkv(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    batch, seq_len, num_heads, num_kv_heads, head_dim = shape
    return (
        torch.randn(batch, seq_len, num_heads, head_dim).to(dtype),
        torch.randn(batch, seq_len, num_kv_heads, head_dim).to(dtype),
        torch.randn(batch, seq_len, num_kv_heads, head_dim).to(dtype),
    )


def split_qkv(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return q, k and v as a fused projection gives them: slices of one tensor, rows 3 * N * H apart."""
    qkv = torch.randn(2, 19, 3 * 4 * 8).to(dtype)
    return tuple(part.view(2, 19, 4, 8) for part in qkv.split(32, dim=-1))


def with_gradients(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: tuple[Tensor, ...], weight: Tensor
) -> dict[str, Tensor]:
    """Return output and gradients of the weighted sum of the output, all in the dtype of the inputs."""
    leaves = [tensor.detach().clone(memory_format=torch.preserve_format) for tensor in inputs]
    for leaf in leaves:
        leaf.requires_grad_()
    out = attention(*leaves)
    grads = torch.autograd.grad(out, leaves, weight.to(out.dtype))
    return {"out": out.detach(), "dq": grads[0], "dk": grads[1], "dv": grads[2]}


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_output_and_gradients_are_as_exact_as_the_plain_formula(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    inputs = random_qkv(shape, dtype)
    weight = torch.randn(inputs[0].shape).to(dtype)
    actual = with_gradients(causal_attention, inputs, weight)
    same_dtype = with_gradients(causal_attention_reference, inputs, weight)
    exact = with_gradients(causal_attention_reference, tuple(tensor.double() for tensor in inputs), weight)
    for name, tensor in actual.items():
        assert_error_bound(tensor, same_dtype[name], exact[name], floor=FLOORS[dtype], name=name)


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_slices_of_a_fused_projection_give_what_contiguous_tensors_give(dtype: torch.dtype) -> None:
    sliced = split_qkv(dtype)
    dense = tuple(tensor.contiguous() for tensor in sliced)
    assert not sliced[0].is_contiguous()
    weight = torch.randn(dense[0].shape).to(dtype)
    strided = [tensor.detach().requires_grad_() for tensor in sliced]
    out = causal_attention(*strided)
    grads = torch.autograd.grad(out, strided, weight)
    actual = {"out": out.detach(), "dq": grads[0], "dk": grads[1], "dv": grads[2]}
    for name, expected in with_gradients(causal_attention, dense, weight).items():
        assert_bitwise(actual[name], expected, name)


def test_a_gradient_with_strides_of_its_own_is_accepted() -> None:
    inputs = tuple(tensor.requires_grad_() for tensor in random_qkv(SHAPES["odd"], torch.float32))
    out = causal_attention(*inputs)
    dense = torch.randn(out.shape)
    strided = dense.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    expected = torch.autograd.grad(out, inputs, dense, retain_graph=True)
    for actual, wanted in zip(torch.autograd.grad(out, inputs, strided), expected, strict=True):
        assert_bitwise(actual, wanted)


def test_no_token_sees_the_future() -> None:
    q, k, v = random_qkv(SHAPES["grouped"], torch.float32)
    before = causal_attention(q, k, v)
    k[:, 20:], v[:, 20:] = 9.0, -9.0
    after = causal_attention(q, k, v)
    assert_bitwise(after[:, :20], before[:, :20])
    assert not torch.equal(after[:, 20:], before[:, 20:])


def test_the_first_token_returns_its_own_value() -> None:
    q, k, v = random_qkv(SHAPES["one-kv-head"], torch.float32)
    # Softmax over one score is exactly 1.
    assert_bitwise(causal_attention(q, k, v)[:, 0], v[:, 0].expand(-1, 3, -1))


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_op_passes_torchs_own_checks(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    inputs = tuple(tensor.requires_grad_() for tensor in random_qkv(shape, dtype))
    torch.library.opcheck(OP, inputs, test_utils=checks)


def test_the_op_can_be_traced_with_its_gradient() -> None:
    inputs = tuple(tensor.requires_grad_() for tensor in random_qkv(SHAPES["grouped"], torch.float32))
    torch.library.opcheck(OP, inputs, test_utils="test_aot_dispatch_dynamic")


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_backward_op_passes_torchs_own_checks(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    inputs = random_qkv(shape, dtype)
    out, lse = OP(*inputs)
    arguments = (torch.randn_like(out), *inputs, out, lse)
    torch.library.opcheck(BACKWARD_OP, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_meta_returns_the_strides_of_the_cpu_for_slices_of_a_fused_projection(dtype: torch.dtype) -> None:
    sliced = split_qkv(dtype)
    torch.library.opcheck(OP, sliced, test_utils="test_faketensor")
    out, lse = OP(*sliced)
    torch.library.opcheck(BACKWARD_OP, (torch.randn_like(out), *sliced, out, lse), test_utils="test_faketensor")


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 64), (torch.bfloat16, 33)], ids=str)
def test_log_sum_exp_has_the_rows_of_the_cuda_kernel(dtype: torch.dtype, rows: int) -> None:
    # fp32 runs the memory-efficient kernel, which pads 33 tokens to 2 x 32 rows; flash does not pad.
    _, lse = OP(*random_qkv(SHAPES["grouped"], dtype))
    assert lse.shape == (2, 6, rows)
    assert lse.dtype == torch.float32


def test_flop_formulas_count_half_of_every_matmul() -> None:
    batch, seq_len, num_heads, _, head_dim = SHAPES["grouped"]
    inputs = tuple(tensor.requires_grad_() for tensor in random_qkv(SHAPES["grouped"], torch.float32))
    one_matmul = 2 * batch * num_heads * seq_len * seq_len * head_dim // 2
    with FlopCounterMode(display=False) as forward:
        out = causal_attention(*inputs)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == 2 * one_matmul  # scores, output
    assert backward.get_total_flops() == 5 * one_matmul  # scores again, dv, dp, dq, dk


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        # fp32: the product of out and its gradient, two row sums; k, v, dk and dv per query head.
        ("grouped", torch.float32, 4 * 2 * 33 * 6 * (16 + 2) + 4 * 4 * 2 * 33 * 6 * 16),
        # bf16: rows padded to 128, head dim to 32: dq in fp32 and a row sum; dk and dv per query head.
        ("grouped", torch.bfloat16, 4 * 2 * 6 * 128 * 32 + 4 * 2 * 6 * 128 + 2 * 2 * 2 * 33 * 6 * 16),
        ("plain", torch.bfloat16, 4 * 2 * 4 * 128 * 32 + 4 * 2 * 4 * 128),
    ],
)
def test_backward_scratch_follows_the_cuda_kernels(shape: str, dtype: torch.dtype, expected: int) -> None:
    q, k, _ = random_qkv(SHAPES[shape], dtype)
    assert backward_workspace_bytes(q, k) == expected


@pytest.mark.parametrize("attention", [causal_attention, unfused_attention])
@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        (((2, 5, 4, 8), (2, 5, 3, 8), (2, 5, 3, 8)), "N a multiple of K"),
        (((2, 5, 4, 8), (2, 6, 4, 8), (2, 6, 4, 8)), r"k \(2, 6, 4, 8\)"),
        (((2, 5, 4, 8), (2, 5, 4, 8), (2, 5, 4, 16)), r"v \(2, 5, 4, 16\)"),
        (((5, 4, 8), (5, 4, 8), (5, 4, 8)), r"q has shape \(5, 4, 8\)"),
    ],
    ids=["heads", "length", "values", "dimensions"],
)
def test_shapes_that_do_not_fit_are_refused(
    attention: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...], match: str
) -> None:
    with pytest.raises(ValueError, match=f"{attention.__name__}: .*{match}"):
        attention(*(torch.ones(shape) for shape in shapes))


@pytest.mark.parametrize("attention", [causal_attention, unfused_attention])
@pytest.mark.parametrize(
    "other", [torch.ones(1, 2, 1, 8).half(), torch.ones(1, 2, 1, 8, device="meta")], ids=["dtype", "device"]
)
def test_mixed_dtypes_and_devices_are_refused(attention: Callable[..., Tensor], other: Tensor) -> None:
    q = torch.ones(1, 2, 1, 8)
    with pytest.raises(ValueError, match=f"{attention.__name__}: .*need one floating point dtype and one device"):
        attention(q, q, other)
    with pytest.raises(ValueError, match="floating point"):
        attention(*[q.int()] * 3)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Stand in for a card of compute capability 9.0 on which Triton runs."""
    for module in (op, sdpa):
        monkeypatch.setattr(module, "compute_capability", lambda _: 90)
    monkeypatch.setattr(op, "cuda_backend", lambda: "triton")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "no such card")
    return monkeypatch


@pytest.mark.parametrize(
    ("dtype", "head_dim", "provider"),
    [
        (torch.bfloat16, 64, "sdpa_flash"),
        (torch.float16, 256, "sdpa_flash"),
        (torch.bfloat16, 20, "triton"),
        (torch.float32, 64, "sdpa_efficient"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("card")
def test_triton_runs_where_torchs_flash_kernel_does_not(dtype: torch.dtype, head_dim: int, provider: str) -> None:
    assert op._provider(torch.empty(1, 2, 1, head_dim, dtype=dtype)) == provider


@pytest.mark.usefixtures("card")
def test_a_provider_can_be_forced_by_head_dim() -> None:
    q = torch.empty(1, 2, 1, 64, dtype=torch.bfloat16)
    with use_provider("causal_attention/head64", "triton"):
        assert op._provider(q) == "triton"
        assert op._provider(torch.empty(1, 2, 1, 80, dtype=torch.bfloat16)) == "sdpa_flash"
        with pytest.raises(ValueError, match="'triton' cannot run here; allowed: sdpa_efficient"):
            op._provider(q.float())


def test_triton_is_taken_on_a_build_without_flash_and_nothing_on_one_without_either(card: pytest.MonkeyPatch) -> None:
    q = torch.empty(1, 2, 1, 64, dtype=torch.bfloat16)
    card.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert op._provider(q) == "triton"
    card.setattr(op, "cuda_backend", lambda: "torch")
    with pytest.raises(ValueError, match=r"no kernel for torch\.bfloat16 with head dim 64 on this card.*use float32"):
        op._provider(q)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float64, 64), (torch.bfloat16, 264), (torch.float16, 132)])
@pytest.mark.usefixtures("card")
def test_what_no_kernel_takes_is_refused(dtype: torch.dtype, head_dim: int) -> None:
    with pytest.raises(ValueError, match="causal_attention: no kernel for"):
        op._provider(torch.empty(1, 2, 1, head_dim, dtype=dtype))
