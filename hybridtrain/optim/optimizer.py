"""Base of optimizers: the state of a parameter, and the update of a slice. P elements of a slice.

Where state and weights live and how they are stored is the memory plan's business: an optimizer loads float32 values,
changes them and stores them back, and so runs resident, streamed or on the host, in any format.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, Protocol

from torch import Tensor

from hybridtrain.config.rules import refuse
from hybridtrain.memory.slices import StateSlice, StateSpec, WeightSlice


@dataclass(frozen=True, slots=True)
class Role:
    """Place and shape of a parameter, for an optimizer."""

    shape: tuple[int, ...]
    in_block: bool
    """Of a block, not of the embedding or the head."""

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether it is a matrix of a block."""
        return self.in_block and len(self.shape) == 2


@dataclass(frozen=True, slots=True)
class UpdateStep:
    """The settings of one parameter's update, beside those of the optimizer."""

    number: int
    """Of updates since the state was zero, this one included."""
    lr: float
    weight_decay: float
    keeps_value: bool = False
    """Whether the exact new value is needed after the update, which then must not round it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Hyper-parameters with their update rule; the base works slice by slice, without second moment.

    Raises:
        ValueError: a setting of a name in ``_RULES`` is out of its range.
    """

    kind: ClassVar[str]
    offers_groups: ClassVar[bool] = False
    """Whether ``update_group`` is there."""

    lr: float = 3e-4
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled; applied to matrices only, not to norms and biases."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 turns clipping off."""
    clip: Literal["exact", "previous"] = "exact"
    """Only where updates are fused into the backward pass. exact: a second pass finds the norm first. previous: the
    norm of the step before is taken; the first step is exact."""

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        refuse(
            f"{name}: {values[name]} must be {words}"
            for name, words in _RULES.items()
            if name in values and not _ALLOWED[words](values[name])
        )

    def state(self, role: Role) -> tuple[StateSpec, ...]:
        """Return the state of a parameter, zero before the first update."""
        raise NotImplementedError

    def needs_whole(self, role: Role) -> bool:  # noqa: ARG002
        """Return whether ``update`` must see a parameter in one piece; else it is cut into flat slices."""
        return False

    def update(self, weight: WeightSlice, grad: Tensor, state: Sequence[StateSlice], step: UpdateStep) -> None:
        """Update a slice in place.

        Args:
            weight: Whose ``value`` is changed; the caller writes it back.
            grad: Flat, float32 or bfloat16; may be changed.
            state: In the order of ``state``; to be loaded and stored.
            step: Learning rate, decay, number.
        """
        raise NotImplementedError

    def update_group(
        self, values: list[Tensor], grads: list[Tensor], state: list[list[Tensor]], step: UpdateStep
    ) -> None:
        """Update whole float32 tensors in one call with nothing temporary; the caller asks ``offers_groups`` first."""
        raise NotImplementedError

    def second_moment(self, state: Sequence[StateSlice], part: slice) -> Tensor:
        """Return the (P,) float32 second moment of a range of a parameter, without bias correction."""
        raise NotImplementedError

    @property
    def second_moment_names(self) -> tuple[str, ...]:
        """The state that ``second_moment`` reads; empty where there is no second moment."""
        return ()

    @property
    def eps(self) -> float:
        """Added to the root of the second moment."""
        return 0.0

    def correction(self, number: int) -> float:  # noqa: ARG002
        """Return the divisor of the second moment after ``number`` updates."""
        return 1.0

    def step_hook(self, number: int, total_steps: int) -> "StepHook | None":  # noqa: ARG002
        """Return the work on every slice right after its update; None: none."""
        return None


_RULES = {
    "lr": "above 0",
    "weight_decay": "at least 0",
    "max_grad_norm": "at least 0",
    "momentum": "in [0, 1)",
    "beta1": "in [0, 1)",
    "beta2": "in [0, 1)",
    "eps": "above 0",
}
"""Ranges of settings by their names, whichever optimizer has them."""
_ALLOWED = {
    "above 0": lambda value: value > 0,
    "at least 0": lambda value: value >= 0,
    "in [0, 1)": lambda value: 0 <= value < 1,
}


class StepHook(Protocol):
    """Work on every slice right after its update, while gradient and state are at hand."""

    @property
    def moves_weights(self) -> bool:
        """Whether it changes values, which are then not rounded before."""

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
