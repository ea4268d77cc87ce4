"""A ledger of every storage: its allocator, purpose, bytes and lifetime.

It watches the dispatcher, so it sees the same ops on meta tensors (a dry run), on the CPU (a run with real arithmetic)
and on CUDA. Invariant: storages are watched through weak references; the ledger keeps none alive.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import hybridtrain.virtual_gpu.account.aten_scratch  # noqa: F401  registers rules
from hybridtrain.virtual_gpu.account.op_record import Lane, OpRecord, Stage, placed
from hybridtrain.virtual_gpu.account.op_rules import (
    MATMUL_OPS,
    Args,
    Kwargs,
    MetaCache,
    Op,
    OpKey,
    ScratchRule,
    count_bytes,
    count_flops,
    op_key,
    scratch_bytes,
    tensors_in,
)
from hybridtrain.virtual_gpu.account.repeated_work import GraphPieces, PendingBackward, Piece, Result, Work
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass


@dataclass(frozen=True, slots=True)
class StepMark:
    """The state at the beginning of a step."""

    event: int
    op: int


@dataclass(frozen=True, slots=True)
class LedgerTrace:
    """Complete record of a run. An event is a storage's ``index`` for its allocation and ``~index`` for its release."""

    sizes: tuple[int, ...]
    """Bytes of each storage, as requested."""
    classes: tuple[TensorClass, ...]
    units: tuple[str, ...]
    """``embedding``, ``block.3``, ``head`` or empty."""
    events: tuple[int, ...]
    ops: tuple[OpRecord, ...]
    steps: tuple[StepMark, ...]
    """The beginning of each optimizer step."""
    cache_releases: tuple[int, ...] = ()
    """Events before which the allocator's cache was emptied."""
    streams: tuple[int, ...] = ()
    """Stream of each storage's allocation; the allocator's cache is per stream. Empty: all on the first."""

    def stream_of(self, storage: int) -> int:
        """Return the stream that a storage was allocated on."""
        return self.streams[storage] if self.streams else 0

    def step_range(self, step: int) -> range:
        """Return the events of one step, counted from 0."""
        end = self.steps[step + 1].event if step + 1 < len(self.steps) else len(self.events)
        return range(self.steps[step].event, end)

    def step_ops(self, step: int) -> tuple[OpRecord, ...]:
        """Return the ops of one step, counted from 0."""
        end = self.steps[step + 1].op if step + 1 < len(self.steps) else len(self.ops)
        return self.ops[self.steps[step].op : end]

    def alive(self, event: int) -> Iterable[int]:
        """Return the storages that are live right after ``event``, in the order of their allocation."""
        alive: dict[int, None] = {}
        for entry in self.events[: event + 1]:
            if entry >= 0:
                alive[entry] = None
            else:
                del alive[~entry]
        return alive

    def live_bytes(self) -> Iterator[int]:
        """Yield the live bytes after each event."""
        live = 0
        for event in self.events:
            live += self.sizes[event] if event >= 0 else -self.sizes[~event]
            yield live


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment with the most live bytes."""

    total_bytes: int
    event: int
    by_class: dict[TensorClass, int]
    by_unit: dict[tuple[TensorClass, str], int]


def find_peak(trace: LedgerTrace, events: range) -> Peak:
    """Return the first moment of most live bytes within ``events``, with their holders.

    >>> with StorageLedger() as ledger:
    ...     ledger.begin_step()
    ...     total = torch.empty(1000, device="meta").exp().sum()
    >>> peak = find_peak(ledger.trace(), ledger.trace().step_range(0))
    >>> peak.total_bytes, peak.event
    (8000, 1)
    """
    live = peak = 0
    peak_event = events.start - 1
    for position, event in enumerate(trace.events[: events.stop]):
        live += trace.sizes[event] if event >= 0 else -trace.sizes[~event]
        if position >= events.start - 1 and live > peak:
            peak, peak_event = live, position
    return Peak(peak, peak_event, *holders(trace, peak_event))


def holders(
    trace: LedgerTrace, event: int, sizes: Mapping[int, int] | None = None
) -> tuple[dict[TensorClass, int], dict[tuple[TensorClass, str], int]]:
    """Return live bytes by class, and by class and unit, right after ``event``; ``sizes`` may be block sizes."""
    taken = trace.sizes if sizes is None else sizes
    by_class: dict[TensorClass, int] = dict.fromkeys(TensorClass, 0)
    by_unit: defaultdict[tuple[TensorClass, str], int] = defaultdict(int)
    for index in trace.alive(event):
        by_class[trace.classes[index]] += taken[index]
        by_unit[trace.classes[index], trace.units[index]] += taken[index]
    return by_class, dict(by_unit)


_DEFAULT_CLASS = {
    Stage.BUILD: TensorClass.WEIGHT,
    Stage.LOAD: TensorClass.ACTIVATION,
    Stage.FORWARD: TensorClass.ACTIVATION,
    Stage.BACKWARD: TensorClass.ACTIVATION,
    Stage.UPDATE: TensorClass.WORKSPACE,
}


_META_CACHES: defaultdict[torch.dtype, MetaCache] = defaultdict(MetaCache)
"""Caches by default dtype, shared by all ledgers: an op's results do not depend on the ledger, and a search plans many
small models."""


_TAPE = (
    "live_bytes", "peak_bytes", "_next_index", "_sizes", "_classes", "_units", "_events", "_ops", "_last_compute",
    "_joined",
)  # fmt: skip
"""The recorded effects of a ledger."""


class StorageLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live storage bytes while it is active (``with ledger:``).

        >>> with StorageLedger() as ledger:
        ...     with ledger.region(Stage.FORWARD, "block.0"):
        ...         hidden = torch.empty(1000, device="meta")
        ...         half = hidden.bfloat16()
        >>> ledger.live_bytes, ledger.trace().sizes, ledger.trace().units
        (6000, (4000, 2000), ('block.0', 'block.0'))

    Args:
        record: Keep every event and op for ``trace()``; otherwise only ``live_bytes`` and ``peak_bytes``, for training
        runs of any length.
        device: Device type to count (``meta``, ``cpu``, ``cuda``); None: all.
    """

    def __init__(self, *, record: bool = True, device: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.scratch_rules: dict[Op, ScratchRule] = {}
        """Before registered ones: of ops whose scratch depends on the card."""
        self._record = record
        self._device = device
        self._known_ops: dict[OpKey, OpRecord] = {}
        self._meta_cache = _META_CACHES[torch.get_default_dtype()]
        self._pieces: dict[Hashable, Piece | None] = {}
        """None: work that cannot be recorded."""
        self._graphs: dict[Hashable, GraphPieces | None] = {}
        self._next_index = 0
        self._alive: dict[int, tuple[int, int, weakref.ref[torch.UntypedStorage]]] = {}  # address -> index, bytes, ref
        self._sizes: list[int] = []
        self._classes: list[TensorClass] = []
        self._units: list[str] = []
        self._events: list[int] = []
        self._ops: list[OpRecord] = []
        self._steps: list[StepMark] = []
        self._cache_releases: list[int] = []
        self._stage = Stage.BUILD
        self._unit = ""
        self._last_compute = -1
        self._joined: list[int] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, and the default wrapper imports torch._dynamo, 0.9 s of a dry run."""
        return False

    def __torch_dispatch__(self, func: Op, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None) -> Any:
        """Run the op and enter its new storages."""
        kwargs = kwargs or {}
        if func.is_view:
            out = func(*args, **kwargs)
            for tensor in tensors_in([out]):
                self.enter(tensor)
            return out
        key = op_key(func, args, kwargs)
        out = func(*args, **kwargs) if key is None else self._meta_cache.call(func, args, kwargs, key)
        event = len(self._events)
        for tensor in tensors_in([out]):
            self.enter(tensor)
        scratch = self._scratch_bytes(func, args)
        if scratch:
            self._release(self._allocate(scratch, Stage.UPDATE), scratch)
        if self._record and (self._device is None or self._is_counted(args, kwargs, out)):
            self._last_compute = len(self._ops)
            self._ops.append(self._remembered_record(key, func, args, kwargs, out, event))
        return out

    def _scratch_bytes(self, func: Op, args: Args) -> int:
        rule = self.scratch_rules.get(func)
        return scratch_bytes(func, args) if rule is None else rule(args)

    @contextmanager
    def region(self, stage: Stage, unit: str) -> Iterator[None]:
        """Assign the storages allocated inside to ``unit`` and to the default class of ``stage``."""
        outer = (self._stage, self._unit)
        self._stage, self._unit = stage, unit
        try:
            yield
        finally:
            self._stage, self._unit = outer

    def label(self, tensor: Tensor, tensor_class: TensorClass, unit: str) -> None:
        """Set class and unit of the storage of ``tensor``, from its allocation on."""
        found = self._alive.get(tensor.untyped_storage()._cdata)
        if found is not None and self._record:
            self._classes[found[0]] = tensor_class
            self._units[found[0]] = unit

    def repeat(self, work: Work) -> tuple[Tensor, ...]:
        """Do work, or repeat its recorded effect if no operand has values; return its results.

        Only its results may outlive it.
        """
        key = work.full_key(self._stage) if self._record else None
        if key is None:
            return work.do()
        known = self._pieces.get(key)
        if known is not None:
            return self._write_down(known, work)[0]
        results, piece, _ = self._learn(work)
        self._pieces.setdefault(key, None if piece is None or piece.kept else piece)
        return results

    def repeat_forward(self, work: Work) -> tuple[tuple[Tensor, ...], PendingBackward | None]:
        """Do work that keeps tensors for ``repeat_backward``, or repeat its recorded effect.

        It is repeated only if its backward pass was recorded too; the results then have no graph.
        """
        key = work.full_key(self._stage) if self._record else None
        if key is None:
            return work.do(), None
        known = self._graphs.get(key)
        if known is not None and known.backward:
            results, kept = self._write_down(known.forward, work)
            return results, PendingBackward(key, work, known, kept, is_written=True)
        results, piece, kept = self._learn(work)
        if key not in self._graphs and piece is not None:
            known = self._graphs[key] = GraphPieces(piece)
        if known is None or known.forward != piece:  # something decides that is not in the key
            self._graphs[key] = None
            return results, None
        return results, PendingBackward(key, work, known, kept, is_written=False)

    def repeat_backward(
        self,
        held: PendingBackward | None,
        operands: Sequence[Tensor],
        differentiate: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """Run or record the backward pass of ``repeat_forward``, releasing its tensors; return the results.

        Args:
            held: The result of ``repeat_forward``.
            operands: Tensors that it depends on besides kept ones.
            differentiate: Called with the results of a repeated forward pass, else with none.
        """
        if held is None:
            return differentiate(())
        work = Work(partial(differentiate, ()), operands, lambda: True, held.work.memory)
        key = work.full_key(self._stage)
        known = held.pieces.backward.get(key)
        if held.is_written:
            if known is None:
                known = held.pieces.backward[key] = self._learn_apart(held, operands, differentiate)
            return self._write_down(known, work, held.kept)[0]
        results, piece, kept = self._learn(work, held.kept)
        if piece is None or kept or not piece.lets_go or known not in {None, piece}:
            self._graphs[held.key] = None
        else:
            held.pieces.backward[key] = piece
        return results

    def _learn(
        self, work: Work, inherited: tuple[int, ...] = ()
    ) -> tuple[tuple[Tensor, ...], Piece | None, tuple[int, ...]]:
        """Do work; return its results, its recorded effect if it is repeatable, and the storages that it keeps."""
        storage, event, op = len(self._sizes), len(self._events), len(self._ops)
        joined = tuple(self._joined)
        results = work.do()
        events, ops = self._events[event:], self._ops[op:]
        alive = {entry for entry in events if entry >= 0} - {~entry for entry in events if entry < 0}
        given = [self._alive.get(tensor.untyped_storage()._cdata, (-1,))[0] for tensor in results]
        kept = tuple(sorted(alive - {*given}))
        if (
            any(unit != self._unit for unit in self._units[storage:])
            or any(
                found < storage and tensor.untyped_storage().nbytes()
                for found, tensor in zip(given, results, strict=True)
            )
            or any(
                record.lane is not Lane.COMPUTE or record.stage is not self._stage or record.unit != self._unit
                for record in ops
            )
            or [record.waits for record in ops] != [joined, *[()] * (len(ops) - 1)]
        ):
            return results, None, kept
        places = {index: place for place, index in enumerate([*inherited, *range(storage, len(self._sizes))])}
        if any((entry if entry >= 0 else ~entry) not in places for entry in events):
            return results, None, kept
        live = most = 0
        for entry in events:
            live += self._sizes[entry] if entry >= 0 else -self._sizes[~entry]
            most = max(most, live)
        piece = Piece(
            inherited=len(inherited),
            sizes=tuple(self._sizes[storage:]),
            classes=tuple(self._classes[storage:]),
            events=tuple(places[entry] if entry >= 0 else ~places[~entry] for entry in events),
            ops=tuple(placed(done, done.event - event, done.stage, "", ()) for done in ops),
            results=tuple(
                Result(places.get(found, -1), tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
                for found, tensor in zip(given, results, strict=True)
            ),
            kept=tuple(places[index] for index in kept),
            most_bytes=most,
            net_bytes=live,
            mark=work.mark(),
        )
        return results, piece, kept

    def _learn_apart(
        self,
        held: PendingBackward,
        operands: Sequence[Tensor],
        differentiate: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]],
    ) -> Piece:
        """Do both passes uncounted; return the effect of the backward pass."""
        mark = held.work.mark()
        outside = {name: getattr(self, name) for name in _TAPE}
        number = len(self._alive)
        vars(self).update({name: [] if isinstance(value, list) else 0 for name, value in outside.items()})
        try:
            outputs, _, kept = self._learn(held.work)
            held.work.restore(mark)
            work = Work(partial(differentiate, outputs), operands, lambda: True, held.work.memory)
            piece = self._learn(work, kept)[1]
            del outputs, work
        finally:
            vars(self).update(outside)
        assert piece is not None, "a recorded backward pass can be recorded again"
        assert len(self._alive) == number, "uncounted storages are freed"
        return piece

    def _write_down(
        self, piece: Piece, work: Work, inherited: tuple[int, ...] = ()
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Record the effect that work would have had; return its results, and the storages that it keeps."""
        first, event, stage, unit = self._next_index, len(self._events), self._stage, self._unit
        count = len(piece.sizes)
        places = [*inherited, *range(first, first + count)]
        self._next_index += count
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + piece.most_bytes)
        self.live_bytes += piece.net_bytes
        self._sizes += piece.sizes
        self._classes += piece.classes
        self._units += [unit] * count
        self._events += [places[entry] if entry >= 0 else ~places[~entry] for entry in piece.events]
        waits, self._joined = tuple(self._joined), []
        for done in piece.ops:
            self._ops.append(placed(done, event + done.event, stage, unit, waits))
            waits = ()
        self._last_compute = len(self._ops) - 1
        work.restore(piece.mark)
        return self._results(piece, places), tuple(places[place] for place in piece.kept)

    def _results(self, piece: Piece, places: Sequence[int]) -> tuple[Tensor, ...]:
        """Return tensors for the results of a piece, whose releases are noticed."""
        if not piece.results:
            return ()
        storages: dict[int, torch.UntypedStorage] = {}
        with _disable_current_modes():
            for number in {result.storage: None for result in piece.results}:
                size = 0 if number < 0 else piece.sizes[number - piece.inherited]
                storages[number] = storage = torch.UntypedStorage(size, device="meta")  # type: ignore[no-untyped-call]
                if size:
                    address = storage._cdata
                    reference = weakref.ref(storage, self._on_release(address))
                    self._alive[address] = (places[number], size, reference)
            return tuple(result.tensor(storages[result.storage]) for result in piece.results)

    def cast(self, source: torch.dtype, target: torch.dtype, num_elements: int) -> None:
        """Do nothing: the op itself is counted."""

    def work(self, lane: Lane, num_bytes: int, waits: Sequence[int]) -> int:
        """Record a copy, or CPU work, in parallel to the compute lane."""
        if self._record:
            self._ops.append(
                OpRecord(
                    name=lane.value, event=len(self._events), stage=self._stage, unit=self._unit, is_matmul=False,
                    flops=0, bytes_moved=num_bytes, dtype="", lane=lane, waits=tuple(op for op in waits if op >= 0),
                )
            )  # fmt: skip
        return len(self._ops) - 1

    def mark(self) -> int:
        """Return the number of the last op of the compute lane, -1 before the first."""
        return self._last_compute

    def join(self, op: int) -> None:
        """Make the next op of the compute lane wait for ``op``."""
        if self._record and op >= 0:
            self._joined.append(op)

    def begin_step(self) -> None:
        """Mark the beginning of an optimizer step, and reset ``peak_bytes`` to the live bytes."""
        if self._record:
            self._steps.append(StepMark(len(self._events), len(self._ops)))
        self.peak_bytes = self.live_bytes

    def trace(self) -> LedgerTrace:
        """Return the record so far."""
        return LedgerTrace(
            tuple(self._sizes), tuple(self._classes), tuple(self._units),
            tuple(self._events), tuple(self._ops), tuple(self._steps), tuple(self._cache_releases),
        )  # fmt: skip

    def enter(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor`` from now on, unless it is counted already."""
        if self._device is not None and tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._alive:
            return
        size = storage.nbytes()
        if size == 0:
            return
        index = self._allocate(size, self._stage)
        reference = weakref.ref(storage, self._on_release(address))
        self._alive[address] = (index, size, reference)

    def _allocate(self, size: int, stage: Stage) -> int:
        index = self._next_index
        self._next_index += 1
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self._record:
            self._sizes.append(size)
            self._classes.append(_DEFAULT_CLASS[stage])
            self._units.append(self._unit)
            self._events.append(index)
        return index

    def _on_release(self, address: int) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        def release(_reference: weakref.ref[torch.UntypedStorage]) -> None:
            index, size, _ = self._alive.pop(address)
            self._release(index, size)

        return release

    def _release(self, index: int, size: int) -> None:
        self.live_bytes -= size
        if self._record:
            self._events.append(~index)

    def _is_counted(self, args: Args, kwargs: Kwargs | None, out: Any) -> bool:
        """Return whether an op involves the device that is counted."""
        tensors = tensors_in([*args, *(kwargs or {}).values(), out])
        return any(tensor.device.type == self._device for tensor in tensors)

    def _remembered_record(
        self, key: OpKey | None, func: Op, args: Args, kwargs: Kwargs, out: Any, event: int
    ) -> OpRecord:
        """Return the record of an op: its figures are those of the last op with the same key."""
        known = None if key is None else self._known_ops.get(key)
        if known is None:
            made = self._op_record(func, args, kwargs, out, event)
            if key is not None:
                self._known_ops[key] = made
            return made
        waits, self._joined = tuple(self._joined), []
        return placed(known, event, self._stage, self._unit, waits)

    def _flops(self, func: Op, args: Args, kwargs: Kwargs, out: Any) -> int:
        return count_flops(func, args, kwargs, out)

    def _op_record(self, func: Op, args: Args, kwargs: Kwargs, out: Any, event: int) -> OpRecord:
        operands = tensors_in([*args, *kwargs.values()])
        is_product = _LOW_BIT_PRODUCT in func._schema.name  # of codes, which are no floats in int8
        dtype = next((str(t.dtype)[6:] for t in operands if is_product or t.is_floating_point()), "")
        waits, self._joined = tuple(self._joined), []
        return OpRecord(
            name=str(func),
            event=event,
            stage=self._stage,
            unit=self._unit,
            is_matmul=func in MATMUL_OPS,
            flops=self._flops(func, args, kwargs, out),
            bytes_moved=count_bytes(func, args, kwargs, out),
            dtype=dtype,
            waits=waits,
            shape=(
                _matmul_shape(args)
                if func in MATMUL_OPS
                else (args[0].shape[0], args[2].shape[0], args[0].shape[1])
                if is_product
                else _attention_shape(func, args)
            ),
        )


_LOW_BIT_PRODUCT = "scaled_matmul"


def _matmul_shape(args: Sequence[Any]) -> tuple[int, int, int]:
    """Return rows, columns and inner dimension of a product of the last two tensors: mm, bmm, addmm."""
    left, right = [value for value in args if isinstance(value, Tensor)][-2:]
    inner, columns = right.shape[-2:]
    return left.numel() // max(inner, 1), columns, inner


def _attention_shape(func: Op, args: Sequence[Any]) -> tuple[int, int, int] | None:
    """Return heads of all sequences, length and head size of attention; None of another op."""
    if "attention" not in func._schema.name:
        return None
    first = next((value for value in args if isinstance(value, Tensor) and value.dim() == 4), None)
    if first is None:
        return None
    batch, middle, inner, width = first.shape
    heads, length = (middle, inner) if "scaled_dot_product" in func._schema.name else (inner, middle)
    return batch * heads, length, width
