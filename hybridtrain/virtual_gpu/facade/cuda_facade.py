# mypy: disable-error-code="no-untyped-call"
"""A script's view of a card: ``torch.cuda``, tensor methods with a device, and other device APIs.

``facade`` replaces torch's attributes while it is open, and restores all. A real card is never used.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from hybridtrain.virtual_gpu.cards.card import Card
from hybridtrain.virtual_gpu.facade.checkpoint_files import checkpoint_files
from hybridtrain.virtual_gpu.facade.compiled_call import NotCapturedError
from hybridtrain.virtual_gpu.facade.cuda_module import CARD, answering, cuda_build, cuda_names, nothing
from hybridtrain.virtual_gpu.facade.cuda_paths import Autocast
from hybridtrain.virtual_gpu.facade.known_values import Place
from hybridtrain.virtual_gpu.facade.nvidia_smi import nvidia_smi
from hybridtrain.virtual_gpu.facade.nvml import nvml
from hybridtrain.virtual_gpu.facade.placeholders import where_called
from hybridtrain.virtual_gpu.facade.sequence_ops import Replaced, sequence_layers
from hybridtrain.virtual_gpu.facade.tensor_methods import TensorMethods, as_device
from hybridtrain.virtual_gpu.facade.tensor_types import CardType, card_types
from hybridtrain.virtual_gpu.facade.traced_attention import flex_attention
from hybridtrain.virtual_gpu.facade.triton_kernels import triton_kernels
from hybridtrain.virtual_gpu.facade.virtual_ledger import VirtualLedger
from hybridtrain.virtual_gpu.facade.worst_case import SAVING, WorstCase

_TRUE_DEVICE = torch.device
_FROM_DATA = ("tensor", "as_tensor", "asarray")
_NCCL_VERSION = (2, 27, 5)
"""Reported NCCL version; 2.10 can reduce bfloat16."""
_CUDNN_VERSION = 91002


@contextmanager
def facade(ledger: VirtualLedger, methods: TensorMethods, autocast: Autocast) -> Iterator[None]:
    """Present the ledger's card to all code in this process."""
    _device_constructors()  # kept by torch: must list its true functions
    cuda = cuda_names(ledger)

    def note_save() -> None:
        ledger.seen.num_saves += 1
        ledger.begin_phase(SAVING)

    context = _default_context()
    with ExitStack() as stack:
        stack.callback(torch.set_default_device, None if context is None else context.device)
        for replaced in (
            ((torch.Tensor, name, value) for name, value in methods.names().items()),
            ((torch.cuda, name, value) for name, value in (cuda | card_types()).items()),
            ((torch, name, value) for name, value in _torch_names(ledger, autocast).items()),
            [(torch, "_has_compatible_shallow_copy_type", methods.may_share_type)],
            _elsewhere(ledger, cuda),
            _kernels(ledger),
            _exchange(ledger),
            ledger.own_ops.names(),
            _build_of_cuda(ledger.card),
            _libraries(),
            triton_kernels(ledger),
        ):
            for owner, name, value in replaced:
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
        stack.enter_context(nvidia_smi(ledger.card, ledger.num_cards))
        stack.enter_context(nvml(ledger, cuda))
        # Threads that load weights would not be seen: what is watched is the thread that opened the block.
        stack.enter_context(mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}))
        stack.enter_context(checkpoint_files(methods.is_virtual, methods.values_of, note_save))
        yield


