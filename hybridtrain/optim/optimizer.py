"""Base of optimizers: the state of a parameter, and the update of a slice. P elements of a slice.

An optimizer only loads, changes and stores float32 values. The memory plan decides on placement and format, so that it
runs resident, streamed or on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, Protocol

from torch import Tensor

from hybridtrain.config.rules import refuse
from hybridtrain.memory.slices import StateSlice, StateSpec, WeightSlice


@dataclass(frozen=True, slots=True)
class Role:
    """Role of a parameter: its shape, and whether it is in a block."""

    shape: tuple[int, ...]
    in_block: bool
    """Whether it is in a block, not in embedding or head."""

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether it is a matrix of a block."""
        return self.in_block and len(self.shape) == 2


@dataclass(frozen=True, slots=True)
class UpdateStep:
    """The settings of one parameter's update, beside those of the optimizer."""

    number: int
    """Updates since the state was zero, this one included."""
    lr: float
    weight_decay: float
    keeps_value: bool = False
    """Whether the update must leave the exact new value unrounded, for a hook."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Hyper-parameters with their update rule. The base class works slice by slice, without second moment.

    Raises:
        ValueError: a setting of a name in ``_RULES`` is out of its range.
    """

    kind: ClassVar[str]
    offers_groups: ClassVar[bool] = False
    """Whether ``update_group`` is implemented."""

    lr: float = 3e-4
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled; applied to matrices only, not to norms and biases."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 turns clipping off."""
    clip: Literal["exact", "previous"] = "exact"
    """Clipping of fused updates. exact: a second backward pass, after the norm is known. previous: clip by the previous
    step's norm; the first step is exact."""

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
        """Return whether ``update`` needs whole parameters instead of flat slices."""
        return False

    def update(self, weight: WeightSlice, grad: Tensor, state: Sequence[StateSlice], step: UpdateStep) -> None:
        """Update a slice in place.

        Args:
            weight: Weight whose ``value`` is changed; the caller stores it.
            grad: Flat, float32 or bfloat16; may be changed.
            state: State slices in the order of ``state``; to be loaded and stored.
            step: Learning rate, decay, number.
        """
        raise NotImplementedError

    def update_group(
        self, values: list[Tensor], grads: list[Tensor], state: list[list[Tensor]], step: UpdateStep
    ) -> None:
        """Update whole float32 tensors in one call without temporaries; only if ``offers_groups``."""
        raise NotImplementedError

    def second_moment(self, state: Sequence[StateSlice], part: slice) -> Tensor:
        """Return the (P,) float32 second moment of a range of a parameter, without bias correction."""
        raise NotImplementedError

    @property
    def second_moment_names(self) -> tuple[str, ...]:
        """Names of the state that ``second_moment`` reads; empty without a second moment."""
        return ()

    @property
    def eps(self) -> float:
        """Epsilon added to the root of the second moment."""
        return 0.0

    def correction(self, number: int) -> float:  # noqa: ARG002
        """Return the divisor of the second moment after ``number`` updates."""
        return 1.0

    def step_hook(self, number: int, total_steps: int) -> "StepHook | None":  # noqa: ARG002
        """Return the hook that runs on every slice right after its update; None: none."""
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
"""Ranges of settings by name, for all optimizers."""
_ALLOWED = {
    "above 0": lambda value: value > 0,
    "at least 0": lambda value: value >= 0,
    "in [0, 1)": lambda value: 0 <= value < 1,
}


class StepHook(Protocol):
    """Hook that runs on every slice right after its update, with its gradient and state."""

    @property
    def moves_weights(self) -> bool:
        """Whether it changes weights, which the update then leaves unrounded."""

    def __call__(
        self, optimizer: Optimizer, weight: WeightSlice, grad_P: Tensor, state: Sequence[StateSlice],
        extra: Sequence[StateSlice], part: slice, step: UpdateStep,
    ) -> None:  # fmt: skip
        """Work on a slice in place.

        Args:
            optimizer: The optimizer of the update.
            weight: Updated, not yet stored.
            grad_P: Flat gradient.
            state: Optimizer state of the slice, or all of it if it is not element-wise.
            extra: Extra state of the plan (``history_tensors``).
            part: Range of the parameter's elements.
            step: Settings of the update.
        """
