"""``torch.cuda.FloatTensor`` and its like: types of an old API by which many scripts still make tensors."""

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from hybridtrain.virtual_gpu.facade.cuda_module import CARD

_NAMES = (
    "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor", "ShortTensor",
    "CharTensor", "ByteTensor", "BoolTensor",
)  # fmt: skip


class CardType(type):
    """The type of such types: called, it makes a tensor on the card."""

    dtype: torch.dtype

    def __call__(cls, *args: Any, **_kwargs: Any) -> Tensor:
        """Return a tensor of a size (numbers or ``torch.Size``), or of data."""
        if args and not isinstance(args[0], Integral | torch.Size):
            return torch.tensor(args[0], dtype=cls.dtype, device=CARD)
        size = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
        return torch.empty(size, dtype=cls.dtype, device=CARD)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Tensor) and instance.is_cuda and instance.dtype is cls.dtype


def card_types() -> dict[str, CardType]:
    """Return the types by their names in ``torch.cuda``."""
    return {name: CardType(name, (), {"dtype": getattr(torch, name).dtype}) for name in _NAMES}
