# mypy: disable-error-code="no-untyped-call"
"""``torch.compile`` on a virtual card: the function's graph, cut into forward and backward as Inductor's is.

At the first call with arguments of a kind the function runs on tensors without values, as in ``torch.export``. Torch
records its graph, decomposes it as for Inductor, and cuts the joint graph by ``min_cut_rematerialization_partition``,
which decides what is saved and what is computed anew. ``compiled_graph.py`` then makes and frees a graph's buffers.

What cannot be recorded (a value that is read, a break that the code asks for, backward inside) runs as eager code, which
needs more, and is noted with its reason. Breaks that only Dynamo would make are not seen: such code is one graph here.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from types import CellType, FunctionType
from typing import Any, NoReturn
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils.weak import WeakIdKeyDictionary

from hybridtrain.virtual_gpu.facade.compiled_graph import GraphBuffers
from hybridtrain.virtual_gpu.facade.cuda_paths import Autocast, choose_attention
from hybridtrain.virtual_gpu.facade.virtual_ledger import VirtualLedger

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
_OF_MODULES = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl"}
_FEW_LAYERS = 8
"""Layers of one class from which a model is a chain of graphs."""
_NUMBERS = itertools.count(1)
"""Numbers of checkpointed calls in a graph: at the boundary of two calls something is saved."""
Maker = Callable[[Iterator[Tensor]], Tensor]


class NotCapturedError(Exception):
    """A function cannot be one graph, for the reason of the message."""


def compiled(ledger: VirtualLedger, function: Any, place: str) -> Any:
    """Return what ``torch.compile`` would: a function, or a module that wraps the given one.

    Args:
        place: Where the code asked for it, for notes.
    """
    if isinstance(function, nn.Module):
        return _CompiledModule(function, lambda _call: CompiledFunction(ledger, function, place))
    return CompiledFunction(ledger, function, place)


class _CompiledModule(OptimizedModule):
    """Torch's wrapper, without its warning of hooks, which are the virtual card's own, and without Dynamo's rules."""

    def _initialize(self) -> None:
        self.forward = self.dynamo_ctx(self._orig_mod)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module.__call__(self, *args, **kwargs)


