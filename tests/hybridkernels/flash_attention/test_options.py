"""Causal attention with a scale, a soft cap, windows and documents, fused and not, against the plain definition."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hybridkernels.flash_attention import (
    causal_attention,
    masked_backward_workspace_bytes,
    masked_workspace_bytes,
    op,
    sdpa,
    tiled,
    unfused_attention,
)
from hybridkernels.flash_attention.options import Options
from hybridkernels.flash_attention.reference import causal_attention_reference
from numerics import assert_bitwise, assert_error_bound

OP = torch.ops.hybridkernels.masked_attention.default
BACKWARD_OP = torch.ops.hybridkernels.masked_attention_backward.default
FLOORS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""About one rounding of a result near 1, in fp32 a few, for cases where the plain formula happens to be exact."""
SHAPES = ((2, 33, 4, 4, 16), (2, 33, 4, 2, 12))
"""B, T, N, K, H."""
IDS = torch.tensor([[3] * 5 + [4] * 10 + [9] * 18, [0] * 33], dtype=torch.int32)
OPTIONS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.3},
    "cap": {"softcap": 2.0},
    "window-1": {"window": 1},
    "window-7": {"window": 7},
    "documents": {"document_ids_BT": IDS},
    "everything": {"scale": 0.4, "softcap": 3.0, "window": 6, "document_ids_BT": IDS.long()},
}
ATTENTIONS = pytest.mark.parametrize("attention", [causal_attention, unfused_attention])
CHOSEN = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiled._SCORES, "cpu", 4 * 33 * 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_card_below_8_0_attends_in_tiles(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    for module in (op, sdpa):
        monkeypatch.setattr(module, "compute_capability", lambda _device: 75)
    monkeypatch.setattr(op, "chosen_provider", lambda _op, available, _device: available[0])
    q, k, v = random_qkv(shape, dtype)
    out, lse = op._cuda(q, k, v)
    fake_out, fake_lse = op._fake(*(tensor.to("meta") for tensor in (q, k, v)))
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (
        fake_out.shape,
        fake_out.dtype,
        fake_lse.shape,
        fake_lse.dtype,
    )
    grad = torch.randn_like(out)
    wanted = with_gradients(causal_attention, (q, k, v), grad)
    found = dict(zip(wanted, (out, *op._cuda_backward(grad, q, k, v, out, lse)), strict=True))
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0.05, atol=0.05)  # some roundings of 8 bits


def random_qkv(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    batch, seq_len, num_heads, num_kv_heads, head_dim = shape
    q, k, v = (
        torch.randn(batch, seq_len, heads, head_dim).to(dtype) for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    return q, k, v


def with_gradients(attention: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = attention(*leaves)
    return dict(
        zip(
            ("out", "dq", "dk", "dv"),
            (out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))),
            strict=True,
        )
    )


@ATTENTIONS
@CHOSEN
@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_as_exact_as_the_plain_formula(
    attention: Callable[..., Tensor],
    options: dict[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int],
) -> None:
    inputs = random_qkv(shape, dtype)
    grad = torch.randn(inputs[0].shape).to(dtype)
    formula = partial(causal_attention_reference, **options)
    same_dtype = with_gradients(formula, inputs, grad)
    exact = with_gradients(formula, tuple(tensor.double() for tensor in inputs), grad)
    for name, tensor in with_gradients(partial(attention, **options), inputs, grad).items():
        assert tensor.is_contiguous() or attention is unfused_attention, name
        assert_error_bound(tensor, same_dtype[name], exact[name], floor=FLOORS[dtype], name=name)


@CHOSEN
def test_gradients_are_those_of_the_formula(options: dict[str, Any]) -> None:
    inputs = random_qkv((2, 33, 2, 1, 3), torch.float64)
    grad = torch.randn(inputs[0].shape, dtype=torch.float64)
    expected = with_gradients(partial(causal_attention_reference, **options), inputs, grad)
    for name, tensor in with_gradients(partial(causal_attention, **options), inputs, grad).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-12, msg=name)


def test_a_window_counts_as_in_transformers() -> None:
    """``sliding_window_overlay`` of masking_utils.py: a key is seen where kv_idx > q_idx - sliding_window."""
    q, k, v = random_qkv((1, 33, 1, 1, 8), torch.float32)
    v[:, :20] = 0.0
    v[:, 20] = 1.0
    v[:, 21:] = 0.0
    seen = causal_attention(q, k, v, window=4)[0, :, 0, 0] > 0
    assert seen.nonzero()[:, 0].tolist() == [20, 21, 22, 23]


@ATTENTIONS
def test_documents_in_one_row_are_what_they_are_in_rows_of_their_own(attention: Callable[..., Tensor]) -> None:
    q, k, v = random_qkv((1, 33, 4, 2, 8), torch.float32)
    packed = attention(q, k, v, document_ids_BT=IDS[:1])
    for part in (slice(0, 5), slice(5, 15), slice(15, 33)):
        alone = attention(q[:, part], k[:, part], v[:, part])
        # fp32, sums of up to 18 terms in two orders.
        torch.testing.assert_close(packed[:, part], alone, rtol=1e-5, atol=1e-6)


