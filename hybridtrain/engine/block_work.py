"""A block's work with a key, so that a dry run computes equal blocks once."""

from collections.abc import Callable, Hashable

from torch import Tensor, nn

from hybridkernels.flash_attention import KeptAttention
from hybridtrain.models.block_model import Documents
from hybridtrain.models.experts import BalanceLoss
from hybridtrain.models.widening import Widen, widening_of
from hybridtrain.virtual_gpu.account.repeated_work import Work

_PARTS = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
"""Attributes of every module that are inspected one by one."""
_HOOKS = frozenset(vars(nn.Module())) - _PARTS - {"training"}
"""Hooks, which may do anything."""


def block_work(
    block: nn.Module, do: Callable[[], tuple[Tensor, ...]], hidden_BTD: Tensor, documents: Documents | None,
    balance: BalanceLoss | None, *more: bool, kept: KeptAttention | None = None,
) -> Work:  # fmt: skip
    """Return a forward pass of a block, done by ``do``; ``more`` holds its further settings.

    The memory that coded matrices share is checked again in the backward pass.
    """
    operands = [hidden_BTD, *(() if documents is None else (documents.ids_BT, documents.positions_BT))]
    if balance is not None:
        operands += [balance.rows_E, *(() if balance.counted_BT is None else (balance.counted_BT,))]
        more += (balance.is_counting,)
    if kept is not None:
        operands += kept.tensors
        more += (bool(kept.tensors),)

    def key() -> Hashable:
        found = block_key(block)
        return None if found is None else (found, more)

    return Work(do, operands, key, _SharedMatrix(block))


class _SharedMatrix:
    """Tracks which matrix of a block has its values in the shared memory."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._found: list[Widen] | None = None

    def mark(self) -> int:
        """Return the number of the matrix whose values are there, -1 for none."""
        return next((i for i, widen in enumerate(self._widenings()) if widen.is_done), -1)

    def restore(self, mark: Hashable) -> None:
        """Restore which matrix has its values in the shared memory."""
        for number, widen in enumerate(self._widenings()):
            widen.pretend(is_done=number == mark)

    def _widenings(self) -> list[Widen]:
        if self._found is None:  # only a dry run needs it
            found = [widening_of(parameter) for parameter in self._block.parameters()]
            self._found = [widen for widen in found if widen is not None]
        return self._found


def block_key(block: nn.Module) -> Hashable:
    """Return the hashable state key of a block's work: parts, settings, layouts; None: there is none."""
    found: list[Hashable] = []
    for path, module in block.named_modules():
        held = vars(module)
        if any(held[name] for name in _HOOKS):
            return None
        settings = [(name, value) for name, value in held.items() if name not in _PARTS | _HOOKS]
        tensors = [(name, _layout(x)) for part in (module._parameters, module._buffers) for name, x in part.items()]
        found.append((path, type(module), *settings, *tensors))
    try:
        hash(tuple(found))
    except TypeError:
        return None
    return tuple(found)


def _layout(tensor: Tensor | None) -> Hashable:
    if tensor is None:
        return None
    widen = widening_of(tensor)
    return (
        tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.is_meta,
        None if widen is None else widen.layout,
    )  # fmt: skip
