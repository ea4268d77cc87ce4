"""Memory of functions under ``torch.compile``: torch's own graphs, and Inductor's buffers for them.

A virtual card runs eager code, but other trainers' recipes compile. Here torch traces the function, decomposes it as
for Inductor, and partitions the joint graph into forward and backward (``torch._functorch.partitioners``), which
decides what is saved and what is recomputed. Of each graph there exist in memory

    results of matrix products, attention and whatever else is no pointwise op, reduction or view
    results of reductions
    results of pointwise ops that one of those, or the caller, reads; all others live in registers of one kernel

and a buffer is freed after its last reader, before what takes its place. Nothing is compiled, nothing runs.
"""

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.fx.traceback
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from hybridtrain.virtual_gpu.facade.cuda_paths import Autocast
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu

_ATEN = torch.ops.aten
_VIEWS = frozenset({_ATEN._unsafe_view.default})
_REDUCTIONS = frozenset(
    {_ATEN.sum, _ATEN.mean, _ATEN.amax, _ATEN.amin, _ATEN.var_mean, _ATEN.var, _ATEN.prod, _ATEN.any, _ATEN.all}
)
_FUSED = frozenset(
    {
        _ATEN.arange, _ATEN.cat, _ATEN.constant_pad_nd, _ATEN.copy, _ATEN.embedding, _ATEN.empty, _ATEN.expand,
        _ATEN.full, _ATEN.full_like, _ATEN.gather, _ATEN.index, _ATEN.scalar_tensor, _ATEN.scatter,
        _ATEN.select_scatter, _ATEN.slice_scatter, torch.ops.prims.convert_element_type, torch.ops.prims.iota,
    }
)  # fmt: skip
"""Further ops, not tagged pointwise, that Inductor fuses."""


