"""AdamW (Loshchilov and Hutter, 1711.05101): fp32 arithmetic inside, any storage outside. P elements of a slice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybridkernels.adamw_int8 import adamw_int8_
from hybridkernels.adamw_int8.dynamic_map import QUANT_GROUP_SIZE, dequantize
from hybridtrain.engine.slow_momentum import SlowMomentum, SlowStep, move, track
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
    slow: SlowMomentum | None = None
    """Move along a slow average of the gradients in every step: AdEMAMix (2409.03137). Needs predictor_state."""

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
    slow: SlowStep | None = None

    @property
    def correction(self) -> float:
        """The second moment's bias correction."""
        return 1 - self.config.beta2**self.number


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


def update_slice(
    value_P: Tensor, grad_P: Tensor, moments: Sequence[Tensor], history: Sequence[Tensor], step: AdamWStep
) -> None:
    """Update one flat fp32 slice with moments of any storage; bfloat16 moments are rounded stochastically."""
    _update_moments(value_P, grad_P, moments, step)
    if step.slow is not None:
        follow_slow(value_P, grad_P, moments, history, step)


def follow_slow(
    value_P: Tensor, grad_P: Tensor, moments: Sequence[Tensor], history: Sequence[Tensor], step: AdamWStep
) -> None:
    """Add the gradient to the slow average, and move an updated flat fp32 slice along it."""
    assert step.slow is not None, "the caller asked"
    slow_P = track(history, grad_P, step.slow)
    if step.slow.predicted_steps:
        moved_P = move_slice(slow_P, second_moment(moments, value_P.numel()), step, step.slow.predicted_steps)
        step.slow.count(value_P, moved_P)
        value_P.add_(moved_P)


def move_slice(slow_P: Tensor, second_P: Tensor, step: AdamWStep, predicted_steps: float) -> Tensor:
    """Return the (P,) float32 displacement of a slice by ``predicted_steps``."""
    lr_steps = step.lr * predicted_steps
    assert step.slow is not None, "the caller asked"
    return move(
        slow_P, second_P, correction=step.correction, eps=step.config.eps, lr_steps=lr_steps,
        largest_ratio=step.slow.largest_ratio,
    )  # fmt: skip


def second_moment(moments: Sequence[Tensor], num_elements: int) -> Tensor:
    """Return the (P,) float32 second moment of a flat slice of any storage."""
    if len(moments) == 4:
        _, _, codes, scales = moments
        return dequantize(codes.view(-1, QUANT_GROUP_SIZE), scales, signed=False).view(-1)[:num_elements]
    return moments[1].float()


def _update_moments(value_P: Tensor, grad_P: Tensor, moments: Sequence[Tensor], step: AdamWStep) -> None:
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
