"""What an optimizer is: the state it keeps of a parameter, and the update of a slice. P elements of a slice.

Where state and weights live and how they are stored is the memory plan's business: an optimizer loads float32 values,
changes them and stores them back, and so runs resident, streamed or on the host, in any format.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from hybridtrain.memory.slices import StateSlice, StateSpec, WeightSlice


@dataclass(frozen=True, slots=True)
class Role:
    """What an optimizer may want to know of a parameter."""

    shape: tuple[int, ...]
    in_block: bool
    """Of a block, not of the embedding or the head."""

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether it is a matrix of a block."""
        return self.in_block and len(self.shape) == 2


@dataclass(frozen=True, slots=True)
class UpdateStep:
    """What one parameter's update depends on, beside the optimizer's own settings."""

    number: int
    """Of updates since the state was zero, this one included."""
    lr: float
    weight_decay: float
    keeps_value: bool = False
    """Whether the exact new value is needed after the update, which then must not round it."""


class Optimizer(Protocol):
    """A frozen dataclass of hyper-parameters with the arithmetic that they belong to."""

    def __init__(
        self, *, lr: float = ..., weight_decay: float = ..., max_grad_norm: float = ...,
        clip: Literal["exact", "previous"] = ...,
    ) -> None: ...  # fmt: skip

    kind: ClassVar[str]
    offers_groups: ClassVar[bool]
    """Whether ``update_group`` is there."""

    @property
    def lr(self) -> float:
        """Peak learning rate."""
        ...

    @property
    def weight_decay(self) -> float:
        """Decoupled; applied to matrices only, not to norms and biases."""
        ...

    @property
    def max_grad_norm(self) -> float:
        """Gradients are scaled down to this global norm; 0 turns clipping off."""
        ...

    @property
    def clip(self) -> Literal["exact", "previous"]:
        """Where updates are fused into the backward pass. exact: a second pass finds the norm first."""
        ...

    def state(self, role: Role) -> tuple[StateSpec, ...]:
        """Return the state of a parameter, zero before the first update."""
        ...

    def needs_whole(self, role: Role) -> bool:
        """Return whether ``update`` must see a parameter in one piece; else it is cut into flat slices."""
        ...

    def update(self, weight: WeightSlice, grad: Tensor, state: Sequence[StateSlice], step: UpdateStep) -> None:
        """Update a slice in place.

        Args:
            weight: Whose ``value`` is changed; the caller writes it back.
            grad: Flat, float32 or bfloat16; may be changed.
            state: In the order of ``state``; to be loaded and stored.
            step: Learning rate, decay, number.
        """
        ...

    def update_group(
        self, values: list[Tensor], grads: list[Tensor], state: list[list[Tensor]], step: UpdateStep
    ) -> None:
        """Update whole float32 tensors in one call with nothing temporary."""
        ...

    def second_moment(self, state: Sequence[StateSlice], part: slice) -> Tensor:
        """Return the (P,) float32 second moment of a range of a parameter, without bias correction."""
        ...

    @property
    def second_moment_names(self) -> tuple[str, ...]:
        """The state that ``second_moment`` reads; empty where there is no second moment."""
        ...

    @property
    def eps(self) -> float:
        """Added to the root of the second moment."""
        ...

    def correction(self, number: int) -> float:
        """Return what the second moment is divided by after ``number`` updates."""
        ...

    def step_hook(self, number: int, total_steps: int) -> "StepHook | None":
        """Return what is done to every slice after its update, beside the update; None: nothing."""
        ...


class StepHook(Protocol):
    """Work on every slice right after its update, while gradient and state are at hand."""

    @property
    def moves_weights(self) -> bool:
        """Whether it changes values, which are then not rounded before."""
        ...

    def __call__(
        self, optimizer: Optimizer, weight: WeightSlice, grad_P: Tensor, state: Sequence[StateSlice],
        extra: Sequence[StateSlice], part: slice, step: UpdateStep,
    ) -> None:  # fmt: skip
        """Work on a slice in place.

        Args:
            optimizer: Which updated it.
            weight: Updated, not yet stored.
            grad_P: Flat.
            state: Of the optimizer: the slice's, or all of it where it has no slices.
            extra: What the plan keeps beside it (``history_tensors``).
            part: Range of the parameter's elements.
            step: Of the update.
        """
        ...


class Elementwise:
    """What most optimizers have in common: they work slice by slice, without a second moment, and do nothing else."""

    __slots__ = ()
    offers_groups: ClassVar[bool] = False

    def needs_whole(self, role: Role) -> bool:  # noqa: ARG002
        """Return False."""
        return False

    def update_group(
        self, values: list[Tensor], grads: list[Tensor], state: list[list[Tensor]], step: UpdateStep
    ) -> None:
        """Raise: the caller asks ``offers_groups`` first."""
        raise AssertionError(f"{self} updates one by one: {len(values)}, {len(grads)}, {len(state)}, {step}")

    def second_moment(self, state: Sequence[StateSlice], part: slice) -> Tensor:
        """Raise: the caller asks ``second_moment_names`` first."""
        raise AssertionError(f"{type(self).__name__} keeps no second moment ({len(state)} tensors, {part})")

    @property
    def second_moment_names(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def eps(self) -> float:
        """0."""
        return 0.0

    def correction(self, number: int) -> float:  # noqa: ARG002
        """Return 1."""
        return 1.0

    def step_hook(self, number: int, total_steps: int) -> StepHook | None:  # noqa: ARG002
        """Return None."""
        return None


def faults_of(optimizer: Optimizer) -> list[str]:
    """Return what is wrong with the settings that every optimizer has, one sentence each."""
    rules = (
        (optimizer.lr > 0, f"lr: {optimizer.lr} must be above 0"),
        (optimizer.weight_decay >= 0, f"weight_decay: {optimizer.weight_decay} must be at least 0"),
        (optimizer.max_grad_norm >= 0, f"max_grad_norm: {optimizer.max_grad_norm} must be at least 0"),
    )
    return [fault for holds, fault in rules if not holds]


def decay_faults(**decays: float) -> list[str]:
    """Return a sentence for each decay outside of [0, 1)."""
    return [f"{name}: {value} must be in [0, 1)" for name, value in decays.items() if not 0 <= value < 1]


def fused_adamw(
    values: Sequence[Tensor], grads: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor],
    step: UpdateStep, *, betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    """Update float32 tensors by torch's fused AdamW, nothing temporary; gradients and moments are float32 too."""
    step_count = torch.full((), float(step.number), dtype=torch.float32, device=values[0].device)
    torch._fused_adamw_(
        list(values), list(grads), list(firsts), list(seconds), [], [step_count] * len(values),
        lr=step.lr, beta1=betas[0], beta2=betas[1], weight_decay=step.weight_decay, eps=eps,
        amsgrad=False, maximize=False,
    )  # fmt: skip
