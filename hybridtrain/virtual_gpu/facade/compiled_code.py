# mypy: disable-error-code="no-untyped-call"
"""``torch.compile`` on a virtual card: graphs of each kind of arguments, traced at its first call.

What cannot be traced (a value that is read, a break that the code asks for, backward inside) runs as eager code and is
noted with its reason. Breaks that only Dynamo would make are not seen: such code is one graph here.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, NoReturn
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hybridtrain.virtual_gpu.facade.compiled_call import PLAIN, Call, NotCapturedError, twin
from hybridtrain.virtual_gpu.facade.compiled_trace import Graphs, signature, trace
from hybridtrain.virtual_gpu.facade.virtual_ledger import VirtualLedger

_FEW_LAYERS = 8
"""Layers of one class from which a model is a chain of graphs."""


def compiled(ledger: VirtualLedger, function: Any, place: str) -> Any:
    """Return what ``torch.compile`` would: a function, or a module that wraps the given one.

    Args:
        ledger: The virtual card's.
        function: A function, a module or a method of one.
        place: Where the code asked for it, for notes.
    """
    if isinstance(function, nn.Module):
        make: Any = lambda _call: CompiledFunction(ledger, function, place)  # noqa: E731  in place of Dynamo's context
        return _CompiledModule(function, make)
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
        name = getattr(function, "__name__", "")
        self._is_whole = self._module is not None and (function is owner or name in {"_call_impl", "forward"})
        self._is_call = self._is_whole and name != "forward"
        self._known = _KNOWN.setdefault(ledger, {})
        self._who = None if self._is_whole else function  # layers of one make share graphs
        if not isinstance(function, nn.Module):
            update_wrapper(self, function, updated=())
        self._torchdynamo_orig_callable = function

    def __get__(self, instance: Any, kind: type | None = None) -> Any:
        return self if instance is None else partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph of such arguments; outside the virtual card, and inside of another graph, the function."""
        if not any(mode is self._ledger for mode in _get_current_dispatch_mode_stack()):
            return self.call_plainly(*args, **kwargs)
        inner = self._inside_hooks()
        if inner is not None:
            with mock.patch.object(inner, "forward", CompiledFunction(self._ledger, inner.forward, self._place)):
                return self.call_plainly(*args, **kwargs)
        with self._as_module():
            return self._call(args, kwargs)

    def _inside_hooks(self) -> nn.Module | None:
        """Return the module whose forward pass alone is compiled, as what surrounds it is not: hooks, and DDP."""
        module = self._module
        if module is None or not self._is_call:
            return None
        if isinstance(module, DistributedDataParallel):
            wrapped: nn.Module = module.module
            return wrapped
        return module if module._forward_hooks or module._forward_pre_hooks else None

    def call_plainly(self, *args: Any, **kwargs: Any) -> Any:
        """Call what was to be compiled: of a module its own ``__call__``, which may be a checkpoint."""
        return self._function(*args, **kwargs)

    @contextmanager
    def _as_module(self) -> Iterator[None]:
        """Tell the virtual card of a pass through a module that does not tell it by itself."""
        hooks = torch.nn.modules.module
        module = self._module
        if module is None or not self._is_call:
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
        call = Call.of(self._function, self._module, args, kwargs)
        key = self._who, call.key
        if key not in self._known:
            self._known[key] = self._find(call)
        graphs = self._known[key]
        if graphs is None:
            return self.call_plainly(*args, **kwargs)
        return graphs.run(self, call) if isinstance(graphs, Chain) else graphs.run(call)

    def _find(self, call: "Call") -> "Graphs | Chain | None":
        """Trace a call; return None for what runs as eager code."""
        try:
            found = self._trace(call)
        except Exception as error:  # noqa: BLE001  whatever it is, eager code is an upper bound
            self._ledger.seen.compiled.append(f"{self._place} ({_reason(error)})")
            return None
        self._ledger.seen.captured.append(self._place)
        return found

    def _trace(self, call: "Call") -> "Graphs | Chain | None":
        """Return a chain of a module's layers if it is one, the graphs of a module of its make, or new graphs."""
        layers = repeated_layers(self._module) if self._is_whole and self._module is not None else None
        if layers:
            with suppress(Exception):  # then all is one graph
                return trace_chain(self, call, layers)
        elif layers is not None:
            alike = self._who, call.shape_key, signature(self._ledger, call, self.call_plainly)[0]
            if alike not in self._known:
                self._known[alike] = trace(self._ledger, call, self.call_plainly)
            return self._known[alike]
        return trace(self._ledger, call, self.call_plainly)


