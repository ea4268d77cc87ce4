"""A graph of compiled code, run for its buffers alone, by Inductor's rules of fusion.

Of a graph there exist in memory

    results of matrix products, attention and whatever else is no pointwise op, reduction or view
    results of reductions
    results of pointwise ops that one of those, or the caller, reads; and those that Inductor realizes, as they are read
    more than once and read more than ``_MOST_READS`` buffers, or read more than ``_MOST_READS_ONCE`` (torch/_inductor/
    config.py: realize_reads_threshold, realize_acc_reads_threshold); all others live in registers of one kernel

and a buffer is freed after its last reader. A kernel writes over a buffer of its result's size and type that nobody
reads later (scheduler.py: decide_inplace_update), also over what the forward pass saved for this one, as AOTAutograd
donates it (collect_bw_donated_buffer_idxs); never over another's of the caller. Nothing is compiled, nothing runs.
"""

import operator
from collections import Counter
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

import torch
import torch._inductor.inductor_prims  # registers ops that are named below
from torch import Tensor, fx
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.utils import _pytree as pytree

_ATEN, _PRIMS = torch.ops.aten, torch.ops.prims
_MOST_READS, _MOST_READS_ONCE = 4, 8
_REDUCTIONS = frozenset(
    {
        _ATEN.sum, _ATEN.mean, _ATEN.amax, _ATEN.amin, _ATEN.var_mean, _ATEN.var, _ATEN.prod, _ATEN.any, _ATEN.all,
        _ATEN.argmax, _ATEN.argmin, _ATEN.max, _ATEN.min, _PRIMS.xor_sum,
    }
)  # fmt: skip
_FUSED = frozenset(
    {
        _ATEN.arange, _ATEN.bernoulli, _ATEN.cat, _ATEN.clone, _ATEN.constant_pad_nd, _ATEN.copy, _ATEN.embedding,
        _ATEN.empty, _ATEN.empty_strided, _ATEN.expand, _ATEN.flip, _ATEN.full, _ATEN.full_like, _ATEN.gather,
        _ATEN.index, _ATEN._unsafe_index, _ATEN.index_select, _ATEN.rand, _ATEN.rand_like, _ATEN.randn,
        _ATEN.randn_like, _ATEN.repeat, _ATEN.scalar_tensor, _ATEN.scatter, _ATEN.select_scatter, _ATEN.slice_scatter,
        _ATEN.as_strided_scatter, _ATEN.diagonal_scatter, _ATEN.tril, _ATEN.triu, _ATEN.where, _ATEN.zeros_like,
        _ATEN.ones_like, _PRIMS.convert_element_type, _PRIMS.iota, _PRIMS.inductor_random, _PRIMS.inductor_seeds,
        _PRIMS.inductor_lookup_seed, _PRIMS.device_put,
    }
)  # fmt: skip
"""Further ops, not tagged pointwise, that Inductor fuses."""
_INTO_FIRST = frozenset(
    {
        _ATEN.index_put, _ATEN._unsafe_index_put, _ATEN.index_add, _ATEN.scatter_add, _ATEN.scatter_reduce,
        _ATEN._unsafe_masked_index_put_accumulate,
    }
)  # fmt: skip
"""Ops that Inductor lets write into their first operand, where nobody else reads it (fx_passes/reinplace.py)."""
_VIEWS = frozenset({_ATEN._unsafe_view.default})


class Modules(Protocol):
    """Is told the module of the nodes that follow, while a graph runs."""

    def enter(self, unit: str) -> None:
        """Take the module's name; empty: none."""