def test_options_that_say_nothing_leave_the_usual_op(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = random_qkv((1, 33, 1, 1, 16), torch.float32)
    expected = causal_attention(q, k, v)
    monkeypatch.setattr(op, "_masked", None)
    assert_bitwise(causal_attention(q, k, v, scale=0.25, window=33), expected)


@CHOSEN
def test_the_ops_pass_torchs_own_checks(options: dict[str, Any]) -> None:
    q, k, v = random_qkv(SHAPES[1], torch.float32)
    names = ("document_ids_BT", "scale", "softcap", "window")
    defaults = (None, 0.25, 0.0, 0)
    chosen = [options.get(name, default) for name, default in zip(names, defaults, strict=True)]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    torch.library.opcheck(OP, (*leaves, *chosen), test_utils=checks)
    out, lse = OP(q, k, v, *chosen)
    assert lse.shape == (2, 4, 64)  # rows of the memory-efficient kernel, as of the usual op
    arguments = (torch.randn_like(out), q, k, v, out, lse, *chosen)
    torch.library.opcheck(BACKWARD_OP, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(("window", "pairs"), [(0, 33 * 33 / 2), (8, (33 * 33 - 25 * 25) / 2)])
def test_flops_are_counted_within_the_window(window: int, pairs: float) -> None:
    inputs = tuple(tensor.requires_grad_() for tensor in random_qkv(SHAPES[0], torch.float32))
    one_matmul = 2 * 2 * 4 * 16 * pairs
    with FlopCounterMode(display=False) as forward:
        out = causal_attention(*inputs, window=window, softcap=5.0)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == 2 * one_matmul
    assert backward.get_total_flops() == 5 * one_matmul


def test_no_more_than_a_tile_of_scores_exists_and_nothing_of_them_is_saved() -> None:
    inputs = tuple(tensor.requires_grad_() for tensor in random_qkv((1, 33, 4, 4, 2), torch.float32))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda kept: kept):
        causal_attention(*inputs, window=3)
    assert max(tensor.numel() for tensor in saved) < 33 * 33
    tiles = list(tiled._tiles(IDS[1], 4))
    assert max(hidden.numel() for _, _, hidden in tiles) <= 33 * 5
    assert [queries.start for queries, _, _ in tiles] == list(range(0, 33, 5))


@ATTENTIONS
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"softcap": -1.0}, "softcap is -1"),
        ({"window": -2}, "window -2"),
        ({"document_ids_BT": IDS[:, :5]}, r"document_ids_BT is torch.int32 \(2, 5\)"),
        ({"document_ids_BT": IDS.float()}, r"must be int32 or int64 \(2, 33\)"),
        ({"document_ids_BT": IDS.to("meta")}, "on meta; it must be"),
    ],
    ids=["cap", "window", "shape", "dtype", "device"],
)
def test_options_out_of_range_are_refused(
    attention: Callable[..., Tensor], options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=f"{attention.__name__}: .*{match}"):
        attention(*random_qkv(SHAPES[0], torch.float32), **options)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "is_scaled", "provider"),
    [
        (torch.bfloat16, 64, True, "sdpa_flash"),
        (torch.bfloat16, 64, False, "triton"),
        (torch.float16, 256, False, "triton"),
        (torch.bfloat16, 192, False, "torch"),
        (torch.float32, 64, False, "torch"),
    ],
    ids=str,
)
def test_cards_run_what_takes_a_case(
    dtype: torch.dtype,
    head_dim: int,
    is_scaled: bool,
    provider: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (op, sdpa):
        monkeypatch.setattr(module, "compute_capability", lambda _: 90)
    monkeypatch.setattr(op, "cuda_backend", lambda: "triton")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "no such card")
    options = Options(scale=0.5, window=0 if is_scaled else 5)
    assert op._provider(torch.empty(1, 2, 1, head_dim, dtype=dtype), options) == provider


def test_the_op_for_cuda_without_kernels_is_that_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_provider", lambda *_: "torch")
    q, k, v = random_qkv(SHAPES[1], torch.float32)
    options = (IDS, 0.3, 2.0, 9)
    (out, lse), expected = op._cuda(q, k, v, *options), OP(q, k, v, *options)
    for tensor, wanted in zip((out, lse), expected, strict=True):
        assert_bitwise(tensor, wanted)
    arguments = (torch.randn_like(out), q, k, v, out, lse, *options)
    for tensor, wanted in zip(op._cuda_backward(*arguments), BACKWARD_OP(*arguments), strict=True):
        assert_bitwise(tensor, wanted)


def test_scratch_is_a_row_sum_and_the_bounds_or_torchs() -> None:
    q, k, _ = random_qkv(SHAPES[1], torch.bfloat16)
    assert masked_workspace_bytes(q, None, 0) == 0
    assert masked_workspace_bytes(q, IDS, 0) == masked_workspace_bytes(q, None, 5) == 4 * 2 * 33
    assert masked_backward_workspace_bytes(q, k, None, 0.0, 5) == 4 * 2 * 4 * 33 + 2 * 4 * 2 * 33
    assert masked_backward_workspace_bytes(q, k, None, 0.0, 0) == sdpa.backward_workspace_bytes(q, k)
