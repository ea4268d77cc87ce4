# mypy: disable-error-code="no-untyped-call"
"""The graphs of a call: traced without values, cut into forward and backward as Inductor's are.

The function runs on tensors without values, as in ``torch.export``. Torch records its graph, decomposes it as for
Inductor, and cuts the joint graph by ``min_cut_rematerialization_partition``: what is saved, what is computed anew.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from hybridtrain.virtual_gpu.facade.compiled_call import Call, NotCapturedError, constant_of, holding, kind_of, twin
from hybridtrain.virtual_gpu.facade.compiled_graph import GraphBuffers
from hybridtrain.virtual_gpu.facade.cuda_paths import Autocast, choose_attention
from hybridtrain.virtual_gpu.facade.virtual_ledger import VirtualLedger

_HOST = torch.device("cpu")
_NUMBERS = itertools.count(1)
"""Numbers of checkpointed calls in a graph: at the boundary of two calls something is saved."""


@dataclass(kw_only=True)
class Graphs:
    """Graphs of a function for one kind of arguments."""

    run_graphs: Callable[..., Sequence[Tensor]] = lambda *_: ()
    spec: pytree.TreeSpec | None = None
    """Of the result."""
    leaves: list[Any] = field(default_factory=list)
    """Of the result; tensors are replaced."""
    assigned: list[tuple[int, str, Any]] = field(default_factory=list)
    """Attributes of modules that the function sets: number of the module, name, value; tensors are replaced."""

    def run(self, call: Call) -> Any:
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


def trace(ledger: VirtualLedger, call: Call, function: Callable[..., Any]) -> Graphs:
    """Return the graphs of ``function`` for such a call; of what cannot be traced, torch's own error.

    Raises:
        NotCapturedError: The function does what no graph has.
    """
    graphs, traced_call = Graphs(), [call]

    def flat(*given: Tensor) -> list[Tensor]:
        left, (call,) = iter(given), traced_call
        tensors = [part.make(left) for part in call.parts]
        args, kwargs = call.with_tensors(tensors)
        with holding(call, tensors) as assigned, OnHost():
            result = function(*args, **kwargs)
        graphs.leaves, graphs.spec = pytree.tree_flatten(result)
        graphs.assigned = assigned
        return [one for one in [*graphs.leaves, *(value for *_, value in assigned)] if isinstance(one, Tensor)]

    donated: set[str] = set()

    def forward(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> GraphBuffers:  # noqa: ARG001  torch's names
        made = GraphBuffers(gm, partial(_ModuleOfNodes, ledger))
        donated.update(made.donations())
        return made

    def backward(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> GraphBuffers:  # noqa: ARG001  torch's names
        return GraphBuffers(gm, partial(_ModuleOfNodes, ledger), frozenset(donated))

    traced = aot_function(
        flat, fw_compiler=forward, bw_compiler=backward,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(), keep_inference_input_mutations=True,
    )  # fmt: skip
    with tracing(ledger, call.modules):
        traced(*(twin(tensor) for tensor in call.tensors))
    traced_call.clear()  # its tensors are not to live as long as the graphs
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
            return self._numbers.setdefault(leaf, len(self._numbers)), kind_of(leaf)
        return constant_of(leaf)


def signature(ledger: VirtualLedger, call: Call, function: Callable[..., Any]) -> tuple[Hashable, Any]:
    """Return what a call computes, by which calls of one graph are known, and its result."""
    with tracing(ledger, call.modules), _Signature() as seen:
        tensors = [part.make(iter([twin(tensor) for tensor in part.tensors])) for part in call.parts]
        args, kwargs = call.with_tensors(tensors)
        with holding(call, tensors), OnHost():
            result = function(*args, **kwargs)
    return tuple(seen.ops), result


class OnHost(TorchFunctionMode):
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
def tracing(ledger: VirtualLedger, modules: Sequence[nn.Module]) -> Iterator[None]:
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
        stack.enter_context(DeviceContext(_HOST))  # also where the code's default device is the card
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


def _marks(number: int) -> Any:
    """Return a context that marks traced ops for recomputation, as Dynamo does (torch/_higher_order_ops/wrap.py)."""
    marks = {"recompute": torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": number}
    return mock.patch.dict(fx.traceback.current_meta, marks)


def _checkpointed(
    _function: Any, _preserve: Any = True, context_fn: Any = torch.utils.checkpoint.noop_context_fn, *_rest: Any,
    **_kwargs: Any,
) -> Iterator[None]:  # fmt: skip
    """Surround the body of a checkpoint: its ops are computed anew, or as its own policy decides."""
    number = next(_NUMBERS)
    forward, _ = context_fn()
    if hasattr(forward, "ac_graph_id"):  # a policy's mode, which marks ops by itself
        forward.ac_graph_id = number
    with _marks(number), forward:
        yield


class _Reentrant:
    """Stands for the other kind of checkpoint."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        with _marks(next(_NUMBERS)):
            return function(*args)
