# mypy: disable-error-code="no-untyped-call"
"""What a script sees of a card: ``torch.cuda``, and the methods of tensors that name a device.

``facade`` replaces attributes of torch while it is open and puts every one back. Nothing of a real card is touched,
on a machine that has one neither.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from numbers import Integral
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from hybridtrain.virtual_gpu.facade.checkpoint_files import checkpoint_files
from hybridtrain.virtual_gpu.facade.cuda_paths import Autocast
from hybridtrain.virtual_gpu.facade.nvidia_smi import nvidia_smi
from hybridtrain.virtual_gpu.facade.stand_in import where_called
from hybridtrain.virtual_gpu.facade.virtual_ledger import Place, VirtualLedger, is_truly_meta

_TRUE_DEVICE = torch.device
_META = torch.device("meta")
_CARD = torch.device("cuda", 0)
_PLACES = {Place.HOST: torch.device("cpu"), Place.DEVICE: _CARD}
_FACTORIES = (
    "arange", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones", "ones_like",
    "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "zeros", "zeros_like",
)  # fmt: skip
_NCCL_VERSION = (2, 27, 5)
"""What scripts are told that ask whether it can reduce bfloat16 (2.10 can)."""
_CUDNN_VERSION = 91002
_COUNTERS = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")


@contextmanager
def facade(ledger: VirtualLedger, autocast: Autocast) -> Iterator[None]:
    """Let code in this process believe that the ledger's card is there."""
    _device_constructors()  # kept by torch: must list its true functions
    cuda, methods = _CudaModule(ledger).names(), _TensorMethods(ledger)
    with ExitStack() as stack:
        for owner, names in (
            (torch.Tensor, methods.names()),
            (torch.cuda, cuda),
            (torch, _TorchFunctions(ledger, autocast).names()),
            (torch, {"_has_compatible_shallow_copy_type": methods.may_share_type}),
        ):
            for name, value in names.items():
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
        for owner, name, value in _elsewhere(ledger, cuda):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        stack.enter_context(nvidia_smi(ledger.card, ledger.num_cards))
        # Threads that load weights would not be seen: what is watched is the thread that opened the block.
        stack.enter_context(mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}))
        stack.enter_context(checkpoint_files(methods.is_virtual, methods.values_of, partial(_note_save, ledger)))
        yield


def _elsewhere(ledger: VirtualLedger, cuda: dict[str, Any]) -> Iterator[tuple[Any, str, Any]]:
    """Yield what must be replaced outside ``torch``, ``torch.cuda`` and ``Tensor``."""
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "empty_cache",
                 "mem_get_info", "memory_stats", "reset_peak_memory_stats"):  # fmt: skip
        yield torch.cuda.memory, name, cuda[name]
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "get_rng_state_all",
                 "set_rng_state_all"):  # fmt: skip
        yield torch.cuda.random, name, cuda[name]
    for name in ("mark", "range_push", "range_pop", "range_start", "range_end"):
        yield torch.cuda.nvtx, name, _do_nothing
    yield torch.cuda.nvtx, "range", _no_range
    yield torch.cuda.memory, "_record_memory_history", _do_nothing
    yield torch._C._nn, "_parse_to", _numbers_as_cards(torch._C._nn._parse_to)
    one_hot = _one_hot(ledger)
    for module in (torch.nn.functional, torch._C._nn):
        yield module, "one_hot", one_hot
    yield torch.utils.data.DataLoader, "_get_iterator", _load_here
    yield from _build_of_cuda()
    yield from _scripted(ledger)
    yield import_module("torch.nn.parallel.data_parallel"), "scatter_kwargs", _to_one_card
    yield torch.accelerator, "is_available", lambda: True
    yield torch.accelerator, "current_accelerator", lambda *_args, **_kwargs: torch.device("cuda")
    yield torch.accelerator, "device_count", lambda: ledger.num_cards
    yield torch.accelerator, "synchronize", lambda *_args: None
    yield torch.accelerator, "current_device_index", lambda: ledger.card_index
    yield torch.accelerator, "set_device_index", lambda *_args: None
    yield torch.accelerator, "empty_cache", ledger.release_cache
    yield torch.accelerator, "current_stream", VirtualStream
    yield torch.nn.init, "_no_grad_trunc_normal_", _drawn_once(ledger)
    true_data_ptr = torch.UntypedStorage.data_ptr
    yield torch.UntypedStorage, "data_ptr", lambda storage: true_data_ptr(storage) or storage._cdata
    yield torch.UntypedStorage, "resize_", _counted_resize(ledger)
    yield from _kernels(ledger)
    yield from _libraries()
    grouped = torch.utils._foreach_utils._group_tensors_by_device_and_dtype

    def group(tensorlistlist: Any, with_indices: bool = False) -> Any:
        """Group tensors as torch does, by the places that they would have."""
        named: dict[Any, Any] = {}
        for (_, dtype), (lists, indices) in grouped(tensorlistlist, with_indices).items():
            for position, first in enumerate(lists[0]):
                assert first is not None
                found, places = named.setdefault((first.device, dtype), ([[] for _ in lists], []))
                for members, member in zip(found, lists, strict=True):
                    members.extend(member[position : position + 1])
                places += indices[position : position + 1]
        return named

    for module in (torch.utils._foreach_utils, torch.nn.utils.clip_grad):
        yield module, "_group_tensors_by_device_and_dtype", group
    yield torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(group)


