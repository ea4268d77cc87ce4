"""Mixture of experts: a router picks a few feed-forward parts per token (Shazeer et al., 1701.06538).

B batch, T sequence, M = B * T tokens, D width, E experts, S experts of a token, P = M * S rows, F feed-forward. Sizes
do not depend on the routing. Sums have a fixed order on every device, as rows are permuted, not added atomically.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hybridkernels.grouped_linear import grouped_linear
from hybridtrain.models.model_config import Experts
from hybridtrain.models.widening import widened

GatedActivation = Callable[[Tensor, Tensor], Tensor]
"""Gate and up projection -> activation(gate) * up."""


@dataclass(slots=True, eq=False)
class BalanceLoss:
    """The load-balancing loss of a micro-batch, pooled over all blocks as transformers' ``load_balancing_loss_func``.

    E * sum over experts of (share of tokens * mean router probability) (Fedus et al., 2101.03961, equation 4; a token
    of S experts counts S times). Padding does not count.
    """

    rows_E: Tensor
    """int64: tokens per expert in the blocks so far."""
    scale: float
    """Factor of the gradient."""
    num_tokens: int
    """Tokens that count, over all blocks."""
    counted_BT: Tensor | None = None
    """bool: which positions count; None: all."""
    is_counting: bool = True
    """Whether counting is on; off in the backward pass, where recomputed blocks were counted before."""

    def count(self, expert_MS: Tensor, ends_E: Tensor) -> None:
        """Add the tokens per expert of a block."""
        if not self.is_counting:
            return
        if self.counted_BT is None:
            self.rows_E += ends_E.diff(prepend=ends_E.new_zeros(1))
        else:
            counted_MS = self.counted_BT.view(-1, 1).expand_as(expert_MS)
            self.rows_E.scatter_add_(0, expert_MS.flatten(), counted_MS.flatten().to(self.rows_E.dtype))


def mix_experts(
    x_BTD: Tensor,
    router_ED: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    experts: Experts,
    activation: GatedActivation,
    balance: BalanceLoss | None = None,
) -> Tensor:
    """Return the weighted sum of each token's expert outputs, as Mixtral does (2401.04088).

    ``weights`` are gate and up projections (E, F, D) and output projections (E, D, F); ``balance`` adds its gradient to
    the output's.
    """
    x_MD = x_BTD.flatten(0, -2)
    chances_ME = _scores(x_MD, router_ED).float().softmax(-1)
    share_MS, expert_MS = chances_ME.topk(experts.per_token, dim=-1)
    expert_P, order_P = expert_MS.flatten().sort(stable=True)
    ends_E = torch.searchsorted(expert_P, torch.arange(experts.count, device=x_MD.device), right=True, out_int32=True)
    if balance is not None:
        balance.count(expert_MS, ends_E)
        chances_ME = _Balance.apply(chances_ME, balance)  # type: ignore[no-untyped-call]
        share_MS = chances_ME.gather(-1, expert_MS)
    if experts.normalizes:
        share_MS = share_MS / share_MS.sum(-1, keepdim=True)
    place_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P), device=x_MD.device))
    gate_EFD, up_EFD, out_EDF = weights
    row_PD = _Dispatch.apply(x_MD, order_P, place_P)  # type: ignore[no-untyped-call]
    inner_PF = activation(_project(row_PD, gate_EFD, ends_E), _project(row_PD, up_EFD, ends_E))
    out_PD = _project(inner_PF, out_EDF, ends_E)
    found_MSD = _Collect.apply(out_PD, order_P, place_P).view(*share_MS.shape, -1)  # type: ignore[no-untyped-call]
    mixed_MD: Tensor = (found_MSD * share_MS.to(x_MD.dtype)[..., None]).sum(1)
    return mixed_MD.view(x_BTD.shape)


def _scores(x_MD: Tensor, router_ED: Tensor) -> Tensor:
    with widened(router_ED):
        return functional.linear(x_MD, router_ED)


def _project(row_PD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    with widened(weight_EFD):
        return grouped_linear(row_PD, weight_EFD, ends_E)


class _Dispatch(torch.autograd.Function):
    """Each token once for each of its experts, in the order of the experts."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, order_P: Tensor, place_P: Tensor) -> Tensor:
        ctx.save_for_backward(place_P)
        ctx.shape = (len(x_MD), -1, x_MD.shape[1])
        return x_MD[order_P // (len(order_P) // len(x_MD))]

    @staticmethod
    def backward(ctx: Any, grad_PD: Tensor) -> tuple[Tensor, None, None]:
        (place_P,) = ctx.saved_tensors
        return grad_PD[place_P].view(ctx.shape).sum(1), None, None


class _Collect(torch.autograd.Function):
    """Rows back in the order of the tokens."""

    @staticmethod
    def forward(ctx: Any, out_PD: Tensor, order_P: Tensor, place_P: Tensor) -> Tensor:
        ctx.save_for_backward(order_P)
        return out_PD[place_P]

    @staticmethod
    def backward(ctx: Any, grad_PD: Tensor) -> tuple[Tensor, None, None]:
        (order_P,) = ctx.saved_tensors
        return grad_PD[order_P], None, None


class _Balance(torch.autograd.Function):
    """Chances as they are, and the gradient of the load-balancing loss, once all blocks have counted."""

    @staticmethod
    def forward(ctx: Any, chances_ME: Tensor, balance: BalanceLoss) -> Tensor:
        ctx.balance = balance
        return chances_ME.view_as(chances_ME)

    @staticmethod
    def backward(ctx: Any, grad_ME: Tensor) -> tuple[Tensor, None]:
        balance: BalanceLoss = ctx.balance
        by_chance_E = balance.rows_E.to(grad_ME.dtype) * (balance.scale * grad_ME.shape[1] / balance.num_tokens**2)
        if balance.counted_BT is None:
            return grad_ME + by_chance_E, None
        return grad_ME + balance.counted_BT.view(-1, 1) * by_chance_E, None