class CompiledFunction:
    """A function, or the call of a module, that is traced once for each kind of arguments."""

    def __init__(self, ledger: VirtualLedger, function: Any, place: str) -> None:
        self._ledger, self._function, self._place = ledger, function, place
        owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        self._module = owner if isinstance(owner, nn.Module) else None
        self._is_whole = function is owner or getattr(function, "__name__", "") in {"_call_impl", "forward"}
        self._known = _KNOWN.setdefault(ledger, {})
        self._who = None if self._is_whole and self._module is not None else function  # layers of one make share graphs
        if not isinstance(function, nn.Module):
            update_wrapper(self, function, updated=())
        self._torchdynamo_orig_callable = function

    def __get__(self, instance: Any, kind: type | None = None) -> Any:
        return self if instance is None else partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph of such arguments; outside the virtual card, and inside of another graph, the function."""
        if not any(mode is self._ledger for mode in _get_current_dispatch_mode_stack()):
            return self._call_plainly(*args, **kwargs)
        inner = self._inside_hooks()
        if inner is not None:
            with mock.patch.object(inner, "forward", CompiledFunction(self._ledger, inner.forward, self._place)):
                return self._call_plainly(*args, **kwargs)
        with self._as_module():
            return self._call(args, kwargs)

    def _inside_hooks(self) -> nn.Module | None:
        """Return the module whose forward pass alone is compiled, as what surrounds it is not: hooks, and DDP."""
        module = self._module
        if module is None or not self._is_whole or getattr(self._function, "__name__", "") == "forward":
            return None
        if isinstance(module, DistributedDataParallel):
            wrapped: nn.Module = module.module
            return wrapped
        return module if module._forward_hooks or module._forward_pre_hooks else None

    def _call_plainly(self, *args: Any, **kwargs: Any) -> Any:
        if self._module is None or self._function is not self._module:
            return self._function(*args, **kwargs)
        return self._module._call_impl(*args, **kwargs)

    @contextmanager
    def _as_module(self) -> Iterator[None]:
        """Tell the virtual card of a pass through a module that does not tell it by itself."""
        hooks = torch.nn.modules.module
        module = self._module
        if module is None or not self._is_whole or getattr(self._function, "__name__", "") == "forward":
            yield
            return
        for before in [*hooks._global_forward_pre_hooks.values()]:
            before(module, ())
        try:
            yield
        finally:
            for after in [*hooks._global_forward_hooks.values()]:
                after(module, (), None)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = _Call.of(self._function, self._module, args, kwargs)
        key = self._who, call.key
        if key not in self._known:
            self._known[key] = self._find(call)
        graphs = self._known[key]
        if graphs is None:
            return self._call_plainly(*args, **kwargs)
        return graphs.run(self, call) if isinstance(graphs, _Chain) else graphs.run(call)

    def _find(self, call: "_Call") -> "_Graphs | _Chain | None":
        """Trace a call, as a chain of layers if it is one; return None for what runs as eager code."""
        try:
            if self._module is not None and self._is_whole:
                layers = _repeated(self._module)
                if layers:
                    try:
                        found: _Graphs | _Chain = _chain(self, call, layers)
                    except Exception:  # noqa: BLE001  then all is one graph
                        found = _trace(self._ledger, call, self._call_plainly)
                else:
                    alike = self._who, call.shape_key, _signature(self._ledger, call, self._call_plainly)[0]
                    if alike not in self._known:
                        self._known[alike] = _trace(self._ledger, call, self._call_plainly)
                    found = self._known[alike]  # type: ignore[assignment]
            else:
                found = _trace(self._ledger, call, self._call_plainly)
        except Exception as error:  # noqa: BLE001  whatever it is, eager code is an upper bound
            reason = str(error).strip().partition("\n")[0][:100]
            if not isinstance(error, NotCapturedError):
                reason = f"{type(error).__name__}: {reason}"
            self._ledger.seen.compiled.append(f"{self._place} ({reason})")
            return None
        self._ledger.seen.captured.append(self._place)
        return found


_KNOWN: WeakKeyDictionary[VirtualLedger, dict[Hashable, "_Graphs | _Chain | None"]] = WeakKeyDictionary()
"""Graphs of each card; None: of what is run as eager code."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """A place that holds a tensor: of a module, a closure or a module of Python."""

    holder: Any
    name: str

    def put(self, value: Any) -> None:
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.name] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A tensor as its plain parts, and the way to rebuild it from such."""

    tensors: list[Tensor]
    make: Maker

    @staticmethod
    def of(tensor: Tensor) -> "_Part":
        if not is_traceable_wrapper_subclass(tensor):
            return _Part(tensors=[tensor], make=next)
        kind, size, stride = type(tensor), tensor.shape, tensor.stride()
        names, context = tensor.__tensor_flatten__()

        def make(left: Iterator[Tensor]) -> Tensor:
            inner = {name: next(left) for name in names}
            made: Tensor = kind.__tensor_unflatten__(inner, context, size, stride)
            return made

        return _Part(tensors=[getattr(tensor, name) for name in names], make=make)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of a function: every tensor that it can reach, and what else decides its graph."""

    modules: list[nn.Module]
    slots: list[tuple[_Slot, int]]
    """Places of tensors, each with its tensor's number."""
    parts: list[_Part]
    num_held: int
    """Tensors that are not arguments; they come first."""
    arguments: list[Any]
    """Leaves of the arguments; tensors by their numbers, in ``places``."""
    places: dict[int, int]
    spec: pytree.TreeSpec
    key: Hashable
    shape_key: Hashable
    """The part of the key that does not come from attributes of modules."""

    @staticmethod
    def of(function: Any, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Call":
        leaves, spec = pytree.tree_flatten((args, kwargs))
        modules = [] if module is None else [module]
        modules += [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
        free = [] if module is function else _held_by(function)
        modules += [value for _, value in free if isinstance(value, nn.Module)]
        modules = list({id(one): one for one in modules}.values())
        found = [(slot, value) for slot, value in free if isinstance(value, Tensor)]
        each = list({id(one): one for root in modules for one in root.modules()}.values())
        for one in each:
            found += [
                (_Slot(holder, name), value)
                for holder in (one._parameters, one._buffers, vars(one))
                for name, value in holder.items()
                if isinstance(value, Tensor)
            ]
        numbers: dict[int, int] = {}
        tensors: list[Tensor] = []
        for _, value in found:
            if numbers.setdefault(id(value), len(tensors)) == len(tensors):
                tensors.append(value)
        num_held = len(tensors)
        places = {}
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                places[position] = len(tensors)
                tensors.append(leaf)
        parts = [_Part.of(tensor) for tensor in tensors]
        rest = tuple(_constant(leaf) for n, leaf in enumerate(leaves) if n not in places)
        kinds = tuple(_kind(tensor) for part in parts for tensor in part.tensors)
        shape_key = (
            kinds, tuple(numbers[id(value)] for _, value in found), str(spec), rest, tuple(type(one) for one in each),
            torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"),
        )  # fmt: skip
        key = shape_key, tuple(_facts(one) for one in each)
        return _Call(
            modules=modules, slots=[(slot, numbers[id(value)]) for slot, value in found], parts=parts,
            num_held=num_held, arguments=leaves, places=places, spec=spec, key=key, shape_key=shape_key,
        )  # fmt: skip

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(self.arguments)
        for position, number in self.places.items():
            leaves[position] = tensors[number]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for part in self.parts for tensor in part.tensors]


def _held_by(function: Any) -> list[tuple[_Slot, Any]]:
    """Return what a function's closure and the names that it uses hold, two functions deep."""
    found: list[tuple[_Slot, Any]] = []
    left = [(function, 0)]
    while left:
        one, depth = left.pop()
        if isinstance(one, partial):
            left += [(value, depth) for value in (one.func, *one.args, *one.keywords.values())]
            continue
        if isinstance(one, nn.Module):
            found.append((_Slot({}, ""), one))
            continue
        owner = getattr(one, "__self__", None)
        if isinstance(owner, nn.Module):
            found.append((_Slot({}, ""), owner))
        elif owner is not None:
            found += (
                [(_Slot({}, ""), value) for value in vars(owner).values() if isinstance(value, nn.Module)]
                if (hasattr(owner, "__dict__"))
                else []
            )
        plain = getattr(one, "__wrapped__", None) or getattr(one, "__func__", one)
        if not isinstance(plain, FunctionType):
            continue
        held = [(_Slot(cell, "cell_contents"), _contents(cell)) for cell in plain.__closure__ or ()]
        space = plain.__globals__
        held += [(_Slot(space, name), space[name]) for name in plain.__code__.co_names if name in space]
        found += [(slot, value) for slot, value in held if isinstance(value, nn.Module | Tensor)]
        if depth < 2:
            left += [(value, depth + 1) for _, value in held if isinstance(value, FunctionType | partial)]
    return found


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _constant(value: Any) -> Hashable:
    return (type(value), value) if isinstance(value, _PLAIN) else (type(value), id(value))


def _facts(module: nn.Module) -> Hashable:
    """Return what decides a module's graph beside its tensors: its type, mode and own attributes."""
    own = vars(module)
    names = [name for name in own if name not in _OF_MODULES and not isinstance(own[name], Tensor)]
    return type(module), module.training, tuple((name, _constant(own[name])) for name in names)


def _kind(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _twin(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


@dataclass(kw_only=True)
class _Graphs:
    """Graphs of a function for one kind of arguments."""

    run_graphs: Callable[..., Sequence[Tensor]] = lambda *_: ()
    spec: pytree.TreeSpec | None = None
    """Of the result."""
    leaves: list[Any] = field(default_factory=list)
    """Of the result; tensors are replaced."""
    assigned: list[tuple[int, str, Any]] = field(default_factory=list)
    """Attributes of modules that the function sets: number of the module, name, value; tensors are replaced."""

    def run(self, call: _Call) -> Any:
        """Return the function's result, and set the attributes that it sets."""
        results = iter(self.run_graphs(*call.tensors))
        leaves = [next(results) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        each = [one for root in call.modules for one in root.modules()] if self.assigned else []
        for number, name, value in self.assigned:
            vars(each[number])[name] = next(results) if isinstance(value, Tensor) else value
        assert self.spec is not None
        return pytree.tree_unflatten(leaves, self.spec)


class _ModuleOfNodes:
    """Tells the ledger to which module the nodes of a graph belong, while it runs."""

    def __init__(self, ledger: VirtualLedger) -> None:
        self._ledger, self._outer, self._unit = ledger, ledger.current_module(), ""

    def enter(self, unit: str) -> None:
        if unit == self._unit:
            return
        if self._unit:
            self._ledger.leave_module()
        self._unit = unit
        if unit:
            self._ledger.enter_module(f"{self._outer}.{unit}" if self._outer else unit)


def _trace(ledger: VirtualLedger, call: _Call, function: Callable[..., Any]) -> _Graphs:
    graphs = _Graphs()

    def flat(*given: Tensor) -> list[Tensor]:
        left = iter(given)
        tensors = [part.make(left) for part in call.parts]
        args, kwargs = call.with_tensors(tensors)
        with _holding(call, tensors) as assigned, _OnHost():
            result = function(*args, **kwargs)
        graphs.leaves, graphs.spec = pytree.tree_flatten(result)
        graphs.assigned = assigned
        return [one for one in [*graphs.leaves, *(value for *_, value in assigned)] if isinstance(one, Tensor)]

    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> GraphBuffers:  # noqa: ARG001  torch's names
        return GraphBuffers(gm, partial(_ModuleOfNodes, ledger))

    traced = aot_function(
        flat, fw_compiler=compiler, bw_compiler=compiler,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(), keep_inference_input_mutations=True,
    )  # fmt: skip
    with _tracing(ledger, call.modules):
        traced(*(_twin(tensor) for tensor in call.tensors))
    graphs.run_graphs = traced
    return graphs


class _Signature(TorchDispatchMode):
    """Notes each op of a forward pass, its operands by the order in which they come up."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Hashable] = []
        self._numbers = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        meta = fx.traceback.current_meta
        leaves = pytree.tree_leaves((args, kwargs, out))
        marks = bool(meta.get("recompute")), meta.get("custom", {}).get("unit", "")
        self.ops.append((func, marks, tuple(self._fact(leaf) for leaf in leaves)))
        return out

    def _fact(self, leaf: Any) -> Hashable:
        if isinstance(leaf, Tensor):
            return self._numbers.setdefault(leaf, len(self._numbers)), _kind(leaf)
        return _constant(leaf)


def _signature(ledger: VirtualLedger, call: _Call, function: Callable[..., Any]) -> tuple[Hashable, Any]:
    """Return what a call computes, by which calls of one graph are known, and its result."""
    with _tracing(ledger, call.modules), _Signature() as seen:
        tensors = [part.make(iter([_twin(tensor) for tensor in part.tensors])) for part in call.parts]
        args, kwargs = call.with_tensors(tensors)
        with _holding(call, tensors), _OnHost():
            result = function(*args, **kwargs)
    return tuple(seen.ops), result


def _repeated(module: nn.Module) -> Sequence[nn.Module]:
    """Return the longest list of layers of one class, from ``_FEW_LAYERS`` on."""
    lists = [
        [*one] for one in module.modules()
        if isinstance(one, nn.ModuleList) and len(one) >= _FEW_LAYERS and len({type(layer) for layer in one}) == 1
    ]  # fmt: skip
    return max(lists, key=len, default=[])


class _Reached(BaseException):
    """The first layer of a chain is called."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.args_of_layer, self.surroundings = (args, kwargs), _surroundings()


def _surroundings() -> Hashable:
    """Return what around an op decides what it does, or what of it is kept."""
    backends = torch.backends.cuda
    return (
        bool(fx.traceback.current_meta.get("recompute")), torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"), backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(),
        torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Chain:
    """A model as three kinds of graphs: before its layers, of each layer, and after them.

    So a layer is traced once, and not as often as there are layers. Its results are in memory, as in a graph of the
    whole model, but for what its first op could fuse with.
    """

    layers: Sequence[Callable[..., Any]]
    before: _Graphs
    after: _Graphs
    passed: dict[int, int]
    """Leaf of a layer's arguments -> leaf of the previous layer's result."""

    def run(self, function: CompiledFunction, call: _Call) -> Any:
        """Return the model's result."""
        leaves, spec = pytree.tree_flatten(self.before.run(call))
        result: Any = None
        for number, layer in enumerate(self.layers):
            if number:
                results = pytree.tree_leaves(result)
                leaves = [results[self.passed[n]] if n in self.passed else leaf for n, leaf in enumerate(leaves)]
                del results
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            result = layer(*args, **kwargs)
        del leaves, args, kwargs
        return self.after.run(_after_call(function, call, result))


def _after_call(function: CompiledFunction, call: _Call, result: Any) -> _Call:
    args, kwargs = pytree.tree_unflatten(call.arguments, call.spec)
    return _Call.of(function._function, function._module, (result, args, kwargs), {})


def _chain(function: CompiledFunction, call: _Call, layers: Sequence[nn.Module]) -> _Chain:
    """Trace what is before and after a model's layers.

    Raises:
        NotCapturedError: A layer takes something else than the last one's result and what the first one takes.
    """
    ledger, plain = function._ledger, function._call_plainly

    def before(*args: Any, **kwargs: Any) -> Any:
        try:
            with mock.patch.object(layers[0], "forward", _raise_reached):
                plain(*args, **kwargs)
        except _Reached as reached:
            around.append(reached.surroundings)
            return reached.args_of_layer
        raise NotCapturedError("its layers are not called")

    around: list[Hashable] = []
    first = _trace(ledger, call, before)
    if any(not isinstance(leaf, (Tensor, *_PLAIN)) for leaf in first.leaves):
        raise NotCapturedError("its layers share an object")
    _, (args, kwargs) = _signature(ledger, call, before)
    inner = _Call.of(layers[0], layers[0], args, kwargs)
    forward = layers[0].forward

    def noting(*args: Any, **kwargs: Any) -> Any:
        around.append(_surroundings())
        return forward(*args, **kwargs)

    with mock.patch.object(layers[0], "forward", noting):
        _, result = _signature(ledger, inner, layers[0])
    if len(set(around)) > 1:
        raise NotCapturedError("a checkpoint or another context is around its layers")
    passed: dict[int, int] = {}
    calls: list[Any] = []

    def after(result: Any, args: Any, kwargs: Any) -> Any:
        calls.clear()
        found = {id(leaf): n for n, leaf in enumerate(pytree.tree_leaves(result))}

        def layer(*args: Any, **kwargs: Any) -> Any:
            calls.append(pytree.tree_leaves((args, kwargs)))
            return result

        with ExitStack() as stack:
            for one in layers:
                stack.enter_context(mock.patch.object(one, "forward", layer))
            out = plain(*args, **kwargs)
        passed.clear()
        passed.update({n: found[id(leaf)] for n, leaf in enumerate(calls[1]) if id(leaf) in found})
        if len(calls) != len(layers) or any(not _follows(one, calls[0], found, passed) for one in calls[1:]):
            raise NotCapturedError("its layers are no chain")
        return out

    last = _trace(ledger, _after_call(function, call, pytree.tree_map_only(Tensor, _twin, result)), after)
    compiled_layers = [CompiledFunction(ledger, layer, function._place) for layer in layers]
    return _Chain(layers=compiled_layers, before=first, after=last, passed=dict(passed))


def _follows(leaves: list[Any], first: list[Any], found: Mapping[int, int], passed: Mapping[int, int]) -> bool:
    """Return whether a layer takes the same leaves of the last one's result as the second, and else what the first did."""
    return len(leaves) == len(first) and all(
        found.get(id(leaf)) == passed[n] if n in passed else leaf is first[n] or leaf == first[n]
        for n, leaf in enumerate(leaves)
    )


def _raise_reached(*args: Any, **kwargs: Any) -> NoReturn:
    raise _Reached(args, kwargs)


@contextmanager
def _holding(call: _Call, tensors: Sequence[Tensor]) -> Iterator[list[tuple[int, str, Any]]]:
    """Let the function find traced tensors in every place; collect the attributes that it sets, and undo them.

    Raises:
        NotCapturedError: It changes a list or a mapping of a module.
    """
    each = [one for root in call.modules for one in root.modules()]
    before = [dict(vars(one)) for one in each]
    sizes = [_sizes(attributes) for attributes in before]
    previous = [(slot, _read(slot)) for slot, _ in call.slots]
    assigned: list[tuple[int, str, Any]] = []
    for slot, number in call.slots:
        slot.put(tensors[number])
    put = [dict(vars(one)) for one in each]
    try:
        yield assigned
    finally:
        after = [dict(vars(one)) for one in each]
        for number, one in enumerate(each):
            own = vars(one)
            own.clear()
            own.update(before[number])
            assigned += [
                (number, name, value)
                for name, value in after[number].items()
                if name not in put[number] or put[number][name] is not value
            ]
        for slot, value in previous:
            slot.put(value)
    if sizes != [_sizes(attributes) for attributes in before]:
        raise NotCapturedError("it changes a list of a module")
    if any(not isinstance(value, (Tensor, *_PLAIN)) for *_, value in assigned):
        raise NotCapturedError("it sets an attribute of a module that is no tensor or number")


def _read(slot: _Slot) -> Any:
    return slot.holder.cell_contents if isinstance(slot.holder, CellType) else slot.holder[slot.name]


def _sizes(attributes: dict[str, Any]) -> list[int]:
    return [len(value) for value in attributes.values() if isinstance(value, list | dict | set)]


class _OnHost(TorchFunctionMode):
    """Makes what code asks for on the card on the traced tensors' device; refuses what breaks a graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in {Tensor.backward, torch.autograd.grad, torch.autograd.backward}:
            raise NotCapturedError("backward inside")
        args = tuple(_off_card(value) for value in args)
        return func(*args, **{name: _off_card(value) for name, value in kwargs.items()})


def _off_card(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


@contextmanager
def _tracing(ledger: VirtualLedger, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Trace as on the card: nothing is counted, and composite ops choose what CUDA would."""
    paths = torch.library.Library("aten", "IMPL")
    with ExitStack() as stack:
        stack.callback(paths._destroy)
        paths.impl("scaled_dot_product_attention", choose_attention(ledger), "AutogradCPU")
        stack.enter_context(_disable_current_modes())
        stack.enter_context(_without_saved_tensor_hooks())
        stack.enter_context(mock.patch.object(Autocast, "_is_ours", lambda _self, tensor: tensor.is_floating_point()))
        for owner, name, value in _replaced(modules):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(torch.fx.traceback.preserve_node_meta())
        stack.enter_context(FakeTensorMode())  # of the CPU: on meta tensors a cross entropy has no gradient here
        outer, ledger.is_inside = ledger.is_inside, True
        try:
            yield
        finally:
            ledger.is_inside = outer


def _replaced(modules: Sequence[nn.Module]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements while a function is traced: what Dynamo treats by itself."""
    for owner in (torch.compiler, torch._dynamo):
        yield owner, "is_compiling", lambda: True
    yield torch.compiler, "is_dynamo_compiling", lambda: True
    yield torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _checkpointed
    yield torch.utils.checkpoint, "CheckpointFunction", _Reentrant
    for owner in (torch._VF, torch):
        yield owner, "dropout", _dropout
    yield torch._dynamo, "graph_break", _break
    enter, leave = _module_hooks(modules)
    hooks = torch.nn.modules.module
    yield hooks, "_global_forward_pre_hooks", OrderedDict({0: enter})
    yield hooks, "_global_forward_hooks", OrderedDict({0: leave})
    yield hooks, "_global_forward_hooks_always_called", OrderedDict({0: True})


def _break(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise NotCapturedError("it asks for a graph break")


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:  # noqa: A002  torch's names
    return torch.native_dropout(input, p, train)[0] if train and 0 < p < 1 else input * (0.0 if train and p else 1.0)


def _module_hooks(modules: Sequence[nn.Module]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return hooks that mark traced ops with the module that they belong to."""
    names = {one: name for root in modules for name, one in root.named_modules()}
    outer: list[Any] = []

    def enter(module: nn.Module, _args: Any) -> None:
        meta = fx.traceback.current_meta
        outer.append(meta.get("custom"))
        meta["custom"] = {**(outer[-1] or {}), "unit": names.get(module, "")}

    def leave(_module: nn.Module, _args: Any, _out: Any) -> None:
        found = outer.pop()
        if found is None:
            fx.traceback.current_meta.pop("custom", None)
        else:
            fx.traceback.current_meta["custom"] = found

    return enter, leave


@contextmanager
def _without_saved_tensor_hooks() -> Iterator[None]:
    """Hide saved tensors from checkpoints and offloaders, whose forward pass this is not."""
    autograd = torch._C._autograd
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def _marks() -> Any:
    """Return a context that marks all traced ops for recomputation, as Dynamo does (torch/_higher_order_ops/wrap.py)."""
    marks = {"recompute": torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": next(_NUMBERS)}
    return mock.patch.dict(fx.traceback.current_meta, marks)


def _checkpointed(
    _function: Any, _preserve: Any = True, context_fn: Any = torch.utils.checkpoint.noop_context_fn, *_rest: Any,
    **_kwargs: Any,
) -> Iterator[None]:  # fmt: skip
    """Surround the body of a checkpoint: its ops are computed anew, or as its own policy decides."""
    forward, _ = context_fn()
    with _marks(), forward:
        yield


class _Reentrant:
    """Stands for the other kind of checkpoint."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        with _marks():
            return function(*args)