def _kernels(ledger: VirtualLedger) -> Iterator[tuple[Any, str, Any]]:
    """Yield what CUDA does in one kernel and the CPU does not."""
    drop = _Dropout(ledger)
    yield torch._VF, "dropout", drop
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        yield torch._VF, name, _unfused(ledger, name)
    yield torch, "dropout", drop


def _build_of_cuda() -> Iterator[tuple[Any, str, Any]]:
    """Yield what torch says of its own build and libraries where it was built with CUDA."""
    yield torch.version, "cuda", torch.version.cuda or "13.0"
    yield torch.backends.cuda, "is_built", lambda: True
    yield torch.backends.cudnn, "is_available", lambda: True
    yield torch.backends.cudnn, "version", lambda: _CUDNN_VERSION
    yield torch.backends.cudnn, "is_acceptable", lambda tensor: tensor.device.type == "cuda"
    yield torch.cuda.nccl, "version", lambda: _NCCL_VERSION
    for module in (torch.distributed, import_module("torch.distributed.distributed_c10d")):
        yield module, "is_nccl_available", lambda: True


def _scripted(ledger: VirtualLedger) -> Iterator[tuple[Any, str, Any]]:
    """Yield what lets TorchScript leave code as it is, with torch's own switch (PYTORCH_JIT=0)."""
    yield torch.jit._state._enabled, "enabled", False
    for name in ("script", "trace"):
        yield torch.jit, name, _noted(ledger, getattr(torch.jit, name))


