# mypy: disable-error-code="no-untyped-call"
"""One rank of many, in one process: torch.distributed with torch's fake process group.

Nothing is sent. A collective's buffers are counted like any tensor, its time on the link's lane (``links.py``). Values
of other ranks are assumed equal to this rank's; a reduction returns this rank's values. DTensor, FSDP and DDP run
unmodified; memory is this rank's.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial, wraps
from importlib import import_module
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hybridtrain.errors import HybridTrainError
from hybridtrain.virtual_gpu.account.op_rules import Args, Op
from hybridtrain.virtual_gpu.cards.card import Card
from hybridtrain.virtual_gpu.cards.links import Collective, World
from hybridtrain.virtual_gpu.facade.known_values import Place
from hybridtrain.virtual_gpu.facade.virtual_ledger import VirtualLedger
from hybridtrain.virtual_gpu.facade.virtual_streams import VirtualStreams

_KINDS = {
    "reducescatter": Collective.REDUCE_SCATTER, "allgather": Collective.ALL_GATHER, "allreduce": Collective.ALL_REDUCE,
    "alltoall": Collective.ALL_TO_ALL, "broadcast": Collective.BROADCAST, "reduce": Collective.BROADCAST,
}  # fmt: skip
"""Collectives by the start of torch.distributed op names, without underscores; the first match counts."""


class TorchVersionError(HybridTrainError):
    """This torch version lacks a function that the virtual world needs."""


@contextmanager
def virtual_world(world: World, ledger: VirtualLedger) -> Iterator[None]:
    """Make code in this process one rank of a world inside the block.

    Raises:
        TorchVersionError: torch lacks these functions. RuntimeError: a process group is open already.
    """
    dist = import_module("torch.distributed")
    if dist.is_initialized():
        raise RuntimeError(
            "VirtualGpu: a process group is open already; call init_process_group only inside the block."
        )
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, world.environment()))
        for owner, name, value in _replaced(world, ledger):
            stack.enter_context(mock.patch.object(owner, name, value))
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _replaced(world: World, ledger: VirtualLedger) -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements: owner, name, value."""
    dist, c10d = import_module("torch.distributed"), import_module("torch.distributed.distributed_c10d")
    fake = _find("torch.testing._internal.distributed.fake_pg", "FakeStore")
    yield c10d, "rendezvous", lambda *_args, **_kwargs: iter([(fake(), world.rank, world.size)])
    yield c10d, "_new_process_group_helper", partial(_fake_group, _find(c10d.__name__, "_new_process_group_helper"))
    yield c10d, "default_pg_nccl_timeout", timedelta(minutes=10)  # None where torch was built without NCCL
    yield torch._C, "_get_accelerator", lambda *_args: torch.device("cuda")
    for module in (dist, c10d):
        yield module, "all_reduce", _with_future(_has(module, "all_reduce"))
    yield dist, "_verify_params_across_processes", lambda *_args: None  # in C++, of values that do not exist
    ledger.links = partial(_link_seconds, world, ledger.card)
    yield from VirtualStreams(ledger).names()
    yield from _data_parallel(ledger)
    group = _find("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup")
    _has(group, "_validate_no_meta_params")
    yield group, "_validate_no_meta_params", lambda _group: None
    dispatch = import_module("torch.distributed.tensor._dispatch")
    if hasattr(
        dispatch, "run_dtensor_rng_op"
    ):  # since torch 2.13; it moves the state of a generator that is never drawn
        yield dispatch, "run_dtensor_rng_op", lambda _start, _end, op, *args, **kwargs: op(*args, **kwargs)
    yield import_module("torch.distributed.tensor._random"), "_rng_tracker", None
    schema = import_module("torch.distributed.tensor._op_schema")
    _has(schema, "_rebuild_tensor_from_dtensor_meta")
    yield schema, "_rebuild_tensor_from_dtensor_meta", _on_host
    propagator = _find("torch.distributed.tensor._sharding_prop", "ShardingPropagator")
    true_meta = _has(propagator, "_propagate_tensor_meta_non_cached")
    yield propagator, "_propagate_tensor_meta_non_cached", _uncounted(ledger, true_meta)