def _reason(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0][:100]
    if "FakeTensor" in text:
        return "it uses tensors that are neither its arguments nor its modules'"
    if isinstance(error, DataDependentOutputException | GuardOnDataDependentSymNode):
        return "it reads a value"
    return text if isinstance(error, NotCapturedError) else f"{type(error).__name__}: {text}"


_KNOWN: WeakKeyDictionary[VirtualLedger, dict[Hashable, "Graphs | Chain | None"]] = WeakKeyDictionary()
"""Graphs of each card; None: of what is run as eager code."""


def repeated_layers(module: nn.Module) -> Sequence[nn.Module]:
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
class Chain:
    """A model as three kinds of graphs: before its layers, of each layer, and after them.

    So a layer is traced once, and not as often as there are layers. Its results are in memory, as in a graph of the
    whole model, but for what its first op could fuse with.
    """

    layers: Sequence[Callable[..., Any]]
    before: Graphs
    after: Graphs
    passed: dict[int, int]
    """Leaf of a layer's arguments -> leaf of the previous layer's result."""

    def run(self, function: CompiledFunction, call: Call) -> Any:
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


def _after_call(function: CompiledFunction, call: Call, result: Any) -> Call:
    args, kwargs = pytree.tree_unflatten(call.arguments, call.spec)
    return Call.of(function._function, function._module, (result, args, kwargs), {})


def trace_chain(function: CompiledFunction, call: Call, layers: Sequence[nn.Module]) -> Chain:
    """Trace what is before and after a model's layers.

    Raises:
        NotCapturedError: A layer takes something else than the last one's result and what the first one takes.
    """
    ledger, plain = function._ledger, function.call_plainly

    def before(*args: Any, **kwargs: Any) -> Any:
        try:
            with mock.patch.object(layers[0], "forward", _raise_reached):
                plain(*args, **kwargs)
        except _Reached as reached:
            around.append(reached.surroundings)
            return reached.args_of_layer
        raise NotCapturedError("its layers are not called")

    around: list[Hashable] = []
    first = trace(ledger, call, before)
    if any(not isinstance(leaf, (Tensor, *PLAIN)) for leaf in first.leaves):
        raise NotCapturedError("its layers share an object")
    _, (args, kwargs) = signature(ledger, call, before)
    inner = Call.of(layers[0], layers[0], args, kwargs)
    forward = layers[0].forward

    def noting(*args: Any, **kwargs: Any) -> Any:
        around.append(_surroundings())
        return forward(*args, **kwargs)

    with mock.patch.object(layers[0], "forward", noting):
        _, result = signature(ledger, inner, layers[0])
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

    last = trace(ledger, _after_call(function, call, pytree.tree_map_only(Tensor, twin, result)), after)
    compiled_layers = [CompiledFunction(ledger, layer, function._place) for layer in layers]
    return Chain(layers=compiled_layers, before=first, after=last, passed=dict(passed))


def _follows(leaves: list[Any], first: list[Any], found: Mapping[int, int], passed: Mapping[int, int]) -> bool:
    """Return whether a layer takes what the second takes of the last one's result, and else what the first did."""
    return len(leaves) == len(first) and all(
        found.get(id(leaf)) == passed[n] if n in passed else leaf is first[n] or leaf == first[n]
        for n, leaf in enumerate(leaves)
    )


def _raise_reached(*args: Any, **kwargs: Any) -> NoReturn:
    raise _Reached(args, kwargs)
