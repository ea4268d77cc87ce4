"""AdamW (Loshchilov and Hutter, 1711.05101): fp32 arithmetic inside, any storage outside. P elements of a slice."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridkernels.adamw_int8 import QUANT_GROUP_SIZE, adamw_int8_
from hybridtrain.memory.master_codec import MasterCodec
from hybridtrain.memory.state_store import ParameterState

SLICE_ELEMENTS = 1 << 24
"""Elements updated at a time where fp32 temporaries are needed: 64 MiB each."""


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
class _Step:
    """What all parameters of one kind share in one update."""

    codec: MasterCodec
    config: AdamWConfig
    lr: float
    weight_decay: float
    number: int
    """Counted from 1."""


def update_unit(
    states: Sequence[ParameterState],
    grads: Sequence[Tensor],
    codec: MasterCodec,
    config: AdamWConfig,
    lr: float,
    step: int,
) -> None:
    """Apply one update to all parameters of a unit, in place; ``step`` counts from 1."""
    for decays in (True, False):
        now = _Step(codec, config, lr, config.weight_decay if decays else 0.0, step)
        chosen = [pair for pair in zip(states, grads, strict=True) if (pair[0].parameter.dim() >= 2) is decays]
        whole = [pair for pair in chosen if _is_whole(*pair, codec)]
        if whole:
            _update_whole(whole, now)
        for state, grad in chosen:
            if not _is_whole(state, grad, codec):
                _update_in_slices(state, grad, now)


def _is_whole(state: ParameterState, grad: Tensor, codec: MasterCodec) -> bool:
    """Return whether everything is fp32 and stored, so that the fused kernel can work on it directly."""
    return codec.in_place and not state.is_int8 and grad.dtype == torch.float32


def _update_whole(pairs: Sequence[tuple[ParameterState, Tensor]], step: _Step) -> None:
    """Update fp32 tensors in one fused call, nothing temporary."""
    values = [step.codec.load(state.parameter.data, state.companion) for state, _ in pairs]
    _fused_adamw(values, [grad for _, grad in pairs], [state.moments for state, _ in pairs], step)
    for (state, _), value in zip(pairs, values, strict=True):
        step.codec.store(value, state.parameter.data, state.companion)


def _update_in_slices(state: ParameterState, grad: Tensor, step: _Step) -> None:
    weight_P = state.parameter.data.view(-1)
    companion_P = None if state.companion is None else state.companion.view(-1)
    grad_P = grad.reshape(-1)
    for start in range(0, weight_P.numel(), SLICE_ELEMENTS):
        part = slice(start, min(start + SLICE_ELEMENTS, weight_P.numel()))
        companion = None if companion_P is None else companion_P[part]
        value_P = step.codec.load(weight_P[part], companion)
        if state.is_int8:
            adamw_int8_(
                value_P, grad_P[part], _moment_slices(state, part), lr=step.lr,
                betas=(step.config.beta1, step.config.beta2), eps=step.config.eps, weight_decay=step.weight_decay,
                step=step.number,
            )  # fmt: skip
        else:
            moments = tuple(moment.view(-1)[part] for moment in state.moments)
            _fused_adamw([value_P], [grad_P[part].float()], [moments], step)
        step.codec.store(value_P, weight_P[part], companion)


def _moment_slices(state: ParameterState, part: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    groups = slice(part.start // QUANT_GROUP_SIZE, -(-part.stop // QUANT_GROUP_SIZE))
    codes = slice(groups.start * QUANT_GROUP_SIZE, groups.stop * QUANT_GROUP_SIZE)
    m_codes, m_scale, v_codes, v_scale = state.moments
    return m_codes[codes], m_scale[groups], v_codes[codes], v_scale[groups]


def _fused_adamw(values: list[Tensor], grads: list[Tensor], moments: Sequence[tuple[Tensor, ...]], step: _Step) -> None:
    step_count = torch.full((), float(step.number), dtype=torch.float32, device=values[0].device)
    config = step.config
    torch._fused_adamw_(
        values, grads, [m for m, _ in moments], [v for _, v in moments], [], [step_count] * len(values),
        lr=step.lr, beta1=config.beta1, beta2=config.beta2, weight_decay=step.weight_decay, eps=config.eps,
        amsgrad=False, maximize=False,
    )  # fmt: skip
