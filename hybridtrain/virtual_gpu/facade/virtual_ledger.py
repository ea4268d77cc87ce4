"""Ledger of code on a virtual card: every tensor is a meta tensor with a virtual device.

A meta tensor has a shape but no bytes. Here its storage also has a device, host or card, which results inherit
(``placed_storages.py``), so models of any size run without memory. Values from the script's own data stay known
(``known_values.py``); others are placeholders (``placeholders.py``), whose uses are listed.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridtrain.virtual_gpu.account.op_record import Lane, OpRecord, Stage, placed
from hybridtrain.virtual_gpu.account.op_rules import (
    MATMUL_OPS,
    Args,
    Kwargs,
    MetaCache,
    Op,
    OpAnswer,
    OpKey,
    count_bytes,
    is_truly_meta,
    op_key,
    tensors_in,
    traits_of,
    written_tensors,
)
from hybridtrain.virtual_gpu.allocator.allocator import CachingAllocator
from hybridtrain.virtual_gpu.cards.card import Card, Host
from hybridtrain.virtual_gpu.facade.convolutions import CONVOLUTIONS
from hybridtrain.virtual_gpu.facade.known_values import KnownValues, Place
from hybridtrain.virtual_gpu.facade.op_sets import (
    COPIES,
    FLOAT8_PRODUCTS,
    META,
    WORKSPACES,
    accumulated,
    has_shapes_alone,
    is_dynamic,
    is_made_on_cpu,
    is_real_tensor,
    is_small,
    like,
    made_otherwise,
    makes_large_known_shape,
    map_tensors,
    require_one_dtype,
    to_meta,
    touches_sparse,
    without_generator,
)
from hybridtrain.virtual_gpu.facade.own_ops import OwnOps
from hybridtrain.virtual_gpu.facade.placed_storages import PlacedStorages
from hybridtrain.virtual_gpu.facade.placeholders import Placeholders, UnplannedOpError, where_called
from hybridtrain.virtual_gpu.facade.sequence_ops import OF_SEQUENCES, RECURRENT, recurrent_work

_ATEN = torch.ops.aten
_PLAIN = torch._C._disabled_torch_dispatch_impl
"""``__torch_dispatch__`` of subclasses that do not intercept ops."""
_FIRST_KEY = {
    _ATEN._scaled_dot_product_flash_attention.default: 1,
    _ATEN._scaled_dot_product_flash_attention_backward.default: 2,
}
"""Index of the keys among the operands of attention ops with grouped heads; queries before, values after."""
_FOUR_BIT_PRODUCTS = frozenset({"bitsandbytes::gemm_4bit", "bitsandbytes::gemv_4bit"})
_FUSED_UPDATES = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
_FILLS_BY_ONE = {
    **{fill.Tensor: fill.Scalar for fill in (_ATEN.masked_fill, _ATEN.masked_fill_)},
    **{fill.int_Tensor: fill.int_Scalar for fill in (_ATEN.index_fill, _ATEN.index_fill_)},
}
_HOST_WORK = 2**20
"""Least bytes of host arithmetic that appears in the timeline."""


@dataclass(frozen=True, slots=True)
class _KnownOp:
    """An op whose operands' shapes decide all that it does on the card."""

    answer: OpAnswer
    record: OpRecord
    are_small: bool
    """Whether the values of its operands may be known: then they decide, too."""


