# ruff: noqa: ARG002  an observer that counts nothing takes the same
"""The interface between the engine, which knows each tensor's purpose, and the ledgers that count its bytes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from hybridtrain.virtual_gpu.account.op_record import Lane, Stage
from hybridtrain.virtual_gpu.account.repeated_work import PendingBackward, Work
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass


class MemoryObserver(Protocol):
    """Observes the progress of a step and the purpose of its tensors. The methods here count nothing."""

    def region(self, stage: Stage, unit: str) -> AbstractContextManager[None]:
        """Assign the following work to ``stage`` of ``unit``."""
        return nullcontext()

    def label(self, tensor: Tensor, tensor_class: TensorClass, unit: str) -> None:
        """Set the purpose of the storage of ``tensor``, from its allocation on."""
        return

    def repeat(self, work: Work) -> tuple[Tensor, ...]:
        """Do work whose results alone outlive it; return them.

        Without values its recorded effect may be repeated instead.
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
        """Do the backward pass; ``differentiate`` gets the results of a repeated forward pass, else none."""
        return differentiate(())

    def cast(self, source: torch.dtype, target: torch.dtype, num_elements: int) -> None:
        """Record a cast (or copy) of values."""
        return

    def work(self, lane: Lane, num_bytes: int, waits: Sequence[int]) -> int:
        """Record a transfer on ``lane`` after the given ops; return its number."""
        return 0

    def mark(self) -> int:
        """Return the number of the last op on the compute lane."""
        return 0

    def join(self, op: int) -> None:
        """Make the next op on the compute lane wait for ``op``."""
        return


class NullObserver(MemoryObserver):
    """Counts nothing."""