def _link_seconds(world: World, card: Card, func: Op, args: Args, out: Any) -> float | None:
    """Return the seconds for which a collective occupies the link, None for any other op.

    What it works on is the larger of its tensors: together they are what all ranks have.
    """
    if func.namespace not in {"c10d", "_c10d_functional"}:
        return None
    name = func._schema.name.partition("::")[2].replace("_", "")
    kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), None)
    if kind is None:
        return None
    sizes = [sum(tensor.nbytes for tensor in _leaves(value)) for value in (*args, out)]
    ranks = next((group.size() for value in args if (group := _group(value)) is not None), world.size)
    return world.seconds(kind, max(sizes), ranks, card)


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)


def _group(value: Any) -> Any:
    """Return the process group that an op names, by itself or by its name; None for another argument."""
    c10d = import_module("torch._C._distributed_c10d")
    try:
        return c10d._resolve_process_group(value) if isinstance(value, str) else c10d.ProcessGroup.unbox(value)
    except (RuntimeError, TypeError, ValueError):
        return None


def _data_parallel(ledger: VirtualLedger) -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements for DistributedDataParallel, half of it C++ (torch/csrc/distributed/c10d/reducer.cpp)."""
    dist, module = import_module("torch.distributed"), import_module("torch.nn.parallel.distributed")
    true_reducer, parallel = _has(dist, "Reducer"), module.DistributedDataParallel
    true_rebuild, true_forward = _has(true_reducer, "_rebuild_buckets"), parallel.forward

    def on_card(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Create DDP's buckets on the virtual card, as C++ sees meta tensors."""
        with ledger.moving_to(Place.DEVICE):
            return function(*args, **kwargs)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._comm_hooks and self not in reduced:  # a fake group's own answer is nothing, which C++ refuses
            reduced.add(self)
            _has(dist, "_register_comm_hook")(self.reducer, None, _reduce_bucket)
        return true_forward(self, *args, **kwargs)

    reduced: WeakSet[Any] = WeakSet()
    yield module.dist, "Reducer", partial(on_card, true_reducer)
    yield true_reducer, "_rebuild_buckets", lambda reducer: on_card(true_rebuild, reducer)
    yield parallel, "forward", forward


def _reduce_bucket(_state: object, bucket: Any) -> Any:
    """Return the average of a bucket, in place, as C++ does where no hook is registered."""
    gradients = bucket.buffer()
    torch.distributed.all_reduce(gradients, op=torch.distributed.ReduceOp.AVG)
    future: Any = torch.futures.Future()
    future.set_result(gradients)
    return future


def _find(module: str, name: str) -> Any:
    try:
        return _has(import_module(module), name)
    except ImportError:
        raise _version_error(f"{module}.{name}") from None


def _has(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise _version_error(f"{owner.__name__}.{name}")
    return getattr(owner, name)


def _version_error(name: str) -> TorchVersionError:
    return TorchVersionError(
        f"torch {torch.__version__} has no {name}, which --world needs; install torch 2.13, or plan a single card."
    )


def _fake_group(true_helper: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a group that sends nothing, whatever backend was asked for (torch/distributed/distributed_c10d.py)."""
    size, rank, ranks, backend, store, *rest = args
    kwargs |= {"backend_options": None, "device_id": None}
    made = true_helper(size, rank, ranks, torch.distributed.Backend("fake"), store, *rest, **kwargs)
    groups = import_module("torch.distributed.distributed_c10d")._world.pg_map
    if made[0] in groups:
        groups[made[0]] = (backend, groups[made[0]][1])  # what get_backend tells
    return made


class _Done:
    """The handle of a collective that is complete, with a future of its tensors, which a fake group does not give."""

    def __init__(self, work: Any, tensors: list[torch.Tensor]) -> None:
        self._work, self._tensors = work, tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future


def _with_future(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(all_reduce)
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = all_reduce(tensor, *args, **kwargs)
        return work if work is None else _Done(work, [tensor])

    return call


def _on_host(spec: Any) -> torch.Tensor:
    """Return the tensor that DTensor asks ops about on the CPU: this torch need not know any other device."""
    meta = spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="cpu")


def _uncounted(ledger: VirtualLedger, function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude DTensor's computation of global shapes, which no card holds, from the count."""

    def ask(self: Any, op_schema: Any) -> Any:
        outer, ledger.is_inside = ledger.is_inside, True
        try:
            with _disable_current_modes():
                return function(self, op_schema)
        finally:
            ledger.is_inside = outer

    return ask
