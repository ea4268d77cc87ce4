"""Kernels on meta tensors are counted, event for event and op for op, as the same ones with real arithmetic."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hybridtrain.kernel_rules  # noqa: F401  tells the ledger of the kernels' scratch
from hybridkernels.flash_attention import causal_attention, unfused_attention
from hybridkernels.geglu import geglu
from hybridkernels.grouped_linear import grouped_linear
from hybridkernels.layer_norm import layer_norm
from hybridkernels.linear_cross_entropy import linear_cross_entropy
from hybridkernels.rms_norm import rms_norm
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, StorageLedger

B, T, N, K, H = 2, 33, 4, 2, 16
M, D, V, E, F = 12, 16, 70, 3, 24

Case = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of x_MD and three matrices, the last of which is frozen in some cases."""


def attend(options: dict[str, float], attention: Callable[..., Tensor] = causal_attention, *, packed: bool) -> Case:
    def run(x_MD: Tensor, weight: Tensor, *_: Tensor) -> Tensor:
        q_BTNH, k_BTKH = x_MD.new_ones(B, T, N, H), x_MD.new_ones(B, T, K, H)
        leaves = [tensor.requires_grad_() for tensor in (q_BTNH, k_BTKH, k_BTKH.clone())]
        ids_BT = (torch.arange(T, device=x_MD.device) // 10).expand(B, T).int() if packed else None
        return attention(*leaves, document_ids_BT=ids_BT, **options).sum() + (x_MD @ weight.t()).sum()

    return run


def project(softcap: float, *, ignored: int, is_frozen: bool) -> Case:
    def run(x_MD: Tensor, weight: Tensor, *_: Tensor) -> Tensor:
        targets_M = torch.arange(M, device=x_MD.device)
        targets_M = torch.where(targets_M < ignored, -100, targets_M)
        weight_VD = weight.detach() if is_frozen else weight
        return linear_cross_entropy(
            x_MD, weight_VD, targets_M, chunk_tokens=5, softcap=softcap, num_targets=M - ignored
        )

    return run


def route(x_MD: Tensor, _weight: Tensor, experts_EFD: Tensor, frozen_EFD: Tensor) -> Tensor:
    ends_E = torch.full((E,), M, dtype=torch.int32, device=x_MD.device)
    return (grouped_linear(x_MD, experts_EFD, ends_E) * grouped_linear(x_MD, frozen_EFD, ends_E)).sum()


def normalise(x_MD: Tensor, weight: Tensor, *_: Tensor) -> Tensor:
    frozen_D, bias_D = weight[0].detach(), weight[1].detach()
    return rms_norm(layer_norm(geglu(x_MD, x_MD * 2), frozen_D, bias_D, 1e-5), frozen_D, 1e-5).sum()


CASES: dict[str, Case] = {
    "scale": attend({"scale": 0.3}, packed=False),
    "window-cap": attend({"window": 7, "softcap": 5.0}, packed=False),
    "documents": attend({}, packed=True),
    "unfused": attend({"window": 7, "softcap": 5.0}, unfused_attention, packed=True),
    "loss": project(0.0, ignored=0, is_frozen=False),
    "loss-ignored-capped-frozen": project(3.0, ignored=4, is_frozen=True),
    "experts": route,
    "frozen-norms": normalise,
}


def record(case: Case, device: str, dtype: torch.dtype) -> LedgerTrace:
    x_MD, weight_VD, experts_EFD, frozen_EFD = (
        torch.ones(shape, dtype=dtype, device=device) for shape in ((M, D), (V, D), (E, F, D), (E, F, D))
    )
    trained = [tensor.requires_grad_() for tensor in (x_MD, weight_VD, experts_EFD)]
    with StorageLedger() as ledger:
        loss = case(x_MD, weight_VD, experts_EFD, frozen_EFD)
        grads = torch.autograd.grad(loss, trained, allow_unused=True)
        del loss, grads
    return ledger.trace()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_meta_is_counted_as_the_cpu_is(case: Case, dtype: torch.dtype) -> None:
    executed, planned = (record(case, device, dtype) for device in ("cpu", "meta"))
    assert planned.sizes == executed.sizes
    assert planned.events == executed.events
    assert planned.ops == executed.ops
    assert executed.sizes


def test_frozen_weights_have_neither_gradient_nor_memory_for_it() -> None:
    ops = [op.name for op in record(CASES["frozen-norms"], "meta", torch.float32).ops]
    assert "hybridkernels.rms_norm_input_grad.default" in ops
    assert "hybridkernels.layer_norm_input_grad.default" in ops
    frozen, trained = (
        record(CASES[name], "meta", torch.float32).sizes.count(4 * V * D)
        for name in ("loss-ignored-capped-frozen", "loss")
    )
    assert (frozen, trained) == (1, 2)  # the weight itself, and its gradient
    ops = [op.name for op in record(CASES["experts"], "meta", torch.float32).ops]
    assert ops.count("hybridkernels.grouped_linear_input_grad.default") == 2
    assert ops.count("hybridkernels.grouped_linear_weight_grad.default") == 1