@torch.library.custom_op("hybridvalidation::boundary", mutates_args=())
def _boundary(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


_boundary.register_fake(_boundary._init_fn)
_boundary.register_autograd(lambda _ctx, grad: grad)


_OTHERS = {torch.ops.hybridvalidation.boundary.default: "boundary", _ATEN.copy_.default: "write"}


def boundary(tensor: Tensor) -> Tensor:
    """Mark a graph break: the tensor is materialized in memory, and not recomputed."""
    is_traced = type(tensor) is not Tensor
    return _boundary(tensor) if is_traced else tensor


@contextmanager
def compiling(gpu: VirtualGpu) -> Iterator[None]:
    """Replace ``torch.compile`` and ``nn.Module.compile`` by this file's model within an open virtual card."""
    known: _Known = {}
    of_card: Callable[[Any], Any] = torch.compile  # the card's own: what it does not leave as it is has a rule there

    def compile_function(function: Any = None, **_options: Any) -> Any:
        if function is None:
            return partial(compile_function, **_options)
        found = of_card(function)
        return _Region(gpu, function, known) if found is function else found

    def compile_module(module: nn.Module, **_options: Any) -> None:
        module._compiled_call_impl = _Region(gpu, module._call_impl, known, module)

    with mock.patch.object(torch, "compile", compile_function), mock.patch.object(nn.Module, "compile", compile_module):
        yield


_NUMBERS = itertools.count(1)
"""Numbers of checkpointed calls in a graph: at the boundary of two calls something is saved."""
_Known = dict[Any, Callable[..., Any]]
_Maker = Callable[[Iterator[Tensor]], Tensor]


class _Region:
    """A function compiled once for each kind of arguments."""

    def __init__(
        self, gpu: VirtualGpu, function: Callable[..., Any], known: _Known, module: nn.Module | None = None
    ) -> None:
        self._gpu = gpu
        self._function = function
        self._module = module
        self._known = known

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = [] if self._module is None else [tensor for _, tensor in _named(self._module)]
        values, spec = pytree.tree_flatten((args, kwargs))
        places = [position for position, value in enumerate(values) if isinstance(value, Tensor)]
        parts = [_Part.of(tensor) for tensor in [*state, *(values[position] for position in places)]]
        rest = tuple(None if isinstance(value, Tensor) else value for value in values)
        inputs = [tensor for part in parts for tensor in part.tensors]
        who = self._function if self._module is None else repr(self._module)  # layers of one make share their graphs
        key = (who, str(spec), str(rest), torch.is_grad_enabled(), *(_kind(tensor) for tensor in inputs))
        if key not in self._known:
            makers = [part.make for part in parts]
            self._known[key] = self._trace(inputs, makers, len(state), rest, places, spec)
        return self._known[key](*inputs)

    def _trace(
        self, inputs: list[Tensor], makers: list[_Maker], num_state: int, rest: tuple[Any, ...], places: list[int],
        spec: pytree.TreeSpec,
    ) -> Callable[..., Any]:  # fmt: skip
        names = [] if self._module is None else [name for name, _ in _named(self._module)]

        def function(*given: Tensor) -> Any:
            left = iter(given)
            tensors = [make(left) for make in makers]
            found = list(rest)
            for position, tensor in zip(places, tensors[num_state:], strict=True):
                found[position] = tensor
            args, kwargs = pytree.tree_unflatten(found, spec)
            if self._module is None:
                return self._function(*args, **kwargs)
            weights = dict(zip(names, tensors[:num_state], strict=True))
            with nn.utils.stateless._reparametrize_module(self._module, weights), _called_plainly(self._module):
                return self._module(*args, **kwargs)

        traced = aot_function(
            function, fw_compiler=_compile, bw_compiler=_compile,
            partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
            decompositions=select_decomp_table(), keep_inference_input_mutations=True,
        )  # fmt: skip
        with _tracing(self._gpu):
            traced(*(_twin(tensor) for tensor in inputs))
        kept: Callable[..., Any] = traced
        return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A tensor as its plain parts, and the way to rebuild it from such."""

    tensors: list[Tensor]
    make: _Maker

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


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _kind(tensor: Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _twin(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


@contextmanager
def _called_plainly(module: nn.Module) -> Iterator[None]:
    kept, module._compiled_call_impl = module._compiled_call_impl, None
    try:
        yield
    finally:
        module._compiled_call_impl = kept


@contextmanager
def _tracing(gpu: VirtualGpu) -> Iterator[None]:
    """Trace as on the card: nothing is counted, and composite ops choose what CUDA would."""
    ledger = gpu.ledger
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(_without_hooks())
        stack.enter_context(mock.patch.object(Autocast, "_is_ours", lambda _self, tensor: tensor.is_floating_point()))
        stack.enter_context(FakeTensorMode())  # of the CPU: on meta tensors a cross entropy has no gradient here
        stack.enter_context(mock.patch.object(torch.utils.checkpoint, "checkpoint", _marked_for_recomputation))
        stack.enter_context(mock.patch.object(nn.functional, "scaled_dot_product_attention", _flash))
        outer, ledger.is_inside = ledger.is_inside, True
        try:
            yield
        finally:
            ledger.is_inside = outer


@contextmanager
def _without_hooks() -> Iterator[None]:
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


def _marked_for_recomputation(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Mark all traced ops for recomputation, as Dynamo does (torch/_higher_order_ops/wrap.py)."""
    kwargs.pop("use_reentrant", None)
    marks = {"recompute": torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": next(_NUMBERS)}
    with fx.traceback.preserve_node_meta(), mock.patch.dict(fx.traceback.get_current_meta(), marks):
        return function(*args, **kwargs)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Attend as CUDA does in half precision without a mask; other cases are not compiled here."""
    assert attn_mask is None
    out: Tensor = _ATEN._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=query.shape[-1] ** -0.5 if scale is None else scale
    )[0]
    return out


def _compile(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> "_Kernels":  # noqa: ARG001  torch's names
    return _Kernels(gm)


class _Kernels:
    """A graph, run for its buffers alone. It empties its list of arguments, as torch's own backends do."""

    _boxed_call = True

    def __init__(self, graph: fx.GraphModule) -> None:
        self._nodes = list(graph.graph.nodes)
        self._constants = graph
        self._kept = {node for node in self._nodes if _has_buffer(node)}
        self._reads: dict[fx.Node, frozenset[fx.Node]] = {}
        last: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            read = frozenset[fx.Node]().union(*(self._reads[one] for one in node.all_input_nodes))
            if node in self._kept or _role(node) in {"write", "output"}:
                last.update(dict.fromkeys(read, node))
            own = node in self._kept or node.op in {"placeholder", "get_attr"}
            self._reads[node] = frozenset({node}) if own else read
        self._dies: dict[fx.Node, list[fx.Node]] = {}
        for buffer, node in last.items():
            self._dies.setdefault(node, []).append(buffer)
        for node in self._nodes:
            if node.op == "placeholder" and node not in last:
                self._dies.setdefault(self._nodes[-1], []).append(node)

    def __call__(self, args: list[Any]) -> Any:
        values: dict[fx.Node, Any] = {}
        device = next(one.device for one in args if isinstance(one, Tensor))
        given = args[::-1]
        args.clear()
        for node in self._nodes:
            if node.op == "placeholder":
                values[node] = given.pop()
            elif node.op == "get_attr":
                values[node] = getattr(self._constants, str(node.target))
            elif node.op == "output":
                return fx.node.map_arg(node.args[0], lambda one: values[one])
            elif node in self._kept:
                self._make(node, values, device)
            elif _role(node) == "boundary" and node.all_input_nodes[0] in values:
                values[node] = values[node.all_input_nodes[0]]
            elif _role(node) == "view" and all(one in values for one in node.all_input_nodes):
                values[node] = _call(node, values)
        raise AssertionError("a graph without an output node")

    def _make(self, node: fx.Node, values: dict[fx.Node, Any], device: torch.device) -> None:
        if _role(node) == "extern":
            values[node] = _call(node, values)
            self._drop(node, values)
            return
        like = node.meta["val"]
        self._drop(node, values, lambda one: one.op != "placeholder")  # Inductor writes over no buffer of the caller's
        values[node] = pytree.tree_map_only(
            Tensor, lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=device), like
        )
        self._drop(node, values)

    def _drop(
        self, node: fx.Node, values: dict[fx.Node, Any], which: Callable[[fx.Node], bool] = lambda _: True
    ) -> None:  # fmt: skip
        dead = {one for one in self._dies.get(node, ()) if which(one)}
        for one in [one for one in values if self._reads[one] & dead]:
            del values[one]


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    found: Any = fx.node.map_arg((node.args, node.kwargs), lambda one: values[one])
    args, kwargs = found
    target: Any = node.target
    if target is run_and_save_rng_state:  # attention that a checkpoint computes anew; nobody draws numbers here
        return torch.empty(16, dtype=torch.uint8), args[0](*args[1:], **kwargs)
    return args[1](*args[2:], **kwargs) if target is run_with_rng_state else target(*args, **kwargs)


def _role(node: fx.Node) -> str:
    """Return Inductor's kind of a call; of any other node its ``op``."""
    target: Any = node.target
    if node.op != "call_function":
        return node.op
    is_op = isinstance(target, torch._ops.OpOverload)
    if target is operator.getitem or (is_op and (target.is_view or target in _VIEWS)):
        return "view"
    if not is_op:
        return "extern"
    if target in _OTHERS:
        return _OTHERS[target]
    if target._overloadpacket in _REDUCTIONS:
        return "reduction"
    return "pointwise" if torch.Tag.pointwise in target.tags or target._overloadpacket in _FUSED else "extern"


def _has_buffer(node: fx.Node) -> bool:
    role = _role(node)
    return role in {"extern", "reduction"} or (role == "pointwise" and _is_read_from_memory(node))


def _is_read_from_memory(node: fx.Node) -> bool:
    roles = [(user, _role(user)) for user in node.users]
    return any(
        role in {"output", "extern", "boundary"} or (role == "view" and _is_read_from_memory(user))
        for user, role in roles
    )


_TORCHVISION = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]


def declare_torchvision_ops() -> None:
    """Declare torchvision's ops so that its import succeeds: its compiled part, unused here, needs CUDA."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _TORCHVISION.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
