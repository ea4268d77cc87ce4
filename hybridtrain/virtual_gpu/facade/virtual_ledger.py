"""A ledger for code that believes it has a card: every tensor of it lies on the meta device and has a place.

A tensor on the meta device has a shape and no bytes. Here its storage also has a place, the host's memory or the
card's, which an op's results inherit; so a model of any size is built, moved and trained without memory, and each byte
is counted where it would be. What a script computed from its own data stays known: small tensors keep their values
beside them (``_values``), and an op on known values has a known value. What is not known has a stand-in
(``stand_in.py``), and every place where one was used is listed.
"""

import math
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, OpRecord, StepMark, StorageLedger, holders
from hybridtrain.virtual_gpu.account.observer import Lane, Stage
from hybridtrain.virtual_gpu.account.op_rules import MATMUL_OPS, MetaCache, count_bytes, scratch_bytes, tensors_in
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.allocator.allocator import AllocatorOutOfMemory, CachingAllocator
from hybridtrain.virtual_gpu.allocator.replay import OutOfMemory
from hybridtrain.virtual_gpu.cards.card import Card, Host
from hybridtrain.virtual_gpu.facade.basis import Seen
from hybridtrain.virtual_gpu.facade.stand_in import DATA_DEPENDENT, FINITE_ANSWERS, StandIns, where_called

_ATEN = torch.ops.aten
_META = torch.device("meta")
is_truly_meta: Callable[[Tensor], bool] = torch._C.TensorBase.is_meta.__get__  # type: ignore[attr-defined]
"""The truth, whatever ``Tensor.is_meta`` says to a script."""
_CPU = torch.device("cpu")
_KNOWN_FLOATS = 4096
"""Elements of a floating point tensor up to which its values are kept."""
_KNOWN_INTEGERS = 2**24
"""Elements of an integer or boolean tensor up to which its values are kept: batches of tokens, masks, positions, an
order of a weight's elements."""
_COPIES = frozenset({_ATEN.copy_.default, _ATEN._foreach_copy_.default})
_TAKES_HOST_INDICES = frozenset(
    {_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default, _ATEN._unsafe_index.Tensor}
)
_RANDOM = frozenset(
    {
        _ATEN.bernoulli, _ATEN.bernoulli_, _ATEN.normal_, _ATEN.uniform_, _ATEN.native_dropout, _ATEN.rand_like,
        _ATEN.randn_like, _ATEN.randint_like, _ATEN.multinomial, _ATEN.exponential_, _ATEN.random_, _ATEN.normal,
    }
)  # fmt: skip


class Place(Enum):
    """Where the bytes of a tensor would be."""

    HOST = "cpu"
    DEVICE = "cuda"


