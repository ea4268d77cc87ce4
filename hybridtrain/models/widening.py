"""Matrices that are stored as codes and have their values only while they are used.

The parameter is bound to memory that others share. What autograd would keep of it is the wish to see it again: it is
widened once more in the backward pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Widen = Callable[[], None]
"""Writes a matrix' values into the memory that its parameter is bound to."""
_NAME = "widen"


def set_widening(parameter: nn.Parameter, widen: Widen | None) -> None:
    """Say how a parameter gets its values; None: it always has them."""
    setattr(parameter, _NAME, widen)


@contextmanager
def widened(weight: Tensor, *, is_read: bool = True) -> Iterator[Tensor]:
    """Yield a weight that has its values inside the context, and again wherever a graph made inside asks for them.

    Args:
        weight: A parameter, or any tensor without a rule, which passes as it is.
        is_read: False: only the backward pass looks at the values.
    """
    widen: Widen | None = getattr(weight, _NAME, None)
    if widen is None:
        yield weight
        return
    if is_read:
        widen()
    shared = weight.detach()
    memory = shared.untyped_storage()._cdata

    def pack(saved: Tensor) -> Tensor | tuple[tuple[int, ...], tuple[int, ...]]:
        is_weight = saved.untyped_storage()._cdata == memory
        return (tuple(saved.shape), saved.stride()) if is_weight else saved

    def unpack(packed: Tensor | tuple[tuple[int, ...], tuple[int, ...]]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        widen()
        return shared.as_strided(*packed)

    with saved_tensors_hooks(pack, unpack):
        yield weight
