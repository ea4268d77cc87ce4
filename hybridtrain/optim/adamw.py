"""AdamW (Loshchilov and Hutter, 1711.05101): fp32 arithmetic inside, any storage outside. P elements of a slice.

8-bit moments are updated by one op; without a master weight the op also rounds the weight, without a float32 copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hybridkernels.adamw_int8 import adamw_int8_, adamw_int8_rounded_
from hybridtrain.memory.formats import DynamicInt8State, parts, weight_part
from hybridtrain.memory.slices import StateSlice, StateSpec, WeightSlice
from hybridtrain.optim.optimizer import Optimizer, Role, UpdateStep


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig(Optimizer):
    """Hyper-parameters of AdamW."""

    kind: ClassVar[str] = "adamw"
    offers_groups: ClassVar[bool] = True

    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.95
    """Decay of the mean of their squares."""
    eps: float = 1e-8
    """Epsilon added to the root of the second moment."""

    def state(self, role: Role) -> tuple[StateSpec, ...]:  # noqa: ARG002  the same for all
        """Return first and second moment."""
        return StateSpec("exp_avg"), StateSpec("exp_avg_sq", signed=False)

    def update(self, weight: WeightSlice, grad: Tensor, state: Sequence[StateSlice], step: UpdateStep) -> None:
        """Update a slice; bfloat16 moments are rounded stochastically."""
        first, second = state
        if isinstance(first.storage, DynamicInt8State):
            if weight.storage.rounds_stochastically and not step.keeps_value:
                self._update_rounded(weight, grad, state, step)
                return
            (m_codes, m_scale), (v_codes, v_scale) = first.stored, second.stored
            adamw_int8_(
                weight.value, grad, (m_codes, m_scale, v_codes, v_scale), lr=step.lr, betas=(self.beta1, self.beta2),
                eps=self.eps, weight_decay=step.weight_decay, step=step.number,
            )  # fmt: skip
            return
        value_P, first_P, second_P = weight.value, first.load(), second.load()
        self.update_group([value_P], [grad.float()], [[first_P, second_P]], step)
        first.store(first_P)
        second.store(second_P)

    def _update_rounded(self, weight: WeightSlice, grad: Tensor, state: Sequence[StateSlice], step: UpdateStep) -> None:
        """Update stored weights directly: bfloat16, or int8 codes and scales; slices share seeds wherever they live."""
        for part in parts(grad.numel()):
            part_P = grad if part == slice(0, grad.numel()) else grad[part]
            (m_codes, m_scale), (v_codes, v_scale) = (moment.part(part).stored for moment in state)
            adamw_int8_rounded_(
                weight_part(weight.stored, part), part_P, (m_codes, m_scale, v_codes, v_scale), lr=step.lr,
                betas=(self.beta1, self.beta2), eps=self.eps, weight_decay=step.weight_decay, step=step.number,
            )  # fmt: skip

    def update_group(
        self, values: list[Tensor], grads: list[Tensor], state: list[list[Tensor]], step: UpdateStep
    ) -> None:
        """Update whole float32 tensors in one fused call, without temporaries; all operands are float32."""
        firsts, seconds = [moments[0] for moments in state], [moments[1] for moments in state]
        fused_adamw(values, grads, firsts, seconds, step, betas=(self.beta1, self.beta2), eps=self.eps)

    def second_moment(self, state: Sequence[StateSlice], part: slice) -> Tensor:  # noqa: ARG002  of the slice
        """Return the second moment of a slice."""
        return state[-1].load()

    @property
    def second_moment_names(self) -> tuple[str, ...]:
        """The name of the second moment."""
        return ("exp_avg_sq",)

    def correction(self, number: int) -> float:
        """Return 1 - b2^t."""
        return 1 - float(self.beta2) ** number


def fused_adamw(
    values: Sequence[Tensor], grads: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor],
    step: UpdateStep, *, betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    """Update float32 tensors by torch's fused AdamW, without temporaries; all operands are float32."""
    step_count = torch.full((), float(step.number), dtype=torch.float32, device=values[0].device)
    torch._fused_adamw_(
        list(values), list(grads), list(firsts), list(seconds), [], [step_count] * len(values),
        lr=step.lr, beta1=betas[0], beta2=betas[1], weight_decay=step.weight_decay, eps=eps,
        amsgrad=False, maximize=False,
    )  # fmt: skip