def _elsewhere(ledger: VirtualLedger, cuda: dict[str, Any]) -> Replaced:
    """Yield the replacements outside ``torch``, ``torch.cuda`` and ``Tensor``."""
    for module in (torch.cuda.memory, torch.cuda.random, torch.accelerator, torch.accelerator.memory):
        yield from ((module, name, value) for name, value in cuda.items() if hasattr(module, name))
    yield torch.accelerator, "current_accelerator", answering(lambda: torch.device("cuda"))
    for name in ("index", "idx"):
        yield torch.accelerator, f"current_device_{name}", answering(lambda: ledger.card_index)
        yield torch.accelerator, f"set_device_{name}", nothing()
    for name in ("mark", "range_push", "range_pop", "range_start", "range_end"):
        yield torch.cuda.nvtx, name, nothing()
    yield torch.cuda.nvtx, "range", contextmanager(lambda *_args, **_kwargs: iter([None]))  # decorates, too
    yield torch.cuda.memory, "_record_memory_history", nothing()
    yield torch.cuda.memory, "_dump_snapshot", _no_snapshot
    yield torch._C, "_cuda_getCurrentRawStream", lambda _device: 0
    yield torch._C._nn, "_parse_to", _numbers_as_cards(torch._C._nn._parse_to)
    one_hot = _one_hot(ledger)
    for module in (torch.nn.functional, torch._C._nn):
        yield module, "one_hot", one_hot
    yield torch.utils.data.DataLoader, "_get_iterator", lambda loader: _load_here(loader, ledger.worst)
    yield torch.jit._state._enabled, "enabled", False  # torch's own switch (PYTORCH_JIT=0): code stays as it is
    yield torch.compiler, "disable", _disabled
    for name in ("script", "trace"):
        yield torch.jit, name, _noted(ledger, getattr(torch.jit, name))
    yield import_module("torch.nn.parallel.data_parallel"), "scatter_kwargs", _to_one_card
    lazy = import_module("torch.nn.parameter").UninitializedTensorMixin
    allowed = [getattr(torch.Tensor, name) for name in ("cuda", "cpu", "to", "get_device")]
    yield lazy, "_allowed_methods", [*lazy._allowed_methods, *allowed]
    # Since 2.13 a truncated normal draws until no sample is rejected.
    yield torch.nn.init, "_no_grad_trunc_normal_", _without_doubt(ledger, torch.nn.init._no_grad_trunc_normal_)
    yield torch.nn.functional, "gaussian_nll_loss", _without_doubt(ledger, torch.nn.functional.gaussian_nll_loss)
    true_data_ptr, true_resize = torch.UntypedStorage.data_ptr, torch.UntypedStorage.resize_
    true_share = torch.UntypedStorage.share_memory_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        ledger.resize(storage, size)
        return true_resize(storage, size)

    def share(storage: torch.UntypedStorage) -> Any:
        """Share what has bytes; what is on a card is shared without being moved."""
        return true_share(storage) if true_data_ptr(storage) else storage

    yield torch.UntypedStorage, "data_ptr", lambda storage: true_data_ptr(storage) or storage._cdata
    yield torch.UntypedStorage, "resize_", resize
    yield torch.UntypedStorage, "share_memory_", share
    group = _group_by_place(torch.utils._foreach_utils._group_tensors_by_device_and_dtype)
    for module in (torch.utils._foreach_utils, torch.nn.utils.clip_grad):
        yield module, "_group_tensors_by_device_and_dtype", group
    yield torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(group)


def _no_snapshot(filename: str = "dump_snapshot.pickle", *_args: Any, **_kwargs: Any) -> None:
    told = f"{filename} is not written: hybridtrain virtual --snapshot FILE writes a snapshot of the virtual card"
    warnings.warn(told, stacklevel=2)


def _group_by_place(true_group: Callable[..., Any]) -> Callable[..., Any]:
    def group(tensorlistlist: Any, with_indices: bool = False) -> Any:
        """Group tensors as torch does, by their virtual devices."""
        named: dict[Any, Any] = {}
        for (_, dtype), (lists, indices) in true_group(tensorlistlist, with_indices).items():
            for position, first in enumerate(lists[0]):
                assert first is not None
                found, places = named.setdefault((first.device, dtype), ([[] for _ in lists], []))
                for members, member in zip(found, lists, strict=True):
                    members.extend(member[position : position + 1])
                places += indices[position : position + 1]
        return named

    return group


def _kernels(ledger: VirtualLedger) -> Replaced:
    """Yield the ops that CUDA runs in one kernel and the CPU does not."""
    nested = import_module("torch.nested._internal.nested_tensor").NestedTensor
    yield nested, "__new__", _off_the_card(ledger, nested.__new__)
    flex = import_module("torch.nn.attention.flex_attention")
    yield flex, "flex_attention", flex_attention(flex.flex_attention)
    yield from sequence_layers(
        lambda tensor: ledger.place_of(tensor) is Place.DEVICE,
        lambda told: ledger.seen.approximated.setdefault(told, where_called()),
    )
    sync_norm = torch.nn.modules._functions.SyncBatchNorm
    yield sync_norm, "forward", _of_all_ranks(sync_norm.forward)


