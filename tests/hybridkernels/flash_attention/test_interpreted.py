"""The Triton kernels in Triton's interpreter: against float64, and together with torch's kernels for the CPU.

B batch, T sequence, N query heads, K key/value heads, H head dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridkernels.flash_attention import causal_attention, op, triton_kernel
from hybridkernels.flash_attention.options import Options
from hybridkernels.flash_attention.reference import causal_attention_reference
from hybridkernels.flash_attention.tiles import LaunchConfig, head_widths
from hybridkernels.flash_attention.triton_kernel import causal_attention_backward_triton, causal_attention_triton
from numerics import assert_bitwise, assert_error_bound

OP = torch.ops.hybridkernels.causal_attention.default
BACKWARD_OP = torch.ops.hybridkernels.causal_attention_backward.default
USUAL = Options()
NAMES = ("out", "dq", "dk", "dv")
FLOORS = {torch.float32: 1e-6, torch.float16: 1e-3}
"""About one rounding of a result near 1, for cases where the plain formula happens to be exact."""
SMALL = LaunchConfig(block_m=32, block_n=16, num_warps=4, num_stages=2)
"""Several blocks of either kind, left of the diagonal and on it, within a short sequence."""

# B, T, N, K, H
SHAPES = {
    "one-token": (2, 1, 2, 2, 64),
    "one-block": (1, 32, 2, 1, 64),
    "tail": (2, 39, 2, 2, 16),
    "tail-behind-full-blocks": (1, 101, 1, 1, 16),
    "grouped": (1, 70, 4, 2, 16),
    "one-kv-head": (1, 65, 3, 1, 32),
    "head-80": (1, 67, 1, 1, 80),
    "head-96": (1, 50, 1, 1, 96),
    "head-128": (1, 40, 1, 1, 128),
    "ragged-head": (1, 45, 1, 1, 20),
    "ragged-wide-head": (1, 45, 1, 1, 100),
}
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real_blocks" not in request.fixturenames:
        monkeypatch.setattr(triton_kernel, "launch_config", lambda *_: SMALL)


@pytest.fixture
def real_blocks() -> None:
    """Leave the block sizes of a card."""


def make_options(
    lengths: tuple[int, ...] = (), window: int = 0, softcap: float = 0.0, scale: float | None = None
) -> Options:
    """Return options with documents of these lengths in the first row, in the second the other way round."""
    ids_BT = None
    if lengths:
        rows = [torch.arange(len(part)).repeat_interleave(torch.tensor(part)) for part in (lengths, lengths[::-1])]
        ids_BT = torch.stack(rows).int()
    return Options(scale=scale, softcap=softcap, window=window, ids_BT=ids_BT)


def random_inputs(shape: tuple[int, int, int, int, int], dtype: torch.dtype, scale: float = 1.0) -> Inputs:
    """Return q, k, v and the gradient of the output."""
    batch, seq_len, num_heads, num_kv_heads, head_dim = shape
    q, k, v, grad = (
        (torch.randn(batch, seq_len, heads, head_dim) * scale).to(dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    )
    return q, k, v, grad


def ours(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, options: Options = USUAL) -> dict[str, Tensor]:
    out, lse = causal_attention_triton(q, k, v, options)
    grads = causal_attention_backward_triton(grad, q, k, v, out, lse, options)
    return dict(zip(NAMES, (out, *grads), strict=True))


def results(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> dict[str, Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    out = attention(*leaves)
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, leaves, grad)), strict=True))


def assert_as_exact_as_torch(inputs: Inputs, options: Options = USUAL) -> None:
    keywords = {"scale": options.scale, "softcap": options.softcap, "window": options.window}
    formula = partial(causal_attention_reference, **keywords, document_ids_BT=options.ids_BT)
    same_dtype = results(formula, *inputs)
    exact = results(formula, *(tensor.double() for tensor in inputs))
    # tanh is of two exponentials, exact to some roundings of 1: the cap multiplies them. Of a single key the score's
    # gradient is the difference of one sum in two orders, where the plain formula is exactly 0.
    factor = max(4.0 if options.window == 1 else 1.0, options.softcap)
    for name, tensor in ours(*inputs, options).items():
        assert tensor.is_contiguous(), name
        assert_error_bound(tensor, same_dtype[name], exact[name], floor=factor * FLOORS[tensor.dtype], name=name)


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_results_are_as_exact_as_the_plain_formula(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    inputs = random_inputs(shape, dtype)
    assert_as_exact_as_torch(inputs)


OPTIONS = {
    "scale": {"scale": 0.3},
    "cap": {"softcap": 2.0},
    "window-1": {"window": 1},
    "window-5": {"window": 5},
    "window-40": {"window": 40},
    "documents": {"lengths": (1, 37, 2, 1, 29)},
    "one-document": {"lengths": (70,)},
    "everything": {"lengths": (10, 40, 20), "window": 17, "softcap": 3.0, "scale": 0.4},
}


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("chosen", OPTIONS.values(), ids=OPTIONS)
def test_options_are_as_exact_as_the_plain_formula(chosen: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = random_inputs((2, 70, 1, 1, 16), dtype)
    assert_as_exact_as_torch(inputs, make_options(**chosen))


@pytest.mark.parametrize("head_dim", [80, 256])
def test_wide_heads_take_options_too(head_dim: int) -> None:
    assert_as_exact_as_torch(random_inputs((2, 70, 2, 1, head_dim), torch.float16), make_options((30, 40), 25, 5.0))


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize(("block_m", "block_n"), [(16, 64), (32, 32), (64, 16)])
def test_dk_and_dv_of_documents_do_not_depend_on_the_shape_of_tiles(
    block_m: int, block_n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = LaunchConfig(block_m, block_n, num_warps=4, num_stages=2)
    monkeypatch.setattr(triton_kernel, "launch_config", lambda _, kernel, __: tiles if kernel == "dkdv" else SMALL)
    # Long enough for blocks of queries that need no mask, in either order of the documents.
    assert_as_exact_as_torch(random_inputs((2, 150, 1, 1, 16), torch.float32), make_options((130, 15, 5), 100))


@pytest.mark.usefixtures("real_blocks")
@pytest.mark.parametrize("seq_len", [150, 256])
def test_results_are_as_exact_with_the_blocks_of_a_card(seq_len: int) -> None:
    inputs = random_inputs((1, seq_len, 2, 1, 80), torch.float16)
    assert_as_exact_as_torch(inputs)


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize(("block_m", "block_n"), [(16, 64), (32, 32), (64, 16)])
def test_dk_and_dv_do_not_depend_on_the_shape_of_tiles(
    block_m: int, block_n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = random_inputs((1, 140, 2, 1, 16), torch.float32)
    tiles = LaunchConfig(block_m, block_n, num_warps=4, num_stages=2)
    monkeypatch.setattr(triton_kernel, "launch_config", lambda _, kernel, __: tiles if kernel == "dkdv" else SMALL)
    assert_as_exact_as_torch(inputs)


@pytest.mark.parametrize("seq_len", [1, 45, 64])
def test_either_backward_takes_the_log_sum_exp_of_the_other_forward(seq_len: int) -> None:
    q, k, v, grad = random_inputs((1, seq_len, 4, 2, 32), torch.float32)
    (out, lse), (cpu_out, cpu_lse) = causal_attention_triton(q, k, v), OP(q, k, v)
    assert (lse.shape, lse.dtype, lse.stride()) == (cpu_lse.shape, cpu_lse.dtype, cpu_lse.stride())
    # fp32, sums of up to 64 terms in two orders; the rows of padding are 0 in both
    torch.testing.assert_close(lse, cpu_lse, rtol=1e-5, atol=1e-5)
    wanted = BACKWARD_OP(grad, q, k, v, cpu_out, cpu_lse)
    torch.testing.assert_close(causal_attention_backward_triton(grad, q, k, v, cpu_out, cpu_lse), wanted)
    torch.testing.assert_close(BACKWARD_OP(grad, q, k, v, out, lse), wanted)


def test_slices_of_a_fused_projection_give_what_contiguous_tensors_give() -> None:
    qkv = torch.randn(2, 34, 4 * 16).half()
    sliced = [part.view(2, 34, -1, 16) for part in qkv.split((32, 16, 16), dim=-1)]
    grad = torch.randn(2, 2, 34, 16).half().transpose(1, 2)
    transposed = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in sliced]
    expected = ours(*(tensor.contiguous() for tensor in (*sliced, grad)))
    for q, k, v in (sliced, transposed):
        assert not any(tensor.is_contiguous() for tensor in (q, grad))
        for name, tensor in ours(q, k, v, grad).items():
            assert_bitwise(tensor, expected[name], name)


def test_what_lies_between_heads_is_not_read() -> None:
    inputs = random_inputs((1, 70, 2, 1, 20), torch.float32)
    expected = ours(*inputs)
    apart = [torch.nn.functional.pad(tensor, (0, 12), value=torch.nan)[..., :20] for tensor in inputs]
    for name, tensor in ours(*apart).items():
        assert_bitwise(tensor, expected[name], name)


def test_an_expanded_gradient_and_rows_that_are_not_dense_are_taken() -> None:
    q, k, v, _ = random_inputs((1, 20, 2, 1, 16), torch.float32)
    ones = torch.ones(()).expand(q.shape)
    wide = [torch.stack((tensor, tensor), -1).flatten(-2)[..., ::2] for tensor in (q, k, v)]
    assert wide[0].stride(-1) == 2
    for name, tensor in ours(*wide, ones).items():  # type: ignore[misc]
        assert_bitwise(tensor, ours(q, k, v, ones.contiguous())[name], name)


def test_tensors_with_rows_too_far_apart_for_32_bit_offsets_are_copied() -> None:
    sizes, stride = (1, 3, 2, 16), triton_kernel._LARGEST_STRIDE
    far, near = (torch.empty_strided(sizes, (1, step, 16, 1), device="meta") for step in (stride, stride - 1))
    assert triton_kernel._with_dense_rows(far).is_contiguous()
    assert triton_kernel._with_dense_rows(near) is near


def test_heads_worked_on_one_after_another_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs((3, 34, 2, 1, 16), torch.float32)
    expected = ours(*inputs)
    # 2 pairs of (T, H) fit: forward and dq take 4 query heads of 6, dkdv one key/value head of 3
    monkeypatch.setattr(triton_kernel, "_CACHED_BYTES", 2 * 2 * 34 * 16 * 4)
    for name, tensor in ours(*inputs).items():
        assert_bitwise(tensor, expected[name], name)


@pytest.mark.parametrize("shape", [(0, 5, 2, 1, 16), (2, 0, 2, 1, 16)], ids=str)
def test_empty_inputs_give_empty_results(shape: tuple[int, int, int, int, int]) -> None:
    q, k, v, grad = random_inputs(shape, torch.float16)
    for tensor, like in zip(ours(q, k, v, grad).values(), (q, q, k, v), strict=True):
        assert (tensor.shape, tensor.dtype) == (like.shape, like.dtype)


@pytest.mark.parametrize("scale", [30.0, 1e-4])
def test_large_and_tiny_scores_are_as_exact_as_in_torchs_flash_kernel(scale: float) -> None:
    # At 30 scores reach thousands: exp would overflow without its running maximum, and the log-sum-exp's own rounding
    # is felt in the gradients, which the plain formula does not know.
    inputs = random_inputs((1, 70, 2, 1, 32), torch.float32, scale)
    flash = results(causal_attention, *inputs)
    exact = results(causal_attention_reference, *(tensor.double() for tensor in inputs))
    for name, tensor in ours(*inputs).items():
        assert tensor.isfinite().all(), name
        floor = 1e-6 * exact[name].abs().max().item()  # one rounding of fp32, and a few in front of it
        assert_error_bound(tensor, flash[name], exact[name], floor=floor, name=name)


def test_no_token_sees_the_future() -> None:
    q, k, v, _ = random_inputs((1, 70, 2, 1, 16), torch.float32)
    before, _ = causal_attention_triton(q, k, v)
    k[:, 40:], v[:, 40:] = 9.0, -9.0
    after, _ = causal_attention_triton(q, k, v)
    assert_bitwise(after[:, :40], before[:, :40])
    assert (after[:, 40:] != before[:, 40:]).any()


def test_later_queries_alone_reach_a_key() -> None:
    q, k, v, grad = random_inputs((1, 70, 2, 1, 16), torch.float32)
    grad[:, 40:] = 0.0
    results = ours(q, k, v, grad)
    for name in ("dq", "dk", "dv"):
        assert not results[name][:, 40:].any(), name
        assert results[name][:, :40].any(), name


@pytest.mark.parametrize("head_dim", [20, 80])
def test_nothing_is_written_outside_of_the_results(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs((1, 37, 2, 1, head_dim), torch.float32)
    guard, margin, made = 7.0, 64 * 80, []
    new_empty = Tensor.new_empty

    def guarded(like: Tensor, *shape: Any, **options: Any) -> Tensor:
        if "device" in options:  # the interpreter's own copies
            return new_empty(like, *shape, **options)
        empty = new_empty(like, *shape, **options)
        buffer = torch.full((empty.numel() + 2 * margin,), guard, dtype=empty.dtype)
        made.append(buffer)
        return buffer[margin:-margin].view(empty.shape)

    monkeypatch.setattr(Tensor, "new_empty", guarded)
    ours(*inputs)
    assert len(made) == 5  # out, dq, dk, dv, delta; the padded log-sum-exp starts as zeros
    for buffer in made:
        assert (buffer[:margin] == guard).all()
        assert (buffer[-margin:] == guard).all()
        assert (buffer[margin:-margin] != guard).all()


@pytest.mark.parametrize(
    ("head_dim", "widths"),
    [(8, (16, 0)), (20, (32, 0)), (64, (64, 0)), (80, (64, 16)), (96, (64, 32)), (100, (64, 64)), (128, (128, 0))],
)
def test_heads_are_cut_into_powers_of_two(head_dim: int, widths: tuple[int, int]) -> None:
    assert head_widths(head_dim) == widths


def test_the_op_for_cuda_hands_over_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_provider", lambda *_: "triton")
    q, k, v, grad = random_inputs((1, 20, 2, 1, 16), torch.float16)
    out, lse = op._cuda(q, k, v)
    grads = op._cuda_backward(grad, q, k, v, out, lse)
    for tensor, expected in zip((out, *grads), ours(q, k, v, grad).values(), strict=True):
        assert_bitwise(tensor, expected)
