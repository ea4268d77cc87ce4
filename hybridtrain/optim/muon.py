"""Muon (Jordan et al., 2024): orthogonalized momentum for the blocks' matrices, AdamW for the rest.

The rule is torch.optim.Muon's own (torch 2.9 and newer), which needs a matrix in one piece. P elements of a slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from torch.optim._muon import muon  # the function behind torch.optim.Muon, which itself wants parameters with gradients

from hybridtrain.memory.slices import StateSlice, StateSpec, WeightSlice
from hybridtrain.optim.adamw import AdamWConfig
from hybridtrain.optim.optimizer import Optimizer, Role, UpdateStep

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS, _NUM_ITERATIONS = 1e-7, 5
"""Torch's defaults for the Newton-Schulz iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon(Optimizer):
    """Keeps one momentum per block matrix, 4 bytes per parameter in fp32; AdamW's two moments elsewhere."""

    kind: ClassVar[str] = "muon"

    momentum: float = 0.95
    """Decay of a block matrix' momentum."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """match_rms_adamw: 0.2 sqrt(max(rows, columns)), for AdamW's learning rate (2502.16982). original: sqrt(max(1, rows
    / columns)), for about 50 times AdamW's."""
    beta1: float = 0.9
    """beta1 of AdamW's parameters."""
    beta2: float = 0.95
    """beta2 of AdamW's parameters."""

    @property
    def _rest(self) -> AdamWConfig:
        return AdamWConfig(lr=self.lr, beta1=self.beta1, beta2=self.beta2, weight_decay=self.weight_decay)

    def state(self, role: Role) -> tuple[StateSpec, ...]:
        """Return the momentum of a matrix of a block, AdamW's moments of anything else."""
        return (StateSpec("momentum_buffer"),) if role.is_hidden_matrix else self._rest.state(role)

    def needs_whole(self, role: Role) -> bool:
        """Return whether the parameter is orthogonalized."""
        return role.is_hidden_matrix

    def update(self, weight: WeightSlice, grad: Tensor, state: Sequence[StateSlice], step: UpdateStep) -> None:
        """Update a whole matrix, or a slice of the rest."""
        if len(weight.shape) != 2 or state[0] is not state[-1]:
            self._rest.update(weight, grad, state, step)
            return
        (momentum,) = state
        value_P, momentum_P = weight.value, momentum.load()
        muon(
            [value_P.view(weight.shape)], [grad.float().view(weight.shape)], [momentum_P.view(weight.shape)],
            lr=step.lr, weight_decay=step.weight_decay, momentum=self.momentum, nesterov=self.nesterov,
            ns_coefficients=_COEFFICIENTS, ns_steps=_NUM_ITERATIONS, eps=_EPS, adjust_lr_fn=self.adjust_lr,
            has_complex=False,
        )  # fmt: skip
        momentum.store(momentum_P)