def _off_the_card(ledger: VirtualLedger, true_new: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the constructor of jagged tensors, whose gradients torch makes with the driver's help."""

    def new(kind: type, values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if ledger.place_of(values) is Place.DEVICE:
            raise ledger.unplanned("jagged nested tensors on the card are not planned")
        return true_new(kind, values, *args, **kwargs)

    return new


def _of_all_ranks(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a synchronized norm that, as in a captured graph, does not look for ranks without samples."""

    def run(*args: Any) -> Any:
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            return forward(*args)

    return run


def _build_of_cuda(card: Card) -> Replaced:
    """Yield the build facts of a torch that was built with CUDA."""
    yield torch.version, "cuda", torch.version.cuda or cuda_build(card)[0]
    yield torch.backends.cuda, "is_built", lambda: True
    yield torch.backends.cuda, "is_flash_attention_available", lambda: True
    yield torch.backends.cudnn, "is_available", lambda: True
    yield torch.backends.cudnn, "version", lambda: _CUDNN_VERSION
    yield torch.backends.cudnn, "is_acceptable", lambda tensor: tensor.device.type == "cuda"
    yield torch.cuda.nccl, "version", lambda: _NCCL_VERSION
    yield torch.cuda.nccl, "is_available", lambda tensors: all(tensor.is_cuda for tensor in tensors)
    for module in (torch.distributed, import_module("torch.distributed.distributed_c10d")):
        yield module, "is_nccl_available", lambda: True


def _libraries() -> Replaced:
    """Yield the replacements in libraries that reach the driver by themselves."""
    if "bitsandbytes" in sys.modules:
        functional = import_module("bitsandbytes.functional")
        # Unified memory: of the driver, not of torch's allocator; pages stay where they were touched last.
        yield functional, "get_paged", _get_paged
        for name in ("prefetch_tensor", "fill", "_mul"):
            yield functional, name, nothing()
        # Tables that are kept as long as the process: those of one virtual card are nowhere on the next.
        yield functional, "name2qmap", {}
        yield import_module("bitsandbytes.backends.utils"), "_code_4bit_cache", {}


def _get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:  # noqa: ARG001
    """Return state that bitsandbytes would put into unified memory, marked by its own attribute."""
    made = torch.empty(shape, dtype=dtype, device="cpu")
    made.is_paged = True  # type: ignore[attr-defined]
    return made


def _noted(ledger: VirtualLedger, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(obj: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__")
        if caller == "torch._decomp.decompositions_for_jvp":  # once, for derivatives forward
            ours = {
                id(value): name for name, value in vars(torch).items() if getattr(value, "__module__", "") == __name__
            }
            builtins = {key: f"aten::{name}" for key, name in ours.items() if hasattr(torch.ops.aten, name)}
            with (
                mock.patch.object(torch.jit._state._enabled, "enabled", True),
                mock.patch.dict(torch.jit._builtins._get_builtin_table(), builtins),
                warnings.catch_warnings(action="ignore", category=DeprecationWarning),
            ):
                return function(obj, *args, **kwargs)
        if caller == "torch.utils.tensorboard._pytorch_graph":
            obj(*args[0]) if isinstance(args[0], tuple) else obj(args[0])  # a trace does
            return SimpleNamespace(graph=torch._C.Graph(), named_modules=obj.named_modules)
        if not (getattr(obj, "__module__", None) or "").startswith("torch."):
            ledger.seen.compiled.append(f"torch.jit.{function.__name__} at {where_called()}")
        return function(obj, *args, **kwargs)

    return call


def _to_one_card(inputs: Any, kwargs: Any, cards: Any, dim: int = 0) -> tuple[Any, Any]:  # noqa: ARG001  torch's names
    """Return the operands that ``DataParallel`` of one card passes on (torch/nn/parallel/scatter_gather.py).

    Raises:
        NotImplementedError: It is of several.
    """
    if len(cards) > 1:
        raise NotImplementedError(
            f"virtual GPU: DataParallel over {len(cards)} cards is not supported; use DistributedDataParallel with "
            f"--world, or DataParallel with one card (device_ids=[0])."
        )
    card = as_device(cards[0])
    inputs, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(card), (tuple(inputs), kwargs or {}))
    return (inputs,), (kwargs,)


def _without_doubt(ledger: VirtualLedger, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of torch whose questions about unknown values are all answered with no."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        with ledger.placeholders.answering(truth=False):
            return function(*args, **kwargs)

    return call


def _exchange(ledger: VirtualLedger) -> Replaced:
    """Yield DLPack's functions, which pass a virtual tensor on as it is."""
    true_to, true_from = torch._C._to_dlpack, torch.utils.dlpack.from_dlpack

    class Capsule(NamedTuple):
        tensor: Tensor

    def to_dlpack(tensor: Tensor) -> Any:
        return true_to(tensor) if ledger.place_of(tensor) is None else Capsule(tensor.detach())

    def from_dlpack(given: Any, **options: Any) -> Tensor:
        tensor = given.tensor if isinstance(given, Capsule) else given
        is_ours = isinstance(tensor, Tensor) and ledger.place_of(tensor) is not None
        return tensor.detach() if is_ours else true_from(given, **options)

    for module in (torch, torch.utils.dlpack):
        yield module, "to_dlpack", to_dlpack
        yield module, "from_dlpack", from_dlpack


def _numbers_as_cards(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return the reader of ``Module.to``'s arguments, to which a number alone is a card."""

    def parse_to(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (as_device(args[0]), *args[1:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = as_device(kwargs["device"])
        return parse(*args, **kwargs)

    return parse_to


def _one_hot(ledger: VirtualLedger) -> Callable[..., Tensor]:
    """Return a ``one_hot`` that scatters as CUDA's kernel does; on the meta device torch compares unknown numbers."""
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


def _load_here(loader: Any, worst: WorstCase | None) -> Any:
    """Return the iterator of a loader without workers: what they make could not be sent here, for it has no bytes."""
    workers, timeout, loader.num_workers, loader.timeout = loader.num_workers, loader.timeout, 0, 0
    try:
        made = _LoaderHere(loader)
    finally:
        loader.num_workers, loader.timeout = workers, timeout
    if worst is not None and made._dataset_kind == torch.utils.data._DatasetKind.Map and made._auto_collation:
        made._sampler_iter = worst.of_longest(made._sampler_iter, loader.dataset)
    if workers and loader.worker_init_fn is not None:  # as the only worker
        worker = torch.utils.data._utils.worker
        info = worker.WorkerInfo(id=0, num_workers=1, seed=int(made._base_seed), dataset=loader.dataset)
        with mock.patch.object(worker, "_worker_info", info):
            loader.worker_init_fn(0)
    return made


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


def _torch_names(ledger: VirtualLedger, autocast: Autocast) -> dict[str, Any]:
    """Return functions of ``torch`` that take a device, or ask for one."""
    true_set, true_clear, true_generator = torch.set_autocast_enabled, torch.clear_autocast_cache, torch.Generator
    with_device = {id(function) for function in _device_constructors()}
    makers = {name for name, value in vars(torch).items() if id(value) in with_device or name.endswith("_like")}

    def set_enabled(*args: Any) -> None:
        true_set(*args)
        if args[0] == "cuda" or len(args) == 1:
            autocast.enable(is_enabled=bool(args[-1]))

    def clear() -> None:
        true_clear()
        autocast.clear_cache()

    class Generator(true_generator):  # type: ignore[misc, valid-type]
        """A placeholder generator, whose numbers are never drawn."""

        def __new__(cls, device: Any = "cpu") -> Any:  # noqa: ARG004  torch's signature
            return super().__new__(cls, device="cpu")

        def __init__(self, device: Any = "cpu") -> None:
            self._named = torch.device(device)

        @property
        def device(self) -> torch.device:
            return self._named

    return {
        **{name: _without_pins(getattr(torch, name)) for name in makers.difference(_FROM_DATA)},
        **{name: _from_data(getattr(torch, name)) for name in _FROM_DATA},
        "sparse_coo_tensor": _sparse_of_values(ledger),
        "set_autocast_enabled": set_enabled,
        "set_autocast_gpu_enabled": lambda enabled: set_enabled("cuda", enabled),
        "clear_autocast_cache": clear,
        "Generator": Generator,
        "compile": partial(_compile, ledger),
        "set_default_tensor_type": _set_default_type,
        "device": _Device,
        "get_default_device": _default_device,
        "get_device_module": lambda *_args: torch.cuda,
    }


def _sparse_of_values(ledger: VirtualLedger) -> Callable[..., Tensor]:
    """Return the maker of sparse matrices that puts its places where the values really are: torch would lose them."""
    true_make = torch.sparse_coo_tensor

    def make(indices: Any, values: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(values, Tensor) and ledger.place_of(values) is Place.HOST:
            with _disable_current_modes():
                values = ledger.values.on_host(torch.ops.aten.sparse_coo_tensor.indices, values)
        return true_make(indices, values, *args, **kwargs)

    return make


def _compile(ledger: VirtualLedger, model: Any = None, **options: Any) -> Any:
    """Return the compiled function, planned as Inductor's graphs; for other backends the function, which is noted.

    One function is left out: an update of a parameter that torchao compiles, and only so, into a kernel that writes
    into its arguments (torchao/optim/adam.py); eager it would hold copies in fp32 that no card ever sees.
    """
    if model is None:
        return partial(_compile, ledger, **options)
    module = getattr(model, "__module__", None) or ""
    if module.startswith("torchao.") and getattr(model, "__name__", "") == "single_param_adam":
        return nothing()
    backend = options.get("backend", "inductor")
    if options.get("disable") or backend == "eager":
        return model
    place = f"torch.compile at {where_called()}"
    if backend != "inductor":
        ledger.seen.compiled.append(f"{place} (backend {getattr(backend, '__name__', backend)})")
        return model
    modes = torch._inductor.list_mode_options(options["mode"]) if options.get("mode") else {}
    if (modes | (options.get("options") or {})).get("triton.cudagraphs"):
        ledger.seen.approximated.setdefault("CUDA graphs keep pools of memory of their own, not counted", place)
    return import_module("hybridtrain.virtual_gpu.facade.compiled_code").compiled(ledger, model, place)


def _disabled(fn: Any = None, recursive: bool = True, **_options: Any) -> Any:
    """Return a function that breaks the graph of whoever calls it."""
    if fn is None:
        return partial(_disabled, recursive=recursive)
    if isinstance(fn, type | torch.nn.Module):
        return fn

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            raise NotCapturedError("it calls what torch.compiler.disable keeps out")
        return fn(*args, **kwargs)

    return call


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
        target = as_device(device)
        if target is None:
            target = data.device if isinstance(data, Tensor) else _default_device()
        if target.type == "meta":
            return function(data, *args, device=target, **kwargs).requires_grad_(requires_grad)
        if isinstance(data, Tensor):
            made = data.to(target, *args[:1])
            made = made.to(kwargs["dtype"]) if kwargs.get("dtype") is not None else made
        else:
            if isinstance(data, list | tuple):
                data = _numbers(data)
            made = function(data, *args, device="cpu", **kwargs).to(target)
        return made.requires_grad_() if requires_grad else made

    return make


def _set_default_type(kind: Any) -> None:
    """Set element type and device of new tensors, by the old name of both; a card's type is none of this torch."""
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
    torch.set_default_dtype(getattr(torch, name.rpartition(".")[2]).dtype)
    torch.set_default_device("cuda" if ".cuda." in name or isinstance(kind, CardType) else None)


def _default_context() -> DeviceContext | None:
    """Return the context of ``torch.set_default_device``; None: the CPU."""
    found: DeviceContext | None = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return found


def _default_device() -> torch.device:
    """Return the default device; torch's own function makes a tensor to learn its index."""
    modes = (mode for mode in reversed(_get_current_function_mode_stack()) if isinstance(mode, DeviceContext))
    context = next(modes, _default_context())
    found = torch.device("cpu") if context is None else context.device
    return CARD if found.type == "cuda" else found


def _numbers(data: Any) -> Any:
    if isinstance(data, list | tuple):
        return [_numbers(item) for item in data]
    return data.item() if isinstance(data, Tensor) and data.numel() == 1 else data