@torch.library.custom_op("hybridtrain::boundary", mutates_args=())
def boundary(tensor: Tensor) -> Tensor:
    """Mark a graph break in code that is traced: the tensor is in memory, and not computed anew."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


boundary.register_fake(boundary._init_fn)
boundary.register_autograd(lambda _ctx, gradient: gradient)
_OTHERS = {torch.ops.hybridtrain.boundary.default: "boundary", _ATEN.copy_.default: "write"}


class GraphBuffers:
    """A graph that makes and frees its buffers. It empties its list of arguments, as torch's own backends do."""

    _boxed_call = True

    def __init__(
        self, graph: fx.GraphModule, modules: Callable[[], Modules], donated: AbstractSet[str] = frozenset()
    ) -> None:  # fmt: skip
        self._nodes = list(graph.graph.nodes)
        self._constants = graph
        self._modules = modules
        self._donated = donated
        self._kept: set[fx.Node] = set()
        self._in_place: set[fx.Node] = set()
        self._reads: dict[fx.Node, frozenset[fx.Node]] = {}
        self._dies: dict[fx.Node, list[fx.Node]] = {}
        last = self._find_buffers()
        for buffer, node in last.items():
            self._dies.setdefault(node, []).append(buffer)
        for node in self._nodes:
            if node.op == "placeholder" and node not in last:
                self._dies.setdefault(self._nodes[-1], []).append(node)

    def donations(self) -> AbstractSet[str]:
        """Return the names of results that share no buffer with an argument or another result: donated if saved."""
        results = [one for one in self._nodes[-1].all_input_nodes if one.op != "placeholder"]
        listed: Any = pytree.tree_leaves(self._nodes[-1].args[0])
        uses = Counter(buffer for one in listed if isinstance(one, fx.Node) for buffer in self._reads[one])
        return {
            one.name for one in results
            if all(uses[buffer] == 1 and buffer.op != "placeholder" for buffer in self._reads[one])
        }  # fmt: skip

    def _find_buffers(self) -> dict[fx.Node, fx.Node]:
        """Choose the nodes that have a buffer; return the last reader of each."""
        last: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            read = frozenset[fx.Node]().union(*(self._reads[one] for one in node.all_input_nodes))
            role = role_of(node)
            if role == "extern" and self._writes_into_first(node):
                self._in_place.add(node)
            elif role in {"extern", "reduction"} or (role == "pointwise" and _has_buffer(node, len(read))):
                self._kept.add(node)
            if node in self._kept or node in self._in_place or role in {"write", "output"}:
                last.update(dict.fromkeys(read, node))
            if node in self._in_place:
                first: Any = node.args[0]
                self._reads[node] = self._reads[first]
            else:
                own = node in self._kept or node.op in {"placeholder", "get_attr"}
                self._reads[node] = frozenset({node}) if own else read
        return last

    def _writes_into_first(self, node: fx.Node) -> bool:
        target: Any = node.target
        first: Any = node.args[0] if node.args else None
        return (
            isinstance(target, torch._ops.OpOverload)
            and target._overloadpacket in _INTO_FIRST
            and isinstance(first, fx.Node)
            and first in self._kept
            and len(first.users) == 1
        )

    def __call__(self, args: list[Any]) -> Any:
        """Run the graph: make each buffer at its node, free it after its last reader."""
        values: dict[fx.Node, Any] = {}
        devices = [one.device for one in args if isinstance(one, Tensor)] or [torch.device("meta")]
        device = next((one for one in devices if one.type == "cuda"), devices[0])
        given, modules = args[::-1], self._modules()
        args.clear()
        for node in self._nodes:
            role = role_of(node)
            if node.op == "placeholder":
                values[node] = given.pop()
            elif node.op == "get_attr":
                values[node] = getattr(self._constants, str(node.target))
            elif node.op == "output":
                modules.enter("")
                return fx.node.map_arg(node.args[0], lambda one: values[one])
            elif node in self._kept:
                modules.enter(node.meta.get("custom", {}).get("unit", ""))
                self._make(node, values, device, role)
            elif node in self._in_place:
                values[node] = values[node.args[0]]
                self._drop(node, values)
            elif role == "boundary" and node.all_input_nodes[0] in values:
                values[node] = values[node.all_input_nodes[0]]
            elif role == "write":
                self._drop(node, values)
            elif role == "view" and all(one in values for one in node.all_input_nodes):
                values[node] = _call(node, values)
        raise AssertionError("a graph without an output node")

    def _make(self, node: fx.Node, values: dict[fx.Node, Any], device: torch.device, role: str) -> None:
        if role == "extern":
            values[node] = _call(node, values)
            self._drop(node, values)
            return
        like = node.meta["val"]
        sizes = {(one.nbytes, one.dtype) for one in pytree.tree_leaves(like) if isinstance(one, Tensor)}
        self._drop(node, values, lambda one: self._is_writable(one) and _size(values.get(one)) in sizes)
        values[node] = pytree.tree_map_only(
            Tensor, lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=device), like
        )
        self._drop(node, values)

    def _is_writable(self, node: fx.Node) -> bool:
        return node.op != "placeholder" or node.name in self._donated

    def _drop(
        self, node: fx.Node, values: dict[fx.Node, Any], which: Callable[[fx.Node], bool] = lambda _: True
    ) -> None:  # fmt: skip
        dead = {one for one in self._dies.get(node, ()) if which(one)}
        if dead:
            for one in [one for one in values if self._reads[one] & dead]:
                del values[one]


def _size(value: Any) -> tuple[int, torch.dtype] | None:
    return (value.untyped_storage().nbytes(), value.dtype) if isinstance(value, Tensor) else None


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    found: Any = fx.node.map_arg((node.args, node.kwargs), lambda one: values[one])
    args, kwargs = found
    target: Any = node.target
    if target is run_and_save_rng_state:  # attention that a checkpoint computes anew; nobody draws numbers here
        return torch.empty(16, dtype=torch.uint8, device="cpu"), args[0](*args[1:], **kwargs)
    return args[1](*args[2:], **kwargs) if target is run_with_rng_state else target(*args, **kwargs)


def role_of(node: fx.Node) -> str:
    """Return Inductor's kind of a call: view, pointwise, reduction, extern, write; of any other node its ``op``."""
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


def _has_buffer(node: fx.Node, num_reads: int) -> bool:
    if num_reads > _MOST_READS_ONCE or (num_reads > _MOST_READS and len(node.users) > 1):
        return True
    return _is_read_from_memory(node)


def _is_read_from_memory(node: fx.Node) -> bool:
    roles = [(user, role_of(user)) for user in node.users]
    return any(
        role in {"output", "extern", "boundary"} or (role == "view" and _is_read_from_memory(user))
        for user, role in roles
    )
