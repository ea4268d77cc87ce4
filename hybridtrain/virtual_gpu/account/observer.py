# ruff: noqa: ARG002  an observer that counts nothing takes the same
"""The interface between the engine, which knows each tensor's purpose, and the ledgers that count its bytes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from hybridtrain.virtual_gpu.account.repeated_work import PendingBackward, Work
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass


class Stage(StrEnum):
    """The stage of a step."""

    BUILD = "build"
    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Lane(StrEnum):
    """Lanes that run in parallel: each works in order, and waits for others only where recorded."""

    COMPUTE = "compute"
    COPY_IN = "copy in"
    COPY_OUT = "copy out"
    HOST = "host"
    """Arithmetic of the processor."""
    DISK = "disk"
    LINK = "link"
    """Collectives of many cards, and what a card does on streams beside its own for them."""


class MemoryObserver(Protocol):
    """Observes the progress of a step and the purpose of its tensors. The methods here count nothing."""

    def region(self, stage: Stage, unit: str) -> AbstractContextManager[None]:
        """Assign what follows to ``stage`` of ``unit``."""
        return nullcontext()

    def label(self, tensor: Tensor, tensor_class: TensorClass, unit: str) -> None:
        """Set the purpose of the storage of ``tensor``, from its allocation on."""
        return

    def repeat(self, work: Work) -> tuple[Tensor, ...]:
        """Do work of whose tensors none but its results outlives it, and return these.

        Where there are no values, what it did the last time may be written down in its place.
        """
        return work.do()

    def repeat_forward(self, work: Work) -> tuple[tuple[Tensor, ...], PendingBackward | None]:
        """Do work that keeps tensors until ``repeat_backward``; results may have no graph."""
        return work.do(), None

    def repeat_backward(
        self,
        held: PendingBackward | None,
        operands: Sequence[Tensor],
        differentiate: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """Do the backward pass; ``differentiate`` gets the results of a forward pass only if that was done again."""
        return differentiate(())

    def cast(self, source: torch.dtype, target: torch.dtype, num_elements: int) -> None:
        """Record a copy of values to another element type, or to the same one."""
        return

    def work(self, lane: Lane, num_bytes: int, waits: Sequence[int]) -> int:
        """Record a transfer on ``lane`` after the named ops; return the number of this op."""
        return 0

    def mark(self) -> int:
        """Return the number of the last op on the compute lane."""
        return 0

    def join(self, op: int) -> None:
        """Make the next op on the compute lane wait for ``op``."""
        return


class NullObserver(MemoryObserver):
    """Counts nothing."""
