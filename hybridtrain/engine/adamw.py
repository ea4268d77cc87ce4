"""AdamW (Loshchilov and Hutter, 1711.05101): fp32 arithmetic inside, any storage outside. P elements of a slice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybridkernels.adamw_int8 import adamw_int8_
from hybridtrain.memory.master_codec import round_stochastically


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig:
    """Hyper-parameters of the update."""

    lr: float = 3e-4
    """Peak learning rate."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled; applied to matrices only, not to norms and biases."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 turns clipping off."""
    clip: Literal["exact", "previous"] = "exact"
    """Only where updates are fused into the backward pass. exact: a second pass finds the norm first. previous: the
    norm of the step before is taken; the first step is exact."""

    def __post_init__(self) -> None:
        rules = (
            (self.lr > 0, f"lr: {self.lr} must be above 0"),
            (0 <= self.beta1 < 1, f"beta1: {self.beta1} must be in [0, 1)"),
            (0 <= self.beta2 < 1, f"beta2: {self.beta2} must be in [0, 1)"),
            (self.eps > 0, f"eps: {self.eps} must be above 0"),
            (self.weight_decay >= 0, f"weight_decay: {self.weight_decay} must be at least 0"),
            (self.max_grad_norm >= 0, f"max_grad_norm: {self.max_grad_norm} must be at least 0"),
        )
        faults = [fault for holds, fault in rules if not holds]
        if faults:
            raise ValueError("\n".join(faults))


@dataclass(frozen=True, slots=True)
class AdamWStep:
    """What all parameters of one kind share in one update."""

    config: AdamWConfig
    lr: float
    weight_decay: float
    number: int
    """Counted from 1."""


def update_values(
    values: Sequence[Tensor], grads: Sequence[Tensor], moments: Sequence[tuple[Tensor, Tensor]], step: AdamWStep
) -> None:
    """Update fp32 tensors in one fused call, nothing temporary; gradients and moments are fp32 too."""
    step_count = torch.full((), float(step.number), dtype=torch.float32, device=values[0].device)
    config = step.config
    torch._fused_adamw_(
        list(values), list(grads), [m for m, _ in moments], [v for _, v in moments], [], [step_count] * len(values),
        lr=step.lr, beta1=config.beta1, beta2=config.beta2, weight_decay=step.weight_decay, eps=config.eps,
        amsgrad=False, maximize=False,
    )  # fmt: skip


def update_slice(value_P: Tensor, grad_P: Tensor, moments: Sequence[Tensor], step: AdamWStep) -> None:
    """Update one flat fp32 slice with moments of any storage; bfloat16 moments are rounded stochastically."""
    if len(moments) == 4:
        config = step.config
        m_codes, m_scale, v_codes, v_scale = moments
        adamw_int8_(
            value_P, grad_P, (m_codes, m_scale, v_codes, v_scale), lr=step.lr, betas=(config.beta1, config.beta2),
            eps=config.eps, weight_decay=step.weight_decay, step=step.number,
        )  # fmt: skip
        return
    m_P, v_P = (moment.float() for moment in moments)
    update_values([value_P], [grad_P.float()], [(m_P, v_P)], step)
    for moment, wide_P in zip(moments, (m_P, v_P), strict=True):
        if moment.dtype != torch.float32:
            round_stochastically(wide_P, moment)