def _noted(ledger: VirtualLedger, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if not (getattr(obj, "__module__", None) or "").startswith("torch."):
            ledger.seen.compiled.append(f"torch.jit.{function.__name__} at {where_called()}")
        return function(obj, *args, **kwargs)

    return call


def _unfused(ledger: VirtualLedger, name: str) -> Callable[..., Any]:
    function = getattr(torch._VF, name)
    told = f"{name.partition('_')[0].upper()} planned op by op, where cuDNN has one kernel that keeps other tensors"

    def run(input: Tensor, *args: Any) -> Any:  # noqa: A002  torch's name
        if ledger.place_of(input) is Place.DEVICE:
            ledger.seen.approximated.setdefault(told, where_called())
        return function(input, *args)

    return run


def _to_one_card(inputs: Any, kwargs: Any, cards: Any, dim: int = 0) -> tuple[Any, Any]:  # noqa: ARG001  torch's names
    """Return what ``DataParallel`` of one card passes on (torch/nn/parallel/scatter_gather.py).

    Raises:
        NotImplementedError: It is of several.
    """
    if len(cards) > 1:
        raise NotImplementedError(
            f"virtual GPU: DataParallel over {len(cards)} cards is not planned; plan DistributedDataParallel with "
            "--world, or DataParallel of one card (device_ids=[0])."
        )

    def move(value: Any) -> Any:
        return value.to(_as_device(cards[0])) if isinstance(value, Tensor) else value

    return (tree_map(move, tuple(inputs)),), (tree_map(move, kwargs or {}),)


def _libraries() -> Iterator[tuple[Any, str, Any]]:
    """Yield what must be replaced in libraries that reach the driver by themselves."""
    if find_spec("triton") is not None:  # a kernel writes into tensors that its caller made: nothing is left to count
        for module, name in (("jit", "JITFunction"), ("autotuner", "Autotuner"), ("autotuner", "Heuristics")):
            yield getattr(import_module(f"triton.runtime.{module}"), name), "run", _do_nothing
    if "bitsandbytes" in sys.modules:
        functional = import_module("bitsandbytes.functional")
        # Unified memory: of the driver, not of torch's allocator; pages stay where they were touched last.
        yield functional, "get_paged", _get_paged
        for name in ("prefetch_tensor", "fill", "_mul"):
            yield functional, name, _do_nothing
        # Tables that are kept as long as the process: those of one virtual card are nowhere on the next.
        yield functional, "name2qmap", {}
        yield import_module("bitsandbytes.backends.utils"), "_code_4bit_cache", {}


def _drawn_once(ledger: VirtualLedger) -> Callable[..., Tensor]:
    """Return torch's truncated normal, which since 2.13 draws until no sample is rejected (torch/nn/init.py)."""
    true_draw = torch.nn.init._no_grad_trunc_normal_

    def draw(*args: Any, **kwargs: Any) -> Tensor:
        with ledger.stand_ins.answering(truth=False):
            return true_draw(*args, **kwargs)

    return draw


def _counted_resize(ledger: VirtualLedger) -> Callable[[torch.UntypedStorage, int], Any]:
    true_resize = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        ledger.resize(storage, size)
        return true_resize(storage, size)

    return resize


def _numbers_as_cards(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return what reads the arguments of ``Module.to`` where a number alone is a card."""

    def parse_to(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (_as_device(args[0]), *args[1:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = _as_device(kwargs["device"])
        return parse(*args, **kwargs)

    return parse_to


def _one_hot(ledger: VirtualLedger) -> Callable[..., Tensor]:
    """Return what puts ones as CUDA's kernel does; on the meta device torch compares with numbers that nobody knows."""
    true_one_hot: Callable[..., Tensor] = torch.nn.functional.one_hot

    def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # vmap and the like take it apart
        if is_wrapped or tensor.dtype is not torch.int64 or ledger.place_of(tensor) is None:
            return true_one_hot(tensor, num_classes)
        count = int(tensor.max().item()) + 1 if num_classes == -1 else num_classes
        zeros = torch.zeros((*tensor.shape, count), dtype=tensor.dtype, device=tensor.device)
        return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)

    return one_hot


class _LoaderHere(torch.utils.data.dataloader._SingleProcessDataLoaderIter):
    """Loads in the script's process; begins anew where a loader of persistent workers does."""

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._dataset_fetcher = torch.utils.data._DatasetKind.create_fetcher(
            self._dataset_kind, self._dataset, self._auto_collation, self._collate_fn, self._drop_last
        )


def _load_here(loader: Any) -> Any:
    """Return the iterator of a loader without workers: what they make could not be sent here, for it has no bytes."""
    workers, timeout, loader.num_workers, loader.timeout = loader.num_workers, loader.timeout, 0, 0
    try:
        made = _LoaderHere(loader)
    finally:
        loader.num_workers, loader.timeout = workers, timeout
    if workers and loader.worker_init_fn is not None:  # as the only worker
        info = torch.utils.data._utils.worker.WorkerInfo(
            id=0, num_workers=1, seed=int(made._base_seed), dataset=loader.dataset
        )  # fmt: skip
        with mock.patch.object(torch.utils.data._utils.worker, "_worker_info", info):
            loader.worker_init_fn(0)
    return made


@contextmanager
def _no_range(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


def _do_nothing(*_args: Any, **_kwargs: Any) -> None:
    """Take anything."""


class _Dropout:
    """CUDA drops elements with one kernel that keeps a mask of booleans (aten/src/ATen/native/Dropout.cpp)."""

    def __init__(self, ledger: VirtualLedger) -> None:
        self._ledger = ledger
        self._true = torch.dropout

    def __call__(self, input: Tensor, p: float, train: bool) -> Tensor:  # noqa: A002  torch's names
        """Return the input with elements dropped."""
        if train and 0 < p < 1 and input.numel() and self._ledger.place_of(input) is Place.DEVICE:
            return torch.native_dropout(input, p, train)[0]
        return self._true(input, p, train)


def _get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:  # noqa: ARG001
    """Return state that bitsandbytes would put into unified memory; its own attribute says so."""
    made = torch.empty(shape, dtype=dtype, device="cpu")
    made.is_paged = True  # type: ignore[attr-defined]
    return made


def _as_device(value: Any) -> torch.device | None:
    if value is None or isinstance(value, torch.device):
        return value
    if isinstance(value, int):
        return torch.device("cuda", value)
    return torch.device(value)


class _TensorMethods:
    """Methods and properties of ``torch.Tensor``."""

    def __init__(self, ledger: VirtualLedger) -> None:
        self._ledger = ledger
        self._places = _PLACES | {Place.DEVICE: torch.device("cuda", ledger.card_index)}
        self._true_device = torch._C.TensorBase.device.__get__
        self._true_to, self._true_type, self._true_repr = torch.Tensor.to, torch.Tensor.type, torch.Tensor.__repr__
        self._true_numpy, self._true_tolist = torch.Tensor.numpy, torch.Tensor.tolist
        self._true_array, self._true_new = torch.Tensor.__array__, torch.Tensor.new_tensor
        self._true_legacy_new: Any = torch.Tensor.new
        self._true_data: Any = torch.Tensor.data
        self._true_set_item, self._true_tensor = torch.Tensor.__setitem__, torch.tensor
        self._true_data_ptr: Callable[[Tensor], int] = torch.Tensor.data_ptr
        self._true_shares_type: Callable[[Tensor, Tensor], bool] = torch._has_compatible_shallow_copy_type

    def names(self) -> dict[str, Any]:
        """Return what to replace."""
        return {
            "device": property(self._device),
            "is_cuda": property(lambda tensor: self._device(tensor).type == "cuda"),
            "is_cpu": property(lambda tensor: self._device(tensor).type == "cpu"),
            "is_meta": property(lambda tensor: is_truly_meta(tensor) and self._place(tensor) is None),
            "get_device": lambda tensor: self._ledger.card_index if self._device(tensor).type == "cuda" else -1,
            "to": _method(self._to),
            "cuda": lambda tensor, device=None, non_blocking=False, **_kwargs: tensor.to(
                _as_device(device) or _CARD, non_blocking=non_blocking
            ),
            "cpu": lambda tensor, **_kwargs: tensor.to("cpu"),
            "type": _method(self._type),
            "type_as": lambda tensor, other: tensor.to(other.device, other.dtype),
            "new": _method(self._new),
            "numpy": _method(self._numpy),
            "tolist": lambda tensor: self._true_tolist(self._real(tensor)),
            "__array__": lambda tensor, *args, **kwargs: self._true_array(self._real(tensor), *args, **kwargs),
            "__repr__": _method(self._show),
            "__setitem__": _method(self._set_item),
            "pin_memory": lambda tensor, *_args: tensor,
            "is_pinned": lambda _tensor, *_args: False,
            "record_stream": lambda _tensor, _stream: None,
            "new_tensor": _method(self._new_tensor),
            "data": property(self._true_data.__get__, self._set_data),
            "data_ptr": _method(self._data_ptr),
        }

    def is_virtual(self, tensor: Tensor) -> bool:
        """Return whether a tensor has no values of its own."""
        return self._ledger.place_of(tensor) is not None

    def values_of(self, tensor: Tensor) -> Tensor | None:
        """Return a copy of a tensor's values where they are known."""
        with _disable_current_modes():
            known = self._ledger.known(tensor)
            return None if known is None else known.clone()

    def _place(self, tensor: Tensor) -> Place | None:
        """Return what a script may know of a tensor's place; None while torch itself asks."""
        return None if self._ledger.is_inside else self._ledger.place_of(tensor)

    def _device(self, tensor: Tensor) -> torch.device:
        here = self._place(tensor)
        found: torch.device = self._true_device(tensor) if here is None else self._places[here]
        return found

    def _real(self, tensor: Tensor) -> Tensor:
        """Return values on the CPU; ones stand for unknown ones."""
        if self._place(tensor) is None:
            return tensor
        with _disable_current_modes():
            known = self.values_of(tensor)
            if known is None:
                self._ledger.stand_ins.note(torch.ops.aten._to_copy.default, "values that are read: ones")
                known = torch.ones(tensor.shape, dtype=tensor.dtype)
            return known

    def _data_ptr(self, tensor: Tensor) -> int:
        """Return an address that no other storage has: scripts tell by it what is shared."""
        if self._place(tensor) is None:
            return self._true_data_ptr(tensor)
        return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.itemsize

    def _numpy(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._place(tensor) is Place.DEVICE:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return self._true_numpy(self._real(tensor), *args, **kwargs)

    def _show(self, tensor: Tensor, *args: Any, **kwargs: Any) -> str:
        here = self._place(tensor)
        if here is None:
            return str(self._true_repr(tensor, *args, **kwargs))
        return f"tensor(..., device='{self._places[here]}', size={tuple(tensor.shape)}, dtype={tensor.dtype})"

    def _type(self, tensor: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, str) and ".cuda." in dtype:
            return tensor.to(_CARD, getattr(torch, dtype.rpartition(".")[2]).dtype)
        if dtype is not None:
            return self._true_type(tensor, dtype, *args, **kwargs)
        name, here = self._true_type(tensor).replace("torch.meta.", "torch."), self._place(tensor)
        return name.replace("torch.", "torch.cuda.", 1) if here is Place.DEVICE else name

    def _set_item(self, tensor: Tensor, index: Any, value: Any) -> None:
        """Set elements; a number goes by way of the CPU, where it is known (torch would make it on the meta device)."""
        if isinstance(value, bool | int | float) and self._place(tensor) is not None:
            value = self._true_tensor(value, dtype=tensor.dtype, device="cpu")
        self._true_set_item(tensor, index, value)

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        """Let a tensor have other data; on a card's machine it is all the same whether they were read from a file.

        A real tensor that gets virtual data stays the Python object that modules, optimizers and ties know of, with
        its gradient; a graph that was recorded before would not reach it, as little as after ``swap_tensors``.
        """
        if is_truly_meta(tensor) == is_truly_meta(value) or (self._place(value) or self._place(tensor)) is None:
            self._true_data.__set__(tensor, value)
        elif is_truly_meta(tensor):
            with self._ledger.moving_to(Place.HOST):
                self._true_data.__set__(tensor, torch.ops.aten._to_copy(value, device=_META))
        else:
            gradient = tensor.grad if tensor.is_leaf else None
            if gradient is not None:
                gradient.data = gradient.to(value.device, value.dtype)
            made = torch.Tensor._make_subclass(torch.Tensor, value.detach(), tensor.requires_grad)
            made.grad = gradient
            torch._C._swap_tensor_impl(tensor, made)

    def may_share_type(self, tensor: Tensor, other: Tensor) -> bool:
        """Return whether ``tensor.data = other`` keeps the object: so ``Module.to`` decides whether parameters live on.

        CPU and CUDA share a type, meta shares it with neither. A meta tensor of the script's own is that; a virtual
        one is on the CPU or on the card.
        """
        is_meta = tuple(is_truly_meta(one) and self._ledger.place_of(one) is None for one in (tensor, other))
        kinds = {type(tensor), type(other)}
        if any(kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in kinds):
            return self._true_shares_type(tensor, other)
        if tensor.layout is not other.layout:
            return False
        return is_meta[0] == is_meta[1]

    def _new_tensor(self, tensor: Tensor, data: Any, **kwargs: Any) -> Tensor:
        if self._place(tensor) is None and _as_device(kwargs.get("device")) in {None, torch.device("cpu")}:
            return self._true_new(tensor, data, **kwargs)
        target = kwargs.pop("device", None) or tensor.device
        return torch.tensor(data, dtype=kwargs.pop("dtype", tensor.dtype), device=target, **kwargs)

    def _new(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return a tensor of the same place and type, of a size or of data; the old name of ``new_empty``."""
        if self._place(tensor) is None or (args and isinstance(args[0], Tensor | torch.UntypedStorage)):
            return self._true_legacy_new(tensor, *args, **kwargs)
        size = kwargs.get("size", args)
        if args and isinstance(args[0], torch.Size):
            return tensor.new_empty(args[0])
        if args and not isinstance(args[0], Integral):
            return tensor.new_tensor(args[0])
        return tensor.new_empty(tuple(size) or (0,))

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.overrides.has_torch_function_unary(tensor):  # a subclass has a say
            method = vars(torch.Tensor)["to"]
            moved: Tensor = torch.overrides.handle_torch_function(method, (tensor,), tensor, *args, **kwargs)
            return moved
        here = self._ledger.place_of(tensor)
        device, dtype, copies = _parse_to(args, kwargs)
        stays = device is None or (device.type == "cpu" and not is_truly_meta(tensor))
        if self._ledger.is_inside or (here is None and stays):
            return self._true_to(tensor, *args, **kwargs)
        if device is None:
            assert here is not None
            device = self._places[here]
        if device.type == "meta":
            return torch.empty_like(tensor, device=device, dtype=dtype or tensor.dtype)
        if here is None and is_truly_meta(tensor):
            raise NotImplementedError("Cannot copy out of meta tensor; no data! Use torch.nn.Module.to_empty().")
        target = Place.DEVICE if device.type == "cuda" else Place.HOST
        layout = kwargs.get("memory_format")
        is_as_asked = dtype in {None, tensor.dtype} and (layout is None or tensor.is_contiguous(memory_format=layout))
        if here is target and not copies and is_as_asked:
            return tensor
        with self._ledger.moving_to(target):
            made: Tensor = torch.ops.aten._to_copy(
                tensor, dtype=dtype or tensor.dtype, device=_META, memory_format=layout
            )
            return made


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what behaves as a method where it is an attribute of a class."""
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
        device = _as_device(first if args else kwargs.get("device"))
        dtype, rest = (args[1], args[2:]) if len(args) > 1 else (kwargs.get("dtype"), ())
    return device, dtype, bool(kwargs.get("copy", rest[1] if len(rest) > 1 else False))


class VirtualStream:
    """A stream, or an event on it, of a card that has done everything at once."""

    cuda_stream = 0
    cuda_event = 0
    stream_id = 0
    device = _CARD
    device_index = 0
    priority = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_args: object) -> None:
        pass

    def query(self) -> bool:
        """Say that all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Say that no graph is being captured."""
        return False

    def elapsed_time(self, _other: object) -> float:
        """Return milliseconds: a stand-in; the report has the estimated time of a step."""
        return 1.0

    def record_event(self, event: "VirtualStream | None" = None) -> "VirtualStream":
        """Return an event that has happened."""
        return event or VirtualStream()

    def synchronize(self, *_args: object) -> None:
        """Wait for nothing."""

    wait_event = wait_stream = record = wait = synchronize


class _Properties:
    """``torch.cuda.get_device_properties``."""

    def __init__(self, ledger: VirtualLedger) -> None:
        card = ledger.card
        self.name = card.name
        self.total_memory = card.memory_bytes
        self.major, self.minor = (int(part) for part in card.compute_capability.split("."))
        self.multi_processor_count = card.sms
        self.is_integrated = self.is_multi_gpu_board = 0
        self.warp_size = 32
        self.max_threads_per_multi_processor = 1536
        self.regs_per_multiprocessor = 65536
        self.shared_memory_per_block_optin = 101376
        self.shared_memory_per_multiprocessor = 102400
        self.L2_cache_size = 0
        self.gcnArchName = ""


class _CudaModule:
    """``torch.cuda``."""

    def __init__(self, ledger: VirtualLedger) -> None:
        self._ledger = ledger

    def names(self) -> dict[str, Any]:
        """Return what to replace."""
        ledger, allocator, card = self._ledger, self._ledger.allocator, self._ledger.card
        properties = _Properties(ledger)
        capability = (properties.major, properties.minor)

        def context(*_args: Any, **_kwargs: Any) -> Any:
            return contextlib.nullcontext()

        def stats(*_args: Any, **_kwargs: Any) -> dict[str, int]:
            found = {}
            for name in _COUNTERS:
                found[f"{name}.all.current"] = getattr(allocator, name)
                found[f"{name}.all.peak"] = getattr(allocator, f"peak_{name}")
            return found | {"num_alloc_retries": allocator.num_alloc_retries, "num_ooms": allocator.num_ooms}

        def memory_info(*_args: Any, **_kwargs: Any) -> tuple[int, int]:
            return card.allocator_capacity_bytes - allocator.reserved_bytes, card.memory_bytes

        def state(*_args: Any) -> Tensor:
            return torch.tensor([0] * 16, dtype=torch.uint8, device="cpu")

        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_lazy_init": _do_nothing,
            "init": _do_nothing,
            "_is_in_bad_fork": lambda: False,
            "device_count": lambda: ledger.num_cards,
            "current_device": lambda: ledger.card_index,
            "set_device": _do_nothing,
            "device": context,
            "device_of": context,
            "_DeviceGuard": context,
            "get_device_name": lambda *_args, **_kwargs: card.name,
            "get_device_capability": lambda *_args, **_kwargs: capability,
            "get_device_properties": lambda *_args, **_kwargs: properties,
            "get_arch_list": lambda: [f"sm_{capability[0]}{capability[1]}"],
            "is_bf16_supported": lambda *_args, **_kwargs: capability[0] >= 8,
            "is_tf32_supported": lambda: capability[0] >= 8,
            "memory_allocated": lambda *_args, **_kwargs: allocator.allocated_bytes,
            "max_memory_allocated": lambda *_args, **_kwargs: allocator.peak_allocated_bytes,
            "memory_reserved": lambda *_args, **_kwargs: allocator.reserved_bytes,
            "max_memory_reserved": lambda *_args, **_kwargs: allocator.peak_reserved_bytes,
            "memory_cached": lambda *_args, **_kwargs: allocator.reserved_bytes,
            "max_memory_cached": lambda *_args, **_kwargs: allocator.peak_reserved_bytes,
            "memory_stats": stats,
            "memory_summary": lambda *_args, **_kwargs: "\n".join(f"{k}: {v}" for k, v in stats().items()),
            "mem_get_info": memory_info,
            "reset_peak_memory_stats": lambda *_args, **_kwargs: allocator.reset_peaks(),
            "reset_max_memory_allocated": lambda *_args, **_kwargs: allocator.reset_peaks(),
            "reset_max_memory_reserved": lambda *_args, **_kwargs: allocator.reset_peaks(),
            "reset_max_memory_cached": lambda *_args, **_kwargs: allocator.reset_peaks(),
            "reset_accumulated_memory_stats": _do_nothing,
            "set_per_process_memory_fraction": self._set_fraction,
            "empty_cache": ledger.release_cache,
            "ipc_collect": _do_nothing,
            "synchronize": _do_nothing,
            "current_stream": VirtualStream,
            "default_stream": VirtualStream,
            "Stream": VirtualStream,
            "Event": VirtualStream,
            "stream": context,
            "set_stream": _do_nothing,
            "manual_seed": _do_nothing,
            "manual_seed_all": _do_nothing,
            "seed": _do_nothing,
            "seed_all": _do_nothing,
            "initial_seed": lambda: 0,
            "get_rng_state": state,
            "get_rng_state_all": lambda: [state()],
            "set_rng_state": _do_nothing,
            "set_rng_state_all": _do_nothing,
            "utilization": lambda *_args, **_kwargs: 100,
            "is_current_stream_capturing": lambda: False,
        }

    def _set_fraction(self, fraction: float, *_args: Any) -> None:
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        card = self._ledger.card
        self._ledger.allocator.capacity_bytes = min(int(fraction * card.memory_bytes), card.allocator_capacity_bytes)


class _DeviceType(type):
    """Passes for the type that it stands for."""

    def __call__(cls, device: Any = None, index: int | None = None, **kwargs: Any) -> Any:
        """Return a device; a number alone is a card, whatever torch was built for."""
        if isinstance(device, int) and index is None:
            return _TRUE_DEVICE("cuda", device)
        given = [value for value in (kwargs.get("type", device), index) if value is not None]
        return _TRUE_DEVICE(*given)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _TRUE_DEVICE)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _TRUE_DEVICE

    def __hash__(cls) -> int:
        return hash(_TRUE_DEVICE)


class _Device(metaclass=_DeviceType):
    """``torch.device`` of a torch that was built with CUDA."""


class _TorchFunctions:
    """Functions of ``torch`` that take a device, or ask for one."""

    def __init__(self, ledger: VirtualLedger, autocast: Autocast) -> None:
        self._ledger = ledger
        self._autocast = autocast

    def names(self) -> dict[str, Any]:
        """Return what to replace."""
        found: dict[str, Any] = {name: _without_pins(getattr(torch, name)) for name in _FACTORIES}
        for name in ("tensor", "as_tensor", "asarray"):
            found[name] = _from_data(getattr(torch, name))
        true_set, true_clear = torch.set_autocast_enabled, torch.clear_autocast_cache

        def set_enabled(*args: Any) -> None:
            true_set(*args)
            if args[0] == "cuda" or len(args) == 1:
                self._autocast.enable(is_enabled=bool(args[-1]))

        def clear() -> None:
            true_clear()
            self._autocast.clear_cache()

        true_generator = torch.Generator

        class Generator(true_generator):  # type: ignore[misc, valid-type]
            """A generator whose numbers nobody draws."""

            def __new__(cls, device: Any = "cpu") -> Any:  # noqa: ARG004  torch's signature
                return super().__new__(cls, device="cpu")

            def __init__(self, device: Any = "cpu") -> None:
                self._named = torch.device(device)

            @property
            def device(self) -> torch.device:
                return self._named

        found |= {
            "set_autocast_enabled": set_enabled,
            "set_autocast_gpu_enabled": lambda enabled: set_enabled("cuda", enabled),
            "clear_autocast_cache": clear,
            "Generator": Generator,
            "compile": partial(_not_compiled, self._ledger),
            "device": _Device,
            "get_default_device": _default_device,
            "get_device_module": lambda *_args: torch.cuda,
        }
        return found


def _note_save(ledger: VirtualLedger) -> None:
    ledger.seen.num_saves += 1


def _not_compiled(ledger: VirtualLedger, model: Any = None, **kwargs: Any) -> Any:
    """Return what was to be compiled as it is: a virtual card runs eager code.

    One function is left out: an update of a parameter that torchao compiles, and only so, into a kernel that writes
    into its arguments (torchao/optim/adam.py); eager it would hold copies in fp32 that no card ever sees.
    """
    module = getattr(model, "__module__", None) or ""
    if module.startswith("torchao.") and getattr(model, "__name__", "") == "single_param_adam":
        return _do_nothing
    if not kwargs.get("disable"):
        ledger.seen.compiled.append(f"torch.compile at {where_called()}")
    return (lambda found: found) if model is None else model


def _without_pins(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(*args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("pin_memory", None)
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        return function(*args, **kwargs)

    return make


def _from_data(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Tensor:
        kwargs.pop("pin_memory", None)
        target = _as_device(device)
        if target is None:
            target = data.device if isinstance(data, Tensor) else _default_device()
        if target.type == "meta":
            return function(data, *args, device=target, **kwargs).requires_grad_(requires_grad)
        if isinstance(data, Tensor):
            made = data.to(target) if not args else data.to(target, args[0])
            made = made.to(kwargs["dtype"]) if kwargs.get("dtype") is not None else made
        else:
            if isinstance(data, list | tuple):
                data = _numbers(data)
            made = function(data, *args, device="cpu", **kwargs).to(target)
        return made.requires_grad_() if requires_grad else made

    return make


def _default_device() -> torch.device:
    """Return what ``torch.get_default_device`` does, which makes a tensor to learn its index."""
    modes = (mode for mode in reversed(_get_current_function_mode_stack()) if isinstance(mode, DeviceContext))
    context = next(modes, getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None))
    found = torch.device("cpu") if context is None else context.device
    return _CARD if found.type == "cuda" else found


def _numbers(data: Any) -> Any:
    if isinstance(data, list | tuple):
        return [_numbers(item) for item in data]
    return data.item() if isinstance(data, Tensor) and data.numel() == 1 else data
