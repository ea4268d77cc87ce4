"""The seam between the engine, which knows what a tensor is for, and whoever counts its bytes."""

from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from hybridtrain.plan.tensor_class import TensorClass


class Stage(StrEnum):
    """What the step is doing."""

    BUILD = "build"
    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class MemoryObserver(Protocol):
    """Told where the step stands and what its tensors are for."""

    def region(self, stage: Stage, unit: str) -> AbstractContextManager[None]:
        """Say that what follows belongs to ``stage`` of ``unit``."""
        ...

    def label(self, tensor: Tensor, tensor_class: TensorClass, unit: str) -> None:
        """Say what the storage of ``tensor`` is for, from its allocation on."""
        ...


class NullObserver:
    """Counts nothing."""

    def region(self, stage: Stage, unit: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Do nothing."""
        return nullcontext()

    def label(self, tensor: Tensor, tensor_class: TensorClass, unit: str) -> None:
        """Do nothing."""
