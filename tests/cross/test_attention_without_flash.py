"""Attention on cards below compute capability 8.0, which runs in tiles of torch's ops: what it takes, and in plans."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridkernels.flash_attention import causal_attention, tiled
from hybridkernels.flash_attention.options import Options
from hybridtrain.kernel_rules import rules_of
from hybridtrain.models.model_config import Workload
from hybridtrain.optimizations.mixed_precision import MixedPrecision
from hybridtrain.plan.compose import compose
from hybridtrain.planning.dry_runs import dry_run
from hybridtrain.virtual_gpu.account.ledger import StorageLedger
from hybridtrain.virtual_gpu.cards.card import find_card
from tiny_models import LLAMA_GROUPED

T4 = find_card("t4")
CASES = [
    ((2, 96, 4, 2, 32), 1 << 11),
    ((1, 128, 8, 8, 64), 1 << 13),
    ((3, 64, 4, 4, 16), 1 << 20),
    ((1, 96, 4, 1, 64), 1 << 9),
]
"""B, T, N, K, H, and scores of a tile."""


def taken_by(function: Callable[..., tuple[Tensor, ...]], *args: Tensor | Options) -> tuple[int, tuple[Tensor, ...]]:
    """Return the peak of what a function takes beside operands and results, and these."""
    with StorageLedger(device="cpu") as ledger:  # views enter the operands
        results = function(*args)
    outside = [tensor for tensor in (*args, *results) if isinstance(tensor, Tensor)]
    return ledger.peak_bytes - sum(tensor.nbytes for tensor in outside), results


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize(("shape", "scores"), CASES)
def test_the_scratch_of_tiles_is_bounded(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int, int], scores: int, softcap: float
) -> None:
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(tiled._SCORES, device, scores)
    batch, seq_len, num_heads, num_kv_heads, head_dim = shape
    sizes = (num_heads, num_kv_heads, num_kv_heads)
    q, k, v = (torch.randn(batch, seq_len, heads, head_dim).bfloat16() for heads in sizes)
    options = Options(softcap=softcap)
    forward, (out, lse) = taken_by(tiled.tiled_attention, q, k, v, options)
    backward, _ = taken_by(tiled.tiled_attention_backward, torch.randn_like(out), q, k, v, out, lse, options)
    for is_backward, taken in ((False, forward), (True, backward)):
        bound = tiled.tiled_workspace_bytes(q, k, is_backward=is_backward, softcap=softcap)
        assert taken <= bound <= 2 * taken


@pytest.mark.parametrize("options", [{}, {"window": 8, "softcap": 2.0}])
def test_the_ledger_counts_tiles_on_a_card_without_flash_attention(options: dict[str, float]) -> None:
    q, k, v = (torch.empty(1, 64, 4, 16, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3))
    ledger = StorageLedger()
    ledger.scratch_rules = rules_of(T4)
    with ledger:
        causal_attention(q, k, v, **options).sum().backward()  # type: ignore[arg-type]
    softcap = options.get("softcap", 0.0)
    for is_backward in (False, True):
        assert tiled.tiled_workspace_bytes(q, k, is_backward=is_backward, softcap=softcap) in ledger.trace().sizes
    attention = torch.ops.hybridkernels.causal_attention.default
    assert attention in rules_of(T4)
    assert attention not in rules_of(find_card("rtx-3090"))


def test_a_plan_counts_tiles_on_a_card_without_flash_attention() -> None:
    plan, workload = compose([MixedPrecision()]), Workload(micro_batch_size=1, seq_len=16)
    old = dry_run(LLAMA_GROUPED, plan, T4, workload)
    new = dry_run(
        LLAMA_GROUPED, plan, replace(T4, compute_capability="8.6", tflops_bf16=65.0, tflops_fp16=0.0), workload
    )
    tiles = tiled.tiled_workspace_bytes(
        torch.empty(1, 16, LLAMA_GROUPED.num_heads, LLAMA_GROUPED.head_dim, dtype=torch.bfloat16, device="meta"),
        torch.empty(1, 16, LLAMA_GROUPED.num_kv_heads, LLAMA_GROUPED.head_dim, dtype=torch.bfloat16, device="meta"),
        is_backward=True,
    )
    assert tiles in old.trace.sizes
    assert tiles not in new.trace.sizes