class VirtualLedger(PlacedStorages):  # type: ignore[no-untyped-call]
    """Runs PyTorch code on a virtual card: a ``StorageLedger`` with the card's out-of-memory errors."""

    def __init__(self, card: Card, host: Host | None, allocator: CachingAllocator) -> None:
        super().__init__(card, host, allocator)
        self._meta_cache = MetaCache()  # a script may change default types as it goes
        self.is_inside = False
        """Whether an op is running: then ``Tensor.device`` is the real one."""
        self.placeholders = Placeholders(self.seen.refusals.append)
        self.values = KnownValues(self._held, self.placeholders)
        self.after_backward: Callable[[], None] = lambda: None
        self.most_real_bytes = 2**28
        """Limit of real memory for large results on the host, in bytes."""
        self._real_bytes = 0
        self._plain_ops: dict[OpKey, _KnownOp] = {}
        self.own_ops = OwnOps()
        self.card_index = 0
        """Index of the card among ``num_cards`` of the machine."""
        self.num_cards = 1
        self.links: Callable[[Op, Args, Any], float | None] | None = None
        """Op -> seconds that a collective occupies the link; None for other ops."""
        self._last_of_stream: dict[int, int] = {}
        self._awaited: dict[int, list[int]] = {}
        self._are_collectives_due = False
        self._handlers: dict[Op, Callable[..., Any]] = {
            _ATEN._local_scalar_dense.default: self.values.read,
            _ATEN.item.default: self.values.read,  # as it comes from below autograd
            _ATEN.is_nonzero.default: lambda *call: bool(self.values.read(*call)),
            _ATEN.is_pinned.default: lambda *_: False,
            **dict.fromkeys((_ATEN.equal.default, _ATEN.allclose.default), self.values.compare),
            **dict.fromkeys(
                (_ATEN._pin_memory.default, _ATEN._amp_update_scale_.default), lambda _func, args, _kwargs: args[0]
            ),
            **dict.fromkeys(
                (_ATEN._amp_foreach_non_finite_check_and_unscale_.default, _ATEN.record_stream.default), lambda *_: None
            ),
            _ATEN._nested_tensor_from_mask_left_aligned.default: self._keep_padding,
            **{getattr(_ATEN, name).tensor_lr: partial(self._with_rate, name) for name in _FUSED_UPDATES},
            **{fill: partial(self._fill_by_one, of_number) for fill, of_number in _FILLS_BY_ONE.items()},
            _ATEN.set_.default: self._set_storage,
            _ATEN.set_.source_Storage: self._set_storage,
            _ATEN.set_.source_Storage_storage_offset: self._set_storage,
            _ATEN.set_.source_Tensor: self._set_storage,
        }

    def __torch_dispatch__(self, func: Op, types: Sequence[Any], args: Args = (), kwargs: Kwargs | None = None) -> Any:
        """Run an op on meta tensors, give its results a place, count them, keep what is known of their values."""
        for kind in types:
            if kind.__torch_dispatch__ is not _PLAIN:  # a subclass takes itself apart; its parts come back here
                return NotImplemented
        traits = traits_of(func)
        body = None if traits.is_torchs else self.own_ops.body_of(func)
        if body and any(self.place_of(t) is Place.DEVICE for t in tensors_in([*args, *(kwargs or {}).values()])):
            with self:
                return body(*args, **(kwargs or {}))
        outer, self.is_inside = self.is_inside, True
        try:
            if traits.is_composite and func not in self._handlers:
                with self:
                    return func.decompose(*args, **(kwargs or {}))
            if func.is_view and self._is_simple_view(func, args, kwargs):
                return func(*args)
            kwargs = kwargs or {}
            operands = list(tensors_in([*args, *kwargs.values()]))
            run = self._run_sparse if touches_sparse(func, operands) else self._run
            return run(func, args, kwargs, operands)
        except UnplannedOpError:
            raise
        except NotImplementedError as error:  # CUDA has a kernel for it
            raise self.unplanned(f"{func}: torch {torch.__version__} has no meta rule for this op") from error
        finally:
            self.is_inside = outer

    def _keep_padding(self, func: Op, _args: Args, _kwargs: Kwargs) -> bool:
        self.placeholders.note(func, "may an encoder drop its padding: no")
        return False

    def _fill_by_one(self, fill: Op, func: Op, args: Args, _kwargs: Kwargs) -> Any:
        """Fill with a tensor of one number, which may be on the host."""
        with self:
            return fill(*args[:-1], self.values.read(func, args[-1:], {}))

    def _with_rate(self, name: str, _func: Op, args: Args, kwargs: Kwargs) -> Any:
        """Run a fused update whose learning rate is a tensor as one of a number: shapes are the same."""
        with self:
            return getattr(_ATEN, name).default(*args, **{**kwargs, "lr": 0.0})

    def _is_simple_view(self, func: Op, args: Args, kwargs: Kwargs | None) -> bool:
        """Return whether a view changes nothing here: of one virtual tensor, outside of a backward pass."""
        if self._stage_now() is not self._stage or self._stage is Stage.BACKWARD:
            return False
        if kwargs or self._target is not None or self._are_collectives_due or not traits_of(func).has_one_tensor:
            return False
        tensor = args[0]
        if not is_truly_meta(tensor) or tensor.layout is not torch.strided:
            return False
        holding = self._held.get(tensor.untyped_storage()._cdata)
        return holding is not None and holding.size >= tensor.untyped_storage().nbytes()

    def require_card(self, device: Any) -> None:
        """Raise CUDA's ``RuntimeError`` for a card that this machine does not have."""
        index = device if isinstance(device, int) else torch.device("cuda" if device is None else device).index
        if index is not None and index >= self.num_cards:
            told = f"virtual GPU: {device} on a machine with {self.num_cards} card" + "s" * (self.num_cards > 1)
            raise RuntimeError(f"CUDA error: invalid device ordinal ({told}; --world N plans one of several)")

    def unplanned(self, what: str) -> UnplannedOpError:
        """Return an error, noted here, as a script may catch what a card would not raise."""
        text = f"{where_called()}: {what}; use another code path, or skip this line."
        self.seen.refusals.append(text)
        return UnplannedOpError(text)

    def _run_sparse(self, func: Op, args: Args, kwargs: Kwargs, operands: list[Tensor]) -> Any:
        asks_for_card = torch.device(kwargs.get("device") or "cpu").type == "cuda"
        if asks_for_card or any(self.place_of(tensor) is Place.DEVICE for tensor in operands):
            raise self.unplanned(f"{func}: sparse tensors are planned on the host alone")
        real = {id(tensor): self.values.on_host(func, tensor) for tensor in operands}
        if kwargs.get("device") is not None and operands:  # what torch took from an operand without bytes
            kwargs = dict(kwargs) | {"device": next(iter(real.values())).device}
        return func(*(map_tensors(value, lambda tensor: real[id(tensor)]) for value in args), **kwargs)

    def _run(self, func: Op, args: Args, kwargs: Kwargs, operands: list[Tensor]) -> Any:
        target = self._target if self._target is not None else self._asked_for(func, args, kwargs, operands)
        place = self._place(func, operands) if target is None else target
        if place is None:
            if makes_large_known_shape(func, operands) and not any(tensor.is_meta for tensor in operands):
                return self._compute_real(func, args, kwargs, operands)
            return func(*args, **kwargs)  # real, or on meta by the script's own wish
        if self._are_collectives_due:
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
            self._unit = self.modules.of_node()
            gradient = accumulated(func, args)
            if gradient is not None:
                self.values.forget(gradient)
                self._append_compute(func, args, {}, gradient, len(self._events))
                return gradient
        return self._perform(func, args, kwargs, operands, place, target)

    def _asked_for(self, func: Op, args: Args, kwargs: Kwargs, operands: list[Tensor]) -> Place | None:
        """Return the place of an op's device argument; None where it has none, or makes real tensors."""
        device = kwargs.get("device")
        if device is None or device.type == "meta":
            return None
        if device.type == "cuda":
            if device.index:
                self.require_card(device)
            return Place.DEVICE
        is_real = not any(tensor.is_meta for tensor in operands)
        return None if is_real and is_made_on_cpu(func, args, kwargs) else Place.HOST

    def _perform(
        self, func: Op, args: Args, kwargs: Kwargs, operands: list[Tensor],
        place: Place, target: Place | None
    ) -> Any:  # fmt: skip
        key = None
        if place is Place.DEVICE and target is None and not self.stream and self.links is None:
            key = op_key(func, args, kwargs)
            known = None if key is None else self._plain_ops.get(key)
            if known is not None and not (known.are_small and self.values.are_known(operands)):
                return self._repeat_op(known, func, args, kwargs)
        if func in FLOAT8_PRODUCTS and place is Place.DEVICE and not self.card.has_float8_tensor_cores:
            raise RuntimeError(
                f"{func}: float8 products need compute capability 8.9; {self.card.name} has "
                f"{self.card.compute_capability}; use bfloat16"
            )
        written = written_tensors(func, args, kwargs)
        for tensor in written:  # a storage that Python copied is first seen here
            self._enter_at(tensor, place)
        results = self.values.compute(func, args, kwargs, operands)
        if written and not written[0].is_meta:
            return self._write_to_host(func, args, written, results)
        out = self._call(func, args, kwargs, results)
        self._book(func, args, kwargs, out, place, target)
        self.values.keep(func, args, out, written, results)
        if key is not None and results is None and has_shapes_alone(func) and not self._scratch_bytes(func, args):
            answer = self._meta_cache.known(key)
            if answer is not None:
                if len(self._plain_ops) >= MetaCache.MOST:
                    self._plain_ops.clear()
                self._plain_ops[key] = _KnownOp(answer, self._ops[-1], all(map(is_small, operands)))
        return out

    def _repeat_op(self, known: _KnownOp, func: Op, args: Args, kwargs: Kwargs) -> Any:
        """Do what ``_perform`` did for operands of the same shapes."""
        if known.record.is_matmul:
            self._take_workspace()
        written = written_tensors(func, args, kwargs) if func._schema.is_mutable else ()
        for tensor in written:  # a storage that Python copied is first seen here
            self._enter_at(tensor, Place.DEVICE)
            self.values.forget(tensor)
        event = len(self._events)
        out = known.answer(args, kwargs)
        for tensor in (out,) if isinstance(out, Tensor) else tensors_in([out]):
            self._enter_at(tensor, Place.DEVICE)
        waits, self._joined = tuple(self._joined), []
        self._last_compute = len(self._ops)
        self._ops.append(placed(known.record, event, self._stage, self._unit, waits))
        return out

    def _compute_real(self, func: Op, args: Args, kwargs: Kwargs, operands: list[Tensor]) -> Any:
        """Run an op on real tensors, for real as long as what such ops made is little; beyond, it is counted alone.

        So data that a script prepares keeps its values, and weights that are converted or stacked on the host take no
        memory.
        """
        shapes = self._call(func, args, kwargs, None)
        size = sum(tensor.nbytes for tensor in tensors_in([shapes]))
        if self._real_bytes + size > self.most_real_bytes:
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

    def _call(self, func: Op, args: Args, kwargs: Kwargs, results: Any) -> Any:
        if func in OF_SEQUENCES:
            return OF_SEQUENCES[func](self.values.resolve_lengths(func, args))
        return self._call_on_meta(func, args, kwargs, results)

    def _call_on_meta(self, func: Op, args: Args, kwargs: Kwargs, results: Any) -> Any:
        if is_dynamic(func):
            if results is not None:
                return map_tensors(results, like)
            if self.values.is_masked_fill(func, args):
                return args[0] if func._schema.is_mutable else torch.empty_like(args[0])
            selected = self.values.selected(func, args)
            if selected is not None:
                return selected
            args = self.values.resolve_masks(func, args)
        kwargs = without_generator(kwargs)
        is_placed = kwargs.get("device") is not None
        if is_placed:
            kwargs["device"] = META
        if is_real_tensor(args, kwargs):
            args, kwargs = map_tensors(args, to_meta), {name: map_tensors(v, to_meta) for name, v in kwargs.items()}
        if func is _ATEN._to_copy.default:
            if not args[0].is_meta:
                args = (torch.empty_like(args[0], device=META),)
            kwargs = {name: value for name, value in kwargs.items() if name not in {"device", "non_blocking"}}
        if is_placed:  # what a factory makes depends on the default type, too
            return func(*args, **kwargs)
        made = made_otherwise(func, args, kwargs)
        return made if made is not None else self._meta_cache.call(func, args, kwargs)

    def _set_storage(self, func: Op, args: Args, kwargs: Kwargs) -> Any:
        """Give a tensor another storage: no byte moves, and known values of either storage stay known."""
        place = self._place(func, list(tensors_in(args)))
        out = func(*args, **kwargs)
        if place is not None:
            self._enter_at(out, place)
        return out

    def _write_to_host(self, func: Op, args: Args, written: Sequence[Tensor], results: Any) -> Any:
        """Write a virtual tensor's known values into a real one, placeholder values elsewhere."""
        if results is None:
            self.placeholders.note(func, "written into a tensor on the CPU: ones")
            for tensor in written:
                if not tensor.is_meta:
                    tensor.fill_(1)
        if len(written) == 1:
            return args[0] if isinstance(args[0], Tensor) else written[0]
        return None

    # What is booked: results, copies, work of the host, and who waits for whom.

    def _book(
        self, func: Op, args: Args, kwargs: Kwargs, out: Any,
        place: Place, target: Place | None
    ) -> None:  # fmt: skip
        event = len(self._events)
        if place is Place.DEVICE:
            require_one_dtype(func, args)
            if func in MATMUL_OPS:
                self._take_workspace()
        for tensor in tensors_in(out if isinstance(out, tuple) else [out]):
            self._enter_at(tensor, place)
        if func.is_view:
            return
        if target is not None or func in COPIES:
            self._book_copy(func, args, kwargs, out, place)
        elif place is Place.DEVICE:
            scratch = self._scratch_bytes(func, args)
            if scratch:
                self._release(self._allocate(scratch, Stage.UPDATE), scratch)
            self._append_op(func, args, kwargs, out, event)
            self._note_workspace(func, scratch)
        else:
            size = count_bytes(func, args, kwargs, out)
            if size >= _HOST_WORK:
                self.work(Lane.HOST, size, (self._last_compute,))

    def _note_workspace(self, func: Op, scratch: int) -> None:
        library = WORKSPACES.get(func._overloadpacket)
        if func in CONVOLUTIONS:
            self.seen.workspace_bytes = max(self.seen.workspace_bytes, scratch)
            library = "workspaces that cudnn.benchmark tries" if torch.backends.cudnn.benchmark else None
        if library is not None:
            self.seen.uncounted.setdefault(library, where_called())

    def _book_copy(self, func: Op, args: Args, kwargs: Kwargs, out: Any, place: Place) -> None:
        is_copy = func in COPIES
        sources = {self._place_or_host(tensor) for tensor in tensors_in(args)}
        if not sources or (len(sources) < 2 if is_copy else sources == {place}):
            if place is Place.DEVICE and (sources or not is_copy):
                self._append_op(func, args, kwargs, out, len(self._events))
            return
        destination = self._place_or_host(next(tensors_in([args[0]]))) if is_copy else place
        size = sum(tensor.nbytes for tensor in tensors_in([args[0] if is_copy else out]))
        self.join(
            self.work(Lane.COPY_IN if destination is Place.DEVICE else Lane.COPY_OUT, size, (self._last_compute,))
        )

    def _place_or_host(self, tensor: Tensor) -> Place:
        holding = self._held.get(tensor.untyped_storage()._cdata)
        return Place.HOST if holding is None else holding.place

    def _append_op(self, func: Op, args: Args, kwargs: Kwargs, out: Any, event: int) -> None:
        """Record an op on the lane of its stream: compute is the first stream's, what the others do is for the link."""
        collective = None if self.links is None else self.links(func, args, out)
        if not self.stream and collective is None:
            self._append_compute(func, args, kwargs, out, event)
            return
        joined, self._joined = self._joined, []
        record = self._op_record(func, args, kwargs, out, event)
        waits = [*self._awaited.pop(self.stream, ())] if self.stream else [*joined, self._last_compute]
        self._joined = joined
        self._last_of_stream[self.stream] = number = len(self._ops)
        self._ops.append(
            replace(record, lane=Lane.LINK, waits=tuple(w for w in waits if w >= 0), link_seconds=collective or 0.0)
        )
        if not self.stream:
            for tensor in tensors_in([*args, out]):
                holding = self._held.get(tensor.untyped_storage()._cdata)
                if holding is not None:
                    holding.arriving, self._are_collectives_due = number, True

    def _append_compute(self, func: Op, args: Args, kwargs: Kwargs, out: Any, event: int) -> None:
        self._last_compute = len(self._ops)
        self._ops.append(self._op_record(func, args, kwargs, out, event))

    def launch(self, name: str, arguments: Iterable[Any]) -> None:
        """Record a launch of a kernel that is not run: each tensor on the card is read or written once."""
        tensors = [value for value in arguments if isinstance(value, Tensor) and self.place_of(value) is Place.DEVICE]
        for tensor in tensors:  # any of them may be written
            self.values.forget(tensor)
        self._await(tensors)
        waits, self._joined = tuple(self._joined), []
        self._last_compute = len(self._ops)
        self._ops.append(
            OpRecord(
                name=name, event=len(self._events), stage=self._stage, unit=self._unit, is_matmul=False, flops=0,
                bytes_moved=sum(tensor.nbytes for tensor in tensors),
                dtype=next((str(tensor.dtype)[6:] for tensor in tensors if tensor.is_floating_point()), ""),
                waits=waits,
            )
        )  # fmt: skip

    @property
    def num_ops(self) -> int:
        """Ops so far."""
        return len(self._ops)

    def repeat_ops(self, ops: range, times: int) -> None:
        """Count the time of earlier ops again: of work that is not run, as it takes as long."""
        event = len(self._events)
        self._ops += [replace(self._ops[number], event=event, waits=()) for number in ops] * times

    def last_op(self, stream: int) -> int:
        """Return the last op of a stream, -1 before the first."""
        return self._last_of_stream.get(stream, -1) if stream else self._last_compute

    def await_op(self, stream: int, op: int) -> None:
        """Make later work on a stream wait for an op."""
        if stream:
            self._awaited.setdefault(stream, []).append(op)
        else:
            self.join(op)

    def _await(self, operands: Sequence[Tensor]) -> None:
        """Make the next op of the compute lane wait for collectives that it reads from."""
        for tensor in operands:
            holding = self._held.get(tensor.untyped_storage()._cdata)
            if holding is not None and holding.arriving is not None:
                number, holding.arriving = holding.arriving, None
                if not self.stream:
                    self.join(number)

    def _op_record(self, func: Op, args: Args, kwargs: Kwargs, out: Any, event: int) -> OpRecord:
        """Record an op; the type of a matmul's result, where it is an operand, says nothing of its arithmetic."""
        operands = tuple(value for value in args if not isinstance(value, torch.dtype))
        record = super()._op_record(func, operands, kwargs, out, event)
        return replace(record, shape=recurrent_work(func, args)[1]) if func in RECURRENT else record

    def _flops(self, func: Op, args: Args, kwargs: Kwargs, out: Any) -> int:
        """Count attention with grouped heads as if each query head had keys of its own: so does torch from 2.12 on.

        A product with a 4-bit weight, bitsandbytes' own op (A, B, shape of B unpacked, ...), is counted as any other.
        """
        if func in RECURRENT:
            return recurrent_work(func, args)[0]
        if func._schema.name in _FOUR_BIT_PRODUCTS:
            rows, _ = args[2]
            return int(2 * args[0].numel() * rows)
        first = _FIRST_KEY.get(func)
        if first is not None and args[first].shape[1] != args[first - 1].shape[1]:
            heads = args[first - 1].shape[1]
            wide = (t.new_empty((t.shape[0], heads, *t.shape[2:])) for t in args[first : first + 2])
            args = (*args[:first], *wide, *args[first + 2 :])
        return super()._flops(func, args, kwargs, out)
