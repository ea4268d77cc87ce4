# mypy: disable-error-code="no-untyped-call"
"""Methods and properties of ``torch.Tensor`` that involve a device, or read values."""

from collections.abc import Callable
from numbers import Integral
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from hybridtrain.virtual_gpu.account.op_rules import is_truly_meta
from hybridtrain.virtual_gpu.facade.cuda_module import CARD
from hybridtrain.virtual_gpu.facade.known_values import Place
from hybridtrain.virtual_gpu.facade.op_sets import META
from hybridtrain.virtual_gpu.facade.tensor_types import CardType
from hybridtrain.virtual_gpu.facade.virtual_ledger import VirtualLedger

_CPU = torch.device("cpu")
_TRUE_NAMES = (
    "to", "type", "numpy", "tolist", "new", "new_tensor", "data", "grad", "data_ptr", "__setitem__", "__repr__",
    "__array__",
)  # fmt: skip


def as_device(value: Any) -> torch.device | None:
    """Return a device; a number means a card."""
    if value is None or isinstance(value, torch.device):
        return value
    return torch.device("cuda", value) if isinstance(value, int) else torch.device(value)


class TensorMethods:
    """Replacements of methods of ``torch.Tensor``."""

    def __init__(self, ledger: VirtualLedger) -> None:
        self._ledger = ledger
        self._places = {Place.HOST: _CPU, Place.DEVICE: torch.device("cuda", ledger.card_index)}
        self._true: Any = SimpleNamespace(**{name.strip("_"): getattr(Tensor, name) for name in _TRUE_NAMES})
        self._true_device = torch._C.TensorBase.device.__get__
        self._true_tensor = torch.tensor
        self._true_shares_type: Callable[[Tensor, Tensor], bool] = torch._has_compatible_shallow_copy_type

    def names(self) -> dict[str, Any]:
        """Return the replacements by name."""
        return {
            "device": property(self._device),
            "is_cuda": property(lambda tensor: self._device(tensor).type == "cuda"),
            "is_cpu": property(lambda tensor: self._device(tensor).type == "cpu"),
            "is_meta": property(lambda tensor: is_truly_meta(tensor) and self._place(tensor) is None),
            "get_device": lambda tensor: self._ledger.card_index if self._device(tensor).type == "cuda" else -1,
            "to": _method(self._to),
            "cuda": lambda tensor, device=None, non_blocking=False, **_kwargs: tensor.to(
                as_device(device) or CARD, non_blocking=non_blocking
            ),
            "cpu": lambda tensor, **_kwargs: tensor.to("cpu"),
            "type": _method(self._type),
            "type_as": lambda tensor, other: tensor.to(other.device, other.dtype),
            "new": _method(self._new),
            "numpy": _method(self._numpy),
            "tolist": lambda tensor: self._true.tolist(self._real(tensor)),
            "__array__": lambda tensor, *args, **kwargs: self._true.array(self._for_numpy(tensor), *args, **kwargs),
            "__repr__": _method(self._show),
            "__setitem__": _method(self._set_item),
            "pin_memory": lambda tensor, *_args: tensor,
            "is_pinned": lambda _tensor, *_args: False,
            "record_stream": lambda _tensor, _stream: None,
            "new_tensor": _method(self._new_tensor),
            "data": property(self._true.data.__get__, self._set_data),
            "grad": _Settable(self._true.grad, self._set_grad),
            "data_ptr": _method(self._data_ptr),
        }

    def is_virtual(self, tensor: Tensor) -> bool:
        """Return whether a tensor is virtual."""
        return self._ledger.place_of(tensor) is not None

    def values_of(self, tensor: Tensor) -> Tensor | None:
        """Return a copy of a tensor's known values."""
        with _disable_current_modes():
            known = self._ledger.values.of(tensor)
            return None if known is None else known.clone()

    def become_virtual(self, tensor: Tensor) -> None:
        """Convert a real tensor to a virtual one on the host."""
        self._set_data(tensor, self._on_host(tensor.detach()))

    def may_share_type(self, tensor: Tensor, other: Tensor) -> bool:
        """Return whether ``tensor.data = other`` keeps the object, by which ``Module.to`` keeps Parameters.

        CPU and CUDA are compatible types, meta with neither; virtual tensors count as CPU or CUDA, a script's own meta
        tensors as meta.
        """
        is_meta = tuple(is_truly_meta(one) and self._ledger.place_of(one) is None for one in (tensor, other))
        kinds = {type(tensor), type(other)}
        if any(kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in kinds):
            return self._true_shares_type(tensor, other)
        return tensor.layout is other.layout and is_meta[0] == is_meta[1]

    def _place(self, tensor: Tensor) -> Place | None:
        """Return the place that a script sees; None while torch itself asks."""
        return None if self._ledger.is_inside else self._ledger.place_of(tensor)

    def _device(self, tensor: Tensor) -> torch.device:
        here = self._place(tensor)
        found: torch.device = self._true_device(tensor) if here is None else self._places[here]
        return found

    def _on_host(self, tensor: Tensor) -> Tensor:
        """Return a virtual copy of a real tensor."""
        with self._ledger.moving_to(Place.HOST):
            return torch.ops.aten._to_copy(tensor, device=META)  # type: ignore[no-any-return]

    def _real(self, tensor: Tensor) -> Tensor:
        """Return values on the CPU, with ones for unknown values."""
        if self._place(tensor) is None:
            return tensor
        with _disable_current_modes():
            known = self.values_of(tensor)
            if known is None:
                self._ledger.placeholders.note(torch.ops.aten._to_copy.default, "values that are read: ones")
                known = torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
            return known

    def _data_ptr(self, tensor: Tensor) -> int:
        """Return an address that no other storage has: scripts tell by it what is shared."""
        if self._place(tensor) is None:
            return int(self._true.data_ptr(tensor))
        return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.itemsize

    def _numpy(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._true.numpy(self._for_numpy(tensor), *args, **kwargs)

    def _for_numpy(self, tensor: Tensor) -> Tensor:
        if self._place(tensor) is Place.DEVICE:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return self._real(tensor)

    def _show(self, tensor: Tensor, *args: Any, **kwargs: Any) -> str:
        here = self._place(tensor)
        if here is None:
            return str(self._true.repr(tensor, *args, **kwargs))
        return f"tensor(..., device='{self._places[here]}', size={tuple(tensor.shape)}, dtype={tensor.dtype})"

    def _type(self, tensor: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, str) and ".cuda." in dtype:
            return tensor.to(CARD, getattr(torch, dtype.rpartition(".")[2]).dtype)
        if isinstance(dtype, CardType):
            return tensor.to(CARD, dtype.dtype)
        if dtype is not None:
            return self._true.type(tensor, dtype, *args, **kwargs)
        name, here = self._true.type(tensor).replace("torch.meta.", "torch."), self._place(tensor)
        return name.replace("torch.", "torch.cuda.", 1) if here is Place.DEVICE else name

    def _set_item(self, tensor: Tensor, index: Any, value: Any) -> None:
        """Set elements; a number goes by way of the CPU, where it is known (torch would make it on the meta device)."""
        if isinstance(value, bool | int | float) and self._place(tensor) is not None:
            value = self._true_tensor(value, dtype=tensor.dtype, device="cpu")
        self._true.setitem(tensor, index, value)

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        """Give a tensor other data, real or virtual: a machine with a card does not distinguish them.

        A real tensor that gets virtual data stays the Python object that modules, optimizers and ties know of, with
        its gradient; a graph that was recorded before would not reach it, as little as after ``swap_tensors``.
        """
        if is_truly_meta(tensor) == is_truly_meta(value) or (self._place(value) or self._place(tensor)) is None:
            self._true.data.__set__(tensor, value)
        elif is_truly_meta(tensor):
            self._true.data.__set__(tensor, self._on_host(value))
        else:
            gradient = tensor.grad if tensor.is_leaf else None
            if gradient is not None:
                gradient.data = gradient.to(value.device, value.dtype)
            made = torch.Tensor._make_subclass(torch.Tensor, value.detach(), tensor.requires_grad)
            self._true.grad.__set__(made, gradient)
            torch._C._swap_tensor_impl(tensor, made)

    def _set_grad(self, tensor: Tensor, gradient: Any) -> None:
        """Set a tensor's gradient; if only one of the two is virtual, the other becomes virtual."""
        if isinstance(gradient, Tensor) and is_truly_meta(tensor) != is_truly_meta(gradient):
            if self._place(gradient) is Place.HOST:
                self.become_virtual(tensor)
            elif self._place(tensor) is Place.HOST:
                gradient = self._on_host(gradient)
        self._true.grad.__set__(tensor, gradient)

    def _new_tensor(self, tensor: Tensor, data: Any, **kwargs: Any) -> Tensor:
        if self._place(tensor) is None and as_device(kwargs.get("device")) in {None, _CPU}:
            return self._true.new_tensor(tensor, data, **kwargs)  # type: ignore[no-any-return]
        target = kwargs.pop("device", None) or tensor.device
        return torch.tensor(data, dtype=kwargs.pop("dtype", tensor.dtype), device=target, **kwargs)

    def _new(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return a tensor of the same place and type, of a size or of data; the old name of ``new_empty``."""
        if self._place(tensor) is None or (args and isinstance(args[0], Tensor | torch.UntypedStorage)):
            return self._true.new(tensor, *args, **kwargs)
        if args and isinstance(args[0], torch.Size):
            return tensor.new_empty(args[0])
        if args and not isinstance(args[0], Integral):
            return tensor.new_tensor(args[0])
        return tensor.new_empty(tuple(kwargs.get("size", args)) or (0,))

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.overrides.has_torch_function_unary(tensor):  # a subclass has a say
            method = vars(torch.Tensor)["to"]
            return torch.overrides.handle_torch_function(method, (tensor,), tensor, *args, **kwargs)  # type: ignore[no-any-return]
        if is_lazy(tensor):  # which hides its shape, of no element
            tensor = tensor.as_subclass(Tensor)
        here = self._ledger.place_of(tensor)
        device, dtype, copies = _parse_to(args, kwargs)
        stays = device is None or (device.type == "cpu" and not is_truly_meta(tensor))
        if self._ledger.is_inside or (here is None and stays):
            return self._true.to(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        if device is None:
            assert here is not None
            device = self._places[here]
        if device.type == "meta":
            return torch.empty_like(tensor, device=device, dtype=dtype or tensor.dtype)
        if here is None and is_truly_meta(tensor):
            raise NotImplementedError("Cannot copy out of meta tensor; no data! Use torch.nn.Module.to_empty().")
        target = Place.DEVICE if device.type == "cuda" else Place.HOST
        if device.index and target is Place.DEVICE:
            self._ledger.require_card(device)
        if tensor.layout is not torch.strided:
            raise self._ledger.unplanned(f"sparse tensors ({tensor.layout}) on the card are not planned")
        layout = kwargs.get("memory_format")
        is_as_asked = dtype in {None, tensor.dtype} and (layout is None or tensor.is_contiguous(memory_format=layout))
        if here is target and not copies and is_as_asked:
            return tensor
        with self._ledger.moving_to(target):
            dtype = dtype or tensor.dtype
            return torch.ops.aten._to_copy(tensor, dtype=dtype, device=META, memory_format=layout)  # type: ignore[no-any-return]


class _Settable:
    """A property with another setter; ``__get__`` stays torch's own, by which ``torch.overrides`` knows ``grad``."""

    def __init__(self, true: Any, set_value: Callable[[Tensor, Any], None]) -> None:
        self._true, self._set_value = true, set_value
        vars(self)["__get__"] = true.__get__

    def __get__(self, tensor: Tensor | None, kind: type | None = None) -> Any:
        return self if tensor is None else self._true.__get__(tensor, kind)

    def __set__(self, tensor: Tensor, value: Any) -> None:
        self._set_value(tensor, value)

    def __delete__(self, tensor: Tensor) -> None:
        self._true.__delete__(tensor)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that binds as a method."""
    return lambda tensor, *args, **kwargs: function(tensor, *args, **kwargs)  # noqa: PLW0108  a bound one is no method


def _parse_to(args: tuple[Any, ...], kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, bool]:
    """Return device, element type and whether to copy, from the arguments of ``Tensor.to``."""
    first = args[0] if args else kwargs.get("other")
    rest = args[1:]
    if isinstance(first, Tensor):
        device, dtype = first.device, first.dtype
    elif isinstance(first, torch.dtype):
        device, dtype = None, first
    else:
        device = as_device(first if args else kwargs.get("device"))
        dtype, rest = (args[1], args[2:]) if len(args) > 1 else (kwargs.get("dtype"), ())
    return device, dtype, bool(kwargs.get("copy", rest[1] if len(rest) > 1 else False))