class VirtualLedger(StorageLedger):  # type: ignore[no-untyped-call]
    """Runs PyTorch code on a card that is not there; counts as ``StorageLedger`` does, and refuses as the card would.

    Args:
        card: Whose memory is the limit.
        host: The machine around it; None: enough of everything.
        allocator: The card's caching allocator, empty.
    """

    def __init__(self, card: Card, host: Host | None, allocator: CachingAllocator) -> None:
        super().__init__(device="meta")
        self._meta_cache = MetaCache()  # a script may change default types as it goes
        self.card = card
        self.host = host or Host()
        self.allocator = allocator
        self.is_inside = False
        """Whether an op is being run: then ``Tensor.device`` tells the truth."""
        self.refusal: OutOfMemory | None = None
        """The last request that the card could not serve."""
        self.seen = Seen()
        self.stand_ins = StandIns(self.seen.refusals.append)
        self.after_backward: Callable[[], None] = _do_nothing
        self.on_refusal: Callable[[], None] = _do_nothing
        self.updates = False
        """Whether an optimizer is at work."""
        self.host_bytes = 0
        self.peak_host_bytes = 0
        self._real_bytes = 0
        """Of large tensors on the host that were computed for real."""
        self.card_index = 0
        """By which the code calls its card, of ``num_cards`` in the machine."""
        self.num_cards = 1
        self.stream = 0
        """On which of the card's streams the code works; each has a cache of its own in the allocator."""
        self.first_matmuls: set[bool] = set()
        self.scratch_rules: dict[torch._ops.OpOverload, Callable[[Sequence[Any]], int]] = {}
        """Of ops whose scratch depends on the card."""
        self._places: dict[int, Place] = {}
        self._values: dict[int, torch.UntypedStorage] = {}
        self._fills: dict[int, bool] = {}
        self._host_storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._host_sizes: dict[int, int] = {}
        self._addresses: dict[int, int] = {}
        self._streams: list[int] = []
        self.links: Callable[[torch._ops.OpOverload, tuple[Any, ...], Any], float | None] | None = None
        """Says how long an op keeps the link to other cards; None of what is no collective."""
        self._last_of_stream: dict[int, int] = {}
        self._awaited: dict[int, list[int]] = {}
        self._arriving: dict[int, int] = {}
        """Storages that a collective works on, and its number: who reads one waits."""
        self._kept_labels: dict[int, tuple[TensorClass, str]] = {}
        """What a storage was for, before it was resized to nothing."""
        self._modules: list[str] = []
        self._sequence: list[int] = []
        self._sequence_units: list[str] = []
        self._target: Place | None = None
        self._handlers: dict[torch._ops.OpOverload, Callable[..., Any]] = {
            _ATEN._local_scalar_dense.default: self._read_scalar,
            _ATEN.item.default: self._read_scalar,  # as it comes from below autograd
            _ATEN.is_nonzero.default: lambda *call: bool(self._read_scalar(*call)),
            _ATEN.equal.default: self._compare,
            _ATEN.is_pinned.default: lambda *_: False,
            _ATEN._pin_memory.default: lambda _func, args, _kwargs: args[0],
            _ATEN._amp_foreach_non_finite_check_and_unscale_.default: lambda *_: None,
            _ATEN._amp_update_scale_.default: lambda _func, args, _kwargs: args[0],
            _ATEN.record_stream.default: lambda *_: None,
            _ATEN.allclose.default: self._compare,
            _ATEN.set_.source_Storage: self._set_storage,
            _ATEN.set_.source_Storage_storage_offset: self._set_storage,
            _ATEN.set_.source_Tensor: self._set_storage,
            _ATEN.set_.default: self._set_storage,
        }

    # What the facade asks for.

    def place_of(self, tensor: Tensor) -> Place | None:
        """Return where a tensor would be; None for one that is what it seems: on the CPU, or on meta by own wish."""
        if not is_truly_meta(tensor):
            return None
        place = self._places.get(tensor.untyped_storage()._cdata)
        if place is None and type(tensor) not in _PLAIN_TYPES:
            local = getattr(tensor, "_local_tensor", None)  # a DTensor lies where this rank's share of it does
            return None if local is None else self.place_of(local)
        return place

    def known(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor's values, on the CPU, where they follow from the script's own data; None elsewhere."""
        if not is_truly_meta(tensor):
            return tensor
        storage = self._values.get(tensor.untyped_storage()._cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=tensor.dtype).set_(
            storage, tensor.storage_offset(), tensor.shape, tensor.stride()
        )  # fmt: skip

    @contextmanager
    def moving_to(self, place: Place) -> Iterator[None]:
        """Give what the next op makes a place."""
        outer, self._target = self._target, place
        try:
            yield
        finally:
            self._target = outer

    def enter_module(self, name: str) -> None:
        """Say that what follows belongs to a module."""
        self._modules.append(name)
        self._unit = name
        self._mark_sequence()

    def leave_module(self) -> None:
        """Say that a module is done."""
        if self._modules:
            self._modules.pop()
        self._unit = self._modules[-1] if self._modules else ""
        self._mark_sequence()

    def label(self, tensor: Tensor, tensor_class: TensorClass, unit: str) -> None:
        """Say what a tensor is for; of a DTensor, what this rank has of it."""
        super().label(getattr(tensor, "_local_tensor", tensor), tensor_class, unit)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Count a storage that gets other bytes: FSDP frees what it gathered by resizing it to nothing."""
        self._count_resize(storage, storage.nbytes(), size)

    def _count_resize(self, storage: torch.UntypedStorage, old: int, size: int) -> None:
        address = storage._cdata
        place = self._places.get(address)
        if place is None or size == old:
            return
        self._values.pop(address, None)
        self._fills.pop(address, None)
        if place is Place.HOST:
            self.host_bytes += size - old
            self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
            self._watch_host(storage, size)
            return
        index = -1
        if size:  # the new bytes are there before the old ones go (resize_bytes_cuda)
            self._stage = self._stage_now()
            index = self._allocate(size, self._stage)
        found = self._alive.pop(address, None)
        if found is not None:
            self._kept_labels[address] = self._classes[found[0]], self._units[found[0]]
            self._release(found[0], found[1])
        if not size:
            self._watch_host(storage, 0)
            return
        if address in self._kept_labels:
            self._classes[index], self._units[index] = self._kept_labels[address]
        self._host_storages.pop(address, None)
        self._host_sizes.pop(address, None)
        self._alive[address] = index, size, weakref.ref(storage, self._on_release(address))

    def release_cache(self) -> None:
        """Give the allocator's cached segments back, as ``torch.cuda.empty_cache`` does."""
        self.allocator.empty_cache()
        self._cache_releases.append(len(self._events))

    # The dispatcher.

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an op on meta tensors, give its results a place, count them, keep what is known of their values."""
        if any(
            kind.__torch_dispatch__ is not _PLAIN for kind in types
        ):  # a subclass takes itself apart; its parts come back here
            return NotImplemented
        outer, self.is_inside = self.is_inside, True
        try:
            return self._run(func, args, kwargs or {})
        except NotImplementedError:  # CUDA has a kernel for it, and a script may catch what a card would not raise
            self.seen.refusals.append(
                f"{where_called()}: {func}: torch {torch.__version__} does not say what it makes."
            )
            raise
        finally:
            self.is_inside = outer

    def _run(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands = list(tensors_in([*args, *kwargs.values()]))
        target = self._target if self._target is not None else _asked_for(func, args, kwargs, operands)
        place = self._place(func, operands) if target is None else target
        if place is None:
            if _makes_much(func, operands) and not any(tensor.is_meta for tensor in operands):
                return self._compute_real(func, args, kwargs, operands)
            return func(*args, **kwargs)  # real, or on meta by the script's own wish
        if self._arriving:
            self._await(operands)
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        was_backward, self._stage = self._stage is Stage.BACKWARD, self._stage_now()
        if was_backward is not (self._stage is Stage.BACKWARD):
            self.seen.num_backwards += not was_backward
            if was_backward:
                self.after_backward()
        if self._stage is Stage.BACKWARD:
            self._unit = self._unit_of_node()
            gradient = _accumulated(func, args)
            if gradient is not None:
                return self._accumulate(func, args, gradient)
        return self._perform(func, args, kwargs, operands, place, target)

    def _perform(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor],
        place: Place, target: Place | None,
    ) -> Any:  # fmt: skip
        results = self._compute_known(func, args, kwargs, operands)
        written = _written(func, args, kwargs)
        if written and not written[0].is_meta:
            return self._write_to_host(func, args, written, results)
        out = self._call(func, args, kwargs, kwargs.get("device"), results)
        self._book(func, args, kwargs, out, place, target)
        self._keep(func, out, written, results)
        return out

    def _compute_real(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]
    ) -> Any:
        """Run an op on real tensors, for real as long as what such ops made is little; beyond, it is counted alone.

        So data that a script prepares keeps its values, and weights that are converted or stacked on the host take no
        memory.
        """
        shapes = self._call(func, args, kwargs, kwargs.get("device"), None)
        size = sum(tensor.nbytes for tensor in tensors_in([shapes]))
        if self._real_bytes + size > _REAL_BYTES:
            return self._perform(func, args, kwargs, operands, Place.HOST, None)
        out = func(*args, **kwargs)
        theirs = {tensor.untyped_storage()._cdata for tensor in operands}
        for tensor in tensors_in([out]):
            storage = tensor.untyped_storage()
            if storage._cdata not in theirs:
                theirs.add(storage._cdata)
                self._real_bytes += storage.nbytes()
                self._add_host_bytes(storage.nbytes())
                weakref.finalize(storage, self._release_real, storage.nbytes())
        return out

    def _release_real(self, size: int) -> None:
        self._real_bytes -= size
        self.host_bytes -= size

    def _accumulate(self, func: torch._ops.OpOverload, args: tuple[Any, ...], gradient: Tensor) -> Tensor:
        self._values.pop(gradient.untyped_storage()._cdata, None)
        self._last_compute = len(self._ops)
        self._ops.append(self._op_record(func, args, {}, gradient, len(self._events)))
        return gradient

    def _call(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], device: Any, results: Any
    ) -> Any:
        if func in DATA_DEPENDENT:
            if results is not None:
                return _like(results)
            if func in _PUTS and self._is_masked_fill(args):
                return args[0] if func._schema.is_mutable else torch.empty_like(args[0])
            args = self._resolve_masks(func, args)
        kwargs = _without_generator(kwargs)
        if device is not None:
            kwargs["device"] = _META
        if any(not tensor.is_meta and tensor.dim() for tensor in tensors_in([*args, *kwargs.values()])):
            args = tuple(_to_meta(value) for value in args)
            kwargs = {name: _to_meta(value) for name, value in kwargs.items()}
        if func is _ATEN._to_copy.default and not args[0].is_meta:
            args = (torch.empty_like(args[0], device=_META),)
        if func is _ATEN._to_copy.default:
            kwargs = {name: value for name, value in kwargs.items() if name not in {"device", "non_blocking"}}
        if device is not None:  # what a factory makes depends on the default type, too
            return func(*args, **kwargs)
        made = _made_otherwise(func, args, kwargs)
        return made if made is not None else self._meta_cache.call(func, args, kwargs)

    def _book(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any,
        place: Place, target: Place | None,
    ) -> None:  # fmt: skip
        event = len(self._events)
        if place is Place.DEVICE and func in MATMUL_OPS:
            self._take_workspace()
        for tensor in tensors_in([out]):
            self._enter_at(tensor, place)
        if func.is_view:
            return
        sources = {self._places.get(t.untyped_storage()._cdata, Place.HOST) for t in tensors_in([*args])}
        if target is not None or func in _COPIES:
            self._book_copy(func, args, kwargs, out, place, sources)
        elif place is Place.DEVICE:
            rule = self.scratch_rules.get(func)
            scratch = scratch_bytes(func, args) if rule is None else rule(args)
            if scratch:
                index = self._allocate(scratch, Stage.UPDATE)
                self._release(index, scratch)
            self._append_op(func, args, kwargs, out, event)
            library = _WORKSPACES.get(func._overloadpacket)
            if library is not None:
                self.seen.uncounted.setdefault(library, where_called())
        else:
            size = count_bytes(func, args, kwargs, out)
            if size >= _HOST_WORK:
                self.work(Lane.HOST, size, (self._last_compute,))

    def _append_op(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, event: int
    ) -> None:
        """Record an op on the lane of its stream: compute is the first stream's, what the others do is for the link."""
        collective = None if self.links is None else self.links(func, args, out)
        if not self.stream and collective is None:
            self._last_compute = len(self._ops)
            self._ops.append(self._op_record(func, args, kwargs, out, event))
            return
        joined, self._joined = self._joined, []
        record = self._op_record(func, args, kwargs, out, event)
        waits = [*self._awaited.pop(self.stream, ())] if self.stream else [*joined, self._last_compute]
        self._joined = joined
        self._last_of_stream[self.stream] = number = len(self._ops)
        seconds = 0.0 if collective is None else collective
        self._ops.append(
            replace(record, lane=Lane.LINK, waits=tuple(w for w in waits if w >= 0), link_seconds=seconds)
        )  # fmt: skip
        if not self.stream:
            for tensor in tensors_in([*args, out]):
                self._arriving[tensor.untyped_storage()._cdata] = number

    def last_op(self, stream: int) -> int:
        """Return the last op of a stream, -1 before the first."""
        return self._last_of_stream.get(stream, -1) if stream else self._last_compute

    def await_op(self, stream: int, op: int) -> None:
        """Let what comes next on a stream wait for an op."""
        if stream:
            self._awaited.setdefault(stream, []).append(op)
        else:
            self.join(op)

    def _await(self, operands: Sequence[Tensor]) -> None:
        """Let the next op of the compute lane wait for collectives that it reads from."""
        for tensor in operands:
            found = self._arriving.pop(tensor.untyped_storage()._cdata, None)
            if found is not None and not self.stream:
                self.join(found)

    def _book_copy(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any,
        place: Place, sources: set[Place],
    ) -> None:  # fmt: skip
        crosses = sources and (sources != {place} if func not in _COPIES else len(sources) > 1)
        if not crosses:
            if place is Place.DEVICE and (sources or func not in _COPIES):
                self._append_op(func, args, kwargs, out, len(self._events))
            return
        destination = place
        if func in _COPIES:
            first = next(tensors_in([args[0]]))
            destination = self._places.get(first.untyped_storage()._cdata, Place.HOST)
        size = sum(tensor.nbytes for tensor in tensors_in([out if func not in _COPIES else args[0]]))
        op = self.work(Lane.COPY_IN if destination is Place.DEVICE else Lane.COPY_OUT, size, (self._last_compute,))
        self.join(op)

    def _keep(self, func: torch._ops.OpOverload, out: Any, written: Sequence[Tensor], results: Any) -> None:
        """Keep the values of new tensors; forget those of tensors that were overwritten by unknown ones."""
        if results is None:
            for tensor in written:
                self._values.pop(tensor.untyped_storage()._cdata, None)
                self._fills.pop(tensor.untyped_storage()._cdata, None)
            answer = FINITE_ANSWERS.get(func._overloadpacket)
            if answer is not None:
                self._fills[out.untyped_storage()._cdata] = answer
            return
        if written:
            return
        pairs = zip(out, results, strict=True) if isinstance(out, list | tuple) else [(out, results)]
        for tensor, value in pairs:
            if value is None or not isinstance(tensor, Tensor):
                continue
            address = tensor.untyped_storage()._cdata
            if address not in self._values and address in self._places and _is_small(tensor):
                self._values[address] = _storage(tensor.untyped_storage().nbytes())
                known = self.known(tensor)
                assert known is not None
                known.copy_(value)

    def _compute_known(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]
    ) -> Any:
        """Return what an op gives on the CPU, where all operands are known and small; None elsewhere."""
        if func.is_view or (func._overloadpacket in _RANDOM):
            return None
        if not operands and not (func._overloadpacket in _KNOWN_FACTORIES and _is_small_factory(func, args, kwargs)):
            return None
        values: dict[int, Tensor] = {}
        if func in _ANY_ALL and args[0].is_meta:
            fill = self._fills.get(args[0].untyped_storage()._cdata)
            if fill is not None:
                return torch.tensor(fill)
        for tensor in operands:
            if not _is_small(tensor):
                return None
            known = self.known(tensor)
            if known is None:
                known = self._assume(func, args, tensor)
            if known is None:
                return self.stand_ins.rule(func, args)
            values[id(tensor)] = known
        kwargs = _without_generator(kwargs)
        if "device" in kwargs:
            kwargs["device"] = _CPU
        return _on_cpu(func, args, kwargs, values)

    def _assume(self, func: torch._ops.OpOverload, args: tuple[Any, ...], tensor: Tensor) -> Tensor | None:
        """Return values for an unknown tensor: what is overwritten, or a single number of which something is asked."""
        if func in _FILLS and tensor is args[0] and tensor.nbytes == tensor.untyped_storage().nbytes():
            self._values[tensor.untyped_storage()._cdata] = _storage(tensor.nbytes)
            return self.known(tensor)
        if tensor.numel() == 1 and func._overloadpacket in _QUESTIONS:
            self.stand_ins.note(func, "one number of which something is asked: 1")
            return torch.ones(tensor.shape, dtype=tensor.dtype)
        return None

    def _read_scalar(self, func: torch._ops.OpOverload, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        known = self.known(args[0])
        return self.stand_ins.number(func, args[0].dtype) if known is None else known.item()

    def _compare(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        one, other = self.known(args[0]), self.known(args[1])
        if one is None or other is None:
            return bool(self.stand_ins.number(func, torch.bool))
        return bool(func(one, other, *args[2:], **kwargs))

    def _set_storage(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let a tensor have another storage: no byte moves, and what is known of either storage stays known."""
        place = self._place(func, list(tensors_in(args)))
        out = func(*args, **kwargs)
        if place is not None:
            self._enter_at(out, place)
        return out

    def _write_to_host(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], written: Sequence[Tensor], results: Any
    ) -> Any:
        """Write what became known of a virtual tensor into a real one; a stand-in where it did not."""
        if results is None:
            self.stand_ins.note(func, "written into a tensor on the CPU: ones")
            for tensor in written:
                if not tensor.is_meta:
                    tensor.fill_(1)
        if len(written) == 1:
            return args[0] if isinstance(args[0], Tensor) else written[0]
        return None

    def _is_masked_fill(self, args: tuple[Any, ...]) -> bool:
        """Return whether a put needs no positions: one mask, a number from the host (TensorAdvancedIndexing.cpp)."""
        masks = [(place, index) for place, index in enumerate(args[1]) if index is not None]
        if len(masks) != 1 or args[2].numel() != 1 or (len(args) > 3 and args[3]):
            return False
        place, mask = masks[0]
        is_of_host = not args[2].is_meta or self._places.get(args[2].untyped_storage()._cdata) is Place.HOST
        fits = mask.shape == args[0].shape[place : place + mask.dim()]
        return is_of_host and fits and mask.dtype in {torch.bool, torch.uint8}

    def _resolve_masks(self, func: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace boolean indices that are known by their positions.

        Raises:
            DataDependentError: The shape of a result depends on values that nobody knows.
        """
        if func not in _TAKES_HOST_INDICES:
            self.stand_ins.refuse(func)
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype not in {torch.bool, torch.uint8}:
                indices.append(index)
                continue
            known = self.known(index)
            if known is None:
                self.stand_ins.refuse(func)
            indices += [_like(position) for position in known.nonzero(as_tuple=True)]
        return (args[0], indices, *args[2:])

    # Places.

    def _place(self, func: torch._ops.OpOverload, operands: list[Tensor]) -> Place | None:
        """Return where an op runs; None where nothing virtual takes part.

        Raises:
            RuntimeError: Its operands are in two places; torch refuses this too.
        """
        place: Place | None = None
        other: Tensor | None = None
        for tensor in operands:
            here = self._places.get(tensor.untyped_storage()._cdata) if tensor.is_meta else None
            if here is Place.DEVICE:
                place = here
            elif (here is Place.HOST or not tensor.is_meta) and tensor.dim():
                other = tensor
                if here is not None and place is None:
                    place = here
            elif here is Place.HOST and place is None:
                place = here
        if place is Place.DEVICE and other is not None and not _takes_both(func):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"(virtual GPU, in {func}; an operand of shape {tuple(other.shape)} is on the CPU)"
            )
        return place

    def _enter_at(self, tensor: Tensor, place: Place) -> None:
        if not tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._places:
            known = self._alive[address][1] if address in self._alive else self._host_sizes.get(address, 0)
            if storage.nbytes() > known:  # resize_, or an out= that was too small
                self._count_resize(storage, known, storage.nbytes())
            return
        self._places[address] = place
        if place is Place.DEVICE:
            self.enter(tensor)
            if address not in self._alive:  # no bytes
                self._watch_host(storage, 0)
            return
        size = storage.nbytes()
        self._watch_host(storage, size)
        self._add_host_bytes(size)

    def _add_host_bytes(self, size: int) -> None:
        self.host_bytes += size
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
        if self.host_bytes > self.host.tensor_bytes:
            raise RuntimeError(
                f"[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate "
                f"{size} bytes. (virtual GPU: {self.host_bytes} bytes of tensors on the host, of "
                f"{int(self.host.tensor_bytes)}; say --host-memory for another machine)"
            )

    def _watch_host(self, storage: torch.UntypedStorage, size: int) -> None:
        address = storage._cdata
        self._host_sizes[address] = size
        self._host_storages[address] = weakref.ref(storage, self._forget(address, size))

    def _forget(self, address: int, size: int) -> Callable[[object], None]:
        def forget(_reference: object) -> None:
            self._host_storages.pop(address, None)
            self._host_sizes.pop(address, None)
            self._places.pop(address, None)
            self._kept_labels.pop(address, None)
            self._arriving.pop(address, None)
            self._values.pop(address, None)
            self._fills.pop(address, None)
            self.host_bytes -= size

        return forget

    def _on_release(self, address: int) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        release = super()._on_release(address)

        def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:
            self._places.pop(address, None)
            self._kept_labels.pop(address, None)
            self._arriving.pop(address, None)
            self._values.pop(address, None)
            self._fills.pop(address, None)
            release(reference)

        return forget

    # Bytes.

    def _allocate(self, size: int, stage: Stage) -> int:
        try:
            address = self.allocator.malloc(size, self.stream)
        except AllocatorOutOfMemory as refusal:
            self.on_refusal()
            self.refusal = self._outcome(refusal)
            text = self._refusal(refusal)
            self.seen.refusals.append(f"{where_called()}: {text}")
            raise torch.OutOfMemoryError(text) from None
        index = super()._allocate(size, stage)
        if len(self._steps) >= _FIRST_STEP_WITH_PLACES:
            self.seen.made_at[index] = where_called()
        if stage is Stage.BUILD:  # what is a weight says the first module that runs, or an optimizer
            self._classes[index] = TensorClass.ACTIVATION
        self._addresses[index] = address
        self._streams.append(self.stream)
        return index

    def step_mark(self) -> StepMark:
        """Return where a step that begins now would begin."""
        return StepMark(len(self._events), len(self._ops))

    def add_steps(self, marks: Sequence[StepMark]) -> None:
        """Let steps have begun at earlier marks."""
        self._steps = sorted([*self._steps, *marks], key=lambda mark: (mark.event, mark.op))

    def trace(self) -> LedgerTrace:
        """Return what was recorded so far."""
        return replace(super().trace(), streams=tuple(self._streams) if any(self._streams) else ())

    def _outcome(self, refusal: AllocatorOutOfMemory) -> OutOfMemory:
        trace = self.trace()
        by_class, by_unit = holders(trace, len(trace.events) - 1)
        return OutOfMemory(
            step=len(trace.steps), stage=self._stage, unit=self._unit, requested_bytes=refusal.requested_bytes,
            allocated_bytes=refusal.allocated_bytes, reserved_bytes=refusal.reserved_bytes,
            capacity_bytes=refusal.capacity_bytes or 0, by_class=by_class, by_unit=by_unit,
        )  # fmt: skip

    def _refusal(self, refusal: AllocatorOutOfMemory) -> str:
        """Return torch's words for it, and where the code stood."""
        free = max(self.card.allocator_capacity_bytes - refusal.reserved_bytes, 0)
        unused = refusal.reserved_bytes - refusal.allocated_bytes
        place = f"in the {self._stage} pass" if self._stage in {Stage.FORWARD, Stage.BACKWARD} else f"in {self._stage}"
        return (
            f"CUDA out of memory. Tried to allocate {format_bytes(refusal.requested_bytes)}. GPU 0 has a total "
            f"capacity of {format_bytes(self.card.memory_bytes)} of which {format_bytes(free)} is free. Of the "
            f"allocated memory {format_bytes(refusal.allocated_bytes)} is allocated by PyTorch, and "
            f"{format_bytes(unused)} is reserved by PyTorch but unallocated. "
            f"(virtual {self.card.name}, {place}{f' of {self._unit}' if self._unit else ''})"
        )

    def _release(self, index: int, size: int) -> None:
        super()._release(index, size)
        self.allocator.free(self._addresses.pop(index))

    def _take_workspace(self) -> None:
        """Take cuBLAS's workspace: one for the thread of the forward pass, one for that of the backward pass."""
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward not in self.first_matmuls:
            self.first_matmuls.add(is_backward)
            index = self._allocate(self.card.cublas_workspace_bytes, Stage.UPDATE)
            self._classes[index], self._units[index] = TensorClass.WORKSPACE, "cublas"

    def _op_record(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, event: int
    ) -> OpRecord:
        """Record an op; the type of a matmul's result, where it is an operand, says nothing of its arithmetic."""
        operands = tuple(value for value in args if not isinstance(value, torch.dtype))
        return super()._op_record(func, operands, kwargs, out, event)

    def _flops(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        """Count attention with grouped heads as if each query head had keys of its own: so does torch from 2.12 on.

        A product with a 4-bit weight, bitsandbytes' own op (A, B, shape of B unpacked, ...), is counted as any other.
        """
        if func._schema.name in _FOUR_BIT_PRODUCTS:
            rows, _ = args[2]
            return int(2 * args[0].numel() * rows)
        first = _FIRST_KEY.get(func)
        if first is not None and args[first].shape[1] != args[first - 1].shape[1]:
            heads = args[first - 1].shape[1]
            wide = (t.new_empty((t.shape[0], heads, *t.shape[2:])) for t in args[first : first + 2])
            args = (*args[:first], *wide, *args[first + 2 :])
        return super()._flops(func, args, kwargs, out)

    # Where the code stands.

    def _stage_now(self) -> Stage:
        if torch._C._current_graph_task_id() != -1:
            return Stage.BACKWARD
        if self.updates:
            return Stage.UPDATE
        return Stage.FORWARD if self._steps else Stage.BUILD

    def _mark_sequence(self) -> None:
        """Note from which node of the autograd graph on a module's ops come."""
        number = torch._C._autograd._get_sequence_nr()
        if self._sequence and self._sequence[-1] == number:
            self._sequence_units[-1] = self._unit
        else:
            self._sequence.append(number)
            self._sequence_units.append(self._unit)

    def _unit_of_node(self) -> str:
        """Return the module whose forward pass made the node that autograd is at."""
        if self._modules:  # recomputation
            return self._modules[-1]
        node = torch._C._current_autograd_node()
        if node is None or not self._sequence:
            return ""
        position = bisect_right(self._sequence, node._sequence_nr()) - 1
        return self._sequence_units[position] if position >= 0 else ""


_PLAIN = torch._C._disabled_torch_dispatch_impl
"""What a subclass has that leaves the dispatcher alone."""
_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
_ENGINE = _engine_run_backward.__code__
_FIRST_KEY = {
    _ATEN._scaled_dot_product_flash_attention.default: 1,
    _ATEN._scaled_dot_product_flash_attention_backward.default: 2,
}
"""Where the keys stand among the operands of attention that takes grouped heads; queries before, values after."""
_FOUR_BIT_PRODUCTS = frozenset({"bitsandbytes::gemm_4bit", "bitsandbytes::gemv_4bit"})
_HOST_WORK = 2**20
"""Bytes from which arithmetic on the host is worth a place in the timeline."""
_FIRST_STEP_WITH_PLACES = 3
_REAL_WORK = 2**20
"""Bytes of real operands from which an op's result is counted."""
_REAL_BYTES = 2**28
"""Bytes of such results that are computed for real at a time."""
_INTEGER_FACTORIES = frozenset({_ATEN.arange, _ATEN.randint, _ATEN.randperm})
_KNOWN_FACTORIES = frozenset(
    {
        _ATEN.arange, _ATEN.eye, _ATEN.full, _ATEN.linspace, _ATEN.ones, _ATEN.rand, _ATEN.randint, _ATEN.randn,
        _ATEN.randperm, _ATEN.scalar_tensor, _ATEN.tril_indices, _ATEN.triu_indices, _ATEN.zeros,
    }
)  # fmt: skip
_SHRUNK = {
    _ATEN.mse_loss.default: 2, _ATEN.smooth_l1_loss.default: 2, _ATEN.binary_cross_entropy.default: 3,
}  # fmt: skip
"""Losses whose mean or sum lies in the storage of all their elements (aten/src/ATen/native/Loss.cpp, cuda/Loss.cu): the
result is resized to a number. By the place of the reduction among the arguments."""
_WORKSPACES = {
    **dict.fromkeys((_ATEN.convolution, _ATEN.convolution_backward), "workspaces of cuDNN's convolutions"),
    **dict.fromkeys((_ATEN._fft_c2c, _ATEN._fft_r2c, _ATEN._fft_c2r), "workspaces of cuFFT"),
    **dict.fromkeys(
        (_ATEN._linalg_svd, _ATEN._linalg_eigh, _ATEN.linalg_qr, _ATEN.linalg_cholesky_ex, _ATEN.linalg_lu_factor_ex,
         _ATEN.linalg_inv_ex, _ATEN._linalg_solve_ex),
        "workspaces of cuSOLVER",
    ),
}  # fmt: skip
"""What libraries take inside of ops, by how they decide at run time."""
_QUESTIONS = frozenset(
    {_ATEN.gt, _ATEN.lt, _ATEN.ge, _ATEN.le, _ATEN.eq, _ATEN.ne, _ATEN.logical_not, _ATEN.logical_and, _ATEN.logical_or}
)
"""Ops that ask something of a number."""
_INTO_ZEROS = frozenset(
    {_ATEN.index_put.default, _ATEN.scatter.src, _ATEN.scatter_add.default, _ATEN.index_add.default}
)
_PUTS = frozenset({_ATEN.index_put_.default, _ATEN.index_put.default})
_ANY_ALL = frozenset({_ATEN.any.default, _ATEN.all.default, _ATEN._is_any_true.default, _ATEN._is_all_true.default})
_FILLS = frozenset({_ATEN.fill_.Scalar, _ATEN.zero_.default, _ATEN.copy_.default})
"""Ops after which nothing is left of what a tensor held."""


def _do_nothing() -> None:
    """Wait for whoever wants to know."""


def _makes_much(func: torch._ops.OpOverload, operands: list[Tensor]) -> bool:
    """Return whether an op on real tensors makes a large one whose shape is known beforehand."""
    if func.is_view or func._schema.is_mutable or func in DATA_DEPENDENT:
        return False
    return sum(tensor.nbytes for tensor in operands) >= _REAL_WORK


def _storage(num_bytes: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(num_bytes)  # type: ignore[no-untyped-call]


def _made_otherwise(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return what an op makes where torch's own answer on the meta device is another than a card's."""
    if func is _ATEN._grouped_mm.default:
        return _grouped_matmul(*args, **kwargs)
    if func in _SHRUNK and _is_reduced(func, args):
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
        return torch.empty(shape, dtype=args[0].dtype, device=_META).resize_(())
    return None


def _is_reduced(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    position = _SHRUNK[func]
    return bool(args[position]) if len(args) > position else True


def _is_small(tensor: Tensor) -> bool:
    limit = _KNOWN_FLOATS if tensor.is_floating_point() or tensor.is_complex() else _KNOWN_INTEGERS
    return tensor.numel() <= limit


def _is_small_factory(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether what a factory makes is small enough to be known."""
    packet = func._overloadpacket
    dtype = kwargs.get("dtype")
    if dtype is None:
        is_integer = packet in _INTEGER_FACTORIES and not any(isinstance(value, float) for value in args)
        dtype = torch.int64 if is_integer else torch.get_default_dtype()
    sizes = next((value for value in args if isinstance(value, list | tuple)), None)
    if sizes is None:  # arange, eye, linspace, randperm: their numbers are bounds
        count = max((abs(value) for value in args if isinstance(value, int | float)), default=1)
    else:
        count = math.prod(sizes)
    return count <= (_KNOWN_FLOATS if dtype.is_floating_point or dtype.is_complex else _KNOWN_INTEGERS)


def _asked_for(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]
) -> Place | None:
    """Return the place that an op's device names; None where it names none, or what it makes is made for real."""
    device = kwargs.get("device")
    if device is None or device.type == "meta":
        return None
    if device.type == "cuda":
        return Place.DEVICE
    is_real = not any(tensor.is_meta for tensor in operands)
    return None if is_real and _stays_real(func, args, kwargs) else Place.HOST


def _accumulated(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> Tensor | None:
    """Return the tensor that autograd itself writes its sum into on a card; None where it makes a new one.

    One of several gradients that are added: ``InputBuffer::accumulate`` (torch/csrc/autograd/input_buffer.cpp) adds in
    place into one that nobody else holds, but never where tensors are on the meta device. Zeros that a gradient is put
    into: ``index_backward``, ``value_selecting_reduction_backward`` (torch/csrc/autograd/FunctionsManual.cpp),
    ``gather_backward`` and ``index_select_backward`` (aten/src/ATen/native) write in place, but never under a mode like
    this one. They are told from other ops by who called: autograd's engine, not Python code in a backward pass.
    """
    if func is _ATEN.add.Tensor and len(args) == 2:
        is_like = isinstance(args[1], Tensor) and args[0].shape == args[1].shape and args[0].dtype is args[1].dtype
        targets: tuple[Tensor, ...] = args if is_like else ()
    else:
        targets = args[:1] if func in _INTO_ZEROS else ()
    if not targets or sys._getframe(3).f_code is not _ENGINE:
        return None
    for gradient in targets:
        storage = gradient.untyped_storage()
        # Two users: the tensor, and the object that asks.
        if torch._C._storage_Use_Count(storage._cdata) == 2 and torch.ops.aten.is_non_overlapping_and_dense(gradient):
            return gradient
    return None


def _takes_both(func: torch._ops.OpOverload) -> bool:
    """Return whether operands may lie in two places: a copy, indices, or an update of paged state."""
    return func in _COPIES or func in _TAKES_HOST_INDICES or func.namespace == "bitsandbytes"


def _without_generator(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments without a generator, of no use on meta tensors, and without a wish for pinned memory."""
    found = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    return found | {"generator": None} if "generator" in found else found


def _stays_real(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether what an op makes on the CPU is made for real: copies of real data, and small integers."""
    if func is _ATEN._to_copy.default:
        return True
    dtype = kwargs.get("dtype")
    if any(isinstance(value, list | tuple) and math.prod(value) == 0 for value in args[:1]):
        return True  # no bytes; torch.load makes such, and gives it a real storage
    is_integer = dtype is None and func._overloadpacket in _INTEGER_FACTORIES
    if not is_integer and (dtype is None or dtype.is_floating_point or dtype.is_complex):
        return False
    return _is_small_factory(func, args, kwargs)


def _written(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an op changes."""
    if not func._schema.is_mutable:
        return []
    found: list[Tensor] = []
    for position, name in _written_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        found += tensors_in([value])
    return found


@cache
def _written_arguments(func: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    return tuple(
        (position, item.name)
        for position, item in enumerate(func._schema.arguments)
        if item.alias_info is not None and item.alias_info.is_write
    )


def _to_meta(value: Any) -> Any:
    """Return a value with the CPU's tensors, single numbers excepted, as meta tensors of the same layout."""
    if isinstance(value, Tensor):
        if value.is_meta or not value.dim():
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    if isinstance(value, list | tuple):
        return type(value)(_to_meta(item) for item in value)
    return value


def _replace(value: Any, values: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return values[id(value)]
    if isinstance(value, list | tuple):
        return type(value)(_replace(item, values) for item in value)
    return value


def _grouped_matmul(
    one: Tensor, other: Tensor, offs: Tensor | None = None, _bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return what a grouped matmul makes, rows aligned to 16 bytes; torch's own answer on meta is for bfloat16 alone.

    ``create_grouped_gemm_output_tensor`` of aten/src/ATen/native/GroupedMMUtils.h.
    """
    dtype = out_dtype or one.dtype
    rows, columns = one.shape[-2], other.shape[-1]
    aligned = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize
    if one.dim() != other.dim():
        return torch.empty_strided((rows, columns), (aligned, 1), dtype=dtype, device=_META)
    if one.dim() == 2 and offs is None:
        raise ValueError("_grouped_mm: offs is missing; two matrices are divided into groups by it; say the offsets.")
    groups = one.shape[0] if offs is None or one.dim() == 3 else offs.shape[0]
    strides = (rows * aligned, aligned, 1)
    return torch.empty_strided((groups, rows, columns), strides, dtype=dtype, device=_META)


def _on_cpu(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], values: dict[int, Tensor]
) -> Any:
    """Return what an op gives of values, nothing as an empty tuple; None where the CPU has no kernel for it.

    In float64 where it has none for whole numbers and CUDA has one.
    """
    try:
        made = func(*(_replace(value, values) for value in args), **{k: _replace(v, values) for k, v in kwargs.items()})
    except NotImplementedError:
        if all(value.is_floating_point() for value in values.values()):
            return None
        return _on_cpu(func, args, kwargs, {key: value.double() for key, value in values.items()})
    return () if made is None else made  # of lists that are written in place


def _like(value: Any) -> Any:
    """Return meta tensors of the same layout as real ones."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    if isinstance(value, list | tuple):
        return type(value)(_like(item) for item in value)
    return value
