"""Block inputs kept between forward and backward. B batch, T sequence, D width."""

from torch import Tensor

from hybridtrain.plan.tensor_class import TensorClass
from hybridtrain.profiler.observer import MemoryObserver


class BoundaryStore:
    """Owns one hidden_BTD per micro-batch and kept block, on the compute device."""

    def __init__(self, observer: MemoryObserver) -> None:
        self._observer = observer
        self._kept: dict[tuple[int, int], Tensor] = {}

    def put(self, micro_batch: int, block: int, hidden_BTD: Tensor) -> None:
        """Keep the input of ``block``; the last index, ``num_blocks``, is the head's input."""
        self._observer.label(hidden_BTD, TensorClass.BOUNDARY, f"block.{block}")
        self._kept[micro_batch, block] = hidden_BTD

    def take(self, micro_batch: int, block: int) -> Tensor:
        """Return the input of ``block`` and forget it; raises ``KeyError`` when it was never put or already taken."""
        return self._kept.pop((micro_batch, block))

    def drop(self) -> None:
        """Forget everything."""
        self._kept.clear()
