"""Memory that a run would need with a technique that it does not use: the same trace, changed and replayed.

What each technique changes:

    gradient checkpointing   a block's forward pass keeps its result alone; its events come again before its backward
    half the batch           what a step allocates and releases of activations has half the size
    8-bit optimizer state    float32 state of 4096 values or more takes a byte per value, and 4 bytes per 256 values
    fused optimizer          the update has no temporaries
    expandable segments      another allocator

Blocks are the numbered children of a module, as ``layers.3``. Bytes are counted; that a batch can be halved is not.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, StepMark
from hybridtrain.virtual_gpu.account.op_record import Lane, Stage
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.allocator.allocator import AllocatorOutOfMemory, CachingAllocator
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig

_PRECISION = 128
"""The least capacity is found to one part of so many."""
_BLOCK_OF_STATE = 256
"""Values with one float32 scale, and sizes from which state is quantized (bitsandbytes/optim/optimizer.py)."""
LEAST_STATE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A technique, and the memory that the run would need with it."""

    technique: str
    capacity_bytes: int
    """Least reserved bytes under which the whole run gets through."""


def least_capacity(trace: LedgerTrace, config: AllocatorConfig | None = None) -> int:
    """Return the least cap on reserved bytes, to 1 %, under which a trace gets through without an error."""
    found = _play(trace, config, None)
    most, least = found.peak_reserved_bytes, found.peak_allocated_bytes
    while most - least > most // _PRECISION:
        middle = (most + least) // 2
        try:
            most = min(middle, _play(trace, config, middle).peak_reserved_bytes)
        except AllocatorOutOfMemory:
            least = middle
    return most


def _play(trace: LedgerTrace, config: AllocatorConfig | None, capacity: int | None) -> CachingAllocator:
    allocator = CachingAllocator(config, capacity)
    releases, addresses = Counter(trace.cache_releases), dict[int, int]()
    for position, entry in enumerate(trace.events):
        if position in releases:
            allocator.empty_cache()
        if entry < 0:
            allocator.free(addresses.pop(~entry))
        else:
            addresses[entry] = allocator.malloc(trace.sizes[entry], trace.stream_of(entry))
    return allocator


def savings(
    trace: LedgerTrace, config: AllocatorConfig | None, *, float32_state: Collection[int], can_fuse: bool
) -> tuple[Saving, ...]:
    """Return the techniques that would lower a run's need, the largest saving first.

    Args:
        trace: Of a whole run.
        config: Settings of its allocator.
        float32_state: Storages of optimizer state in float32, of ``LEAST_STATE`` values or more.
        can_fuse: Whether an optimizer has an unused argument ``fused``.
    """
    config = config or AllocatorConfig()
    changes: dict[str, Callable[[LedgerTrace], LedgerTrace]] = {
        "gradient checkpointing": checkpointed,
        "half the batch": half_batch,
        "8-bit optimizer state": lambda given: _eight_bit(given, float32_state),
    }
    if can_fuse:
        changes["fused=True in the optimizer"] = _fused
    needed = least_capacity(trace, config)
    found = [
        Saving(technique=name, capacity_bytes=least_capacity(changed, config))
        for name, change in changes.items()
        if (changed := change(trace)) != trace
    ]
    if not config.expandable_segments:
        expandable = replace(config, expandable_segments=True)
        found.append(Saving(technique="expandable_segments:True", capacity_bytes=least_capacity(trace, expandable)))
    kept = (one for one in found if needed - one.capacity_bytes > needed // _PRECISION)
    return tuple(sorted(kept, key=lambda one: one.capacity_bytes))


def _resized(trace: LedgerTrace, sizes: Mapping[int, int]) -> LedgerTrace:
    return replace(trace, sizes=tuple(sizes.get(index, size) for index, size in enumerate(trace.sizes)))


def half_batch(trace: LedgerTrace) -> LedgerTrace:
    """Return a trace with half of every activation that a step both allocates and releases."""
    found = {}
    for step in range(len(trace.steps)):
        span = trace.step_range(step)
        events = trace.events[span.start : span.stop]
        released = {~entry for entry in events if entry < 0}
        for index in released.intersection(events):
            if trace.classes[index] is TensorClass.ACTIVATION:
                found[index] = max(1, trace.sizes[index] // 2)
    return _resized(trace, found)


def _eight_bit(trace: LedgerTrace, state: Collection[int]) -> LedgerTrace:
    def size_of(values: int) -> int:
        return values + 4 * -(-values // _BLOCK_OF_STATE)

    return _resized(trace, {index: size_of(trace.sizes[index] // 4) for index in state})


def _fused(trace: LedgerTrace) -> LedgerTrace:
    scratch = {
        index
        for index, kind in enumerate(trace.classes)
        if kind is TensorClass.WORKSPACE and trace.units[index] != "cublas"
    }
    return _resized(trace, dict.fromkeys(scratch, 1))


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass through a block."""

    block: str
    stage: Stage
    step: int
    events: range


def _passes(trace: LedgerTrace) -> list[_Pass]:
    """Return the passes through blocks in order: of consecutive ops, until another block's."""
    found: list[_Pass] = []
    ops = [op for op in trace.ops if op.lane is Lane.COMPUTE]
    starts = [mark.event for mark in trace.steps]
    step = -1
    for op, following in zip_longest(ops, ops[1:]):
        while step + 1 < len(starts) and starts[step + 1] <= op.event:
            step += 1
        end = len(trace.events) if following is None else following.event
        last = found[-1] if found else None
        key = (_block(op.unit), op.stage, step)
        if last is not None and (last.block, last.stage, last.step) == key:
            found[-1] = _Pass(*key, range(last.events.start, end))
        else:
            found.append(_Pass(*key, range(op.event, end)))
    return [one for one in found if one.block]


def _block(unit: str) -> str:
    """Return the outermost numbered module of a path; empty without one."""
    parts = unit.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def checkpointed(trace: LedgerTrace) -> LedgerTrace:
    """Return the trace of the same run with gradient checkpointing of every block.

    The last storage of a forward pass that stays is its result. Recomputation does not make it again, as torch stops
    when it has what the backward pass needs.
    """
    ends = {~entry: position for position, entry in enumerate(trace.events) if entry < 0}
    added, renamed = defaultdict[int, list[int]](list), dict[int, int]()
    copied = list[int]()
    open_passes = defaultdict[str, list[_Pass]](list)
    for one in _passes(trace):
        if one.stage is Stage.FORWARD:
            open_passes[one.block].append(one)
        if one.stage is not Stage.BACKWARD or not open_passes[one.block]:
            continue
        forward, now = open_passes[one.block].pop(), one.events.start
        entries = trace.events[forward.events.start : forward.events.stop]
        stays = [e for e in entries if e >= 0 and ends.get(e, now) >= forward.events.stop]
        saved = {i for i in stays[:-1] if ends.get(i, -1) >= now and trace.classes[i] is TensorClass.ACTIVATION}
        if forward.step != one.step or not saved:
            continue
        first = len(trace.sizes) + len(copied)
        made = [e for e in entries if e in saved or (e >= 0 and ends.get(e, -1) in forward.events)]
        again = {index: first + place for place, index in enumerate(made)}
        copied += made
        added[forward.events.stop] += [~index for index in saved]
        added[now] += [again[e] if e >= 0 else ~again[~e] for e in entries if max(e, ~e) in again]
        renamed |= {index: again[index] for index in saved}
    return _inserted(_copied(trace, copied), added, renamed)


def _copied(trace: LedgerTrace, storages: Sequence[int]) -> LedgerTrace:
    """Return a trace with copies of some storages at the end of its lists."""
    return replace(
        trace,
        sizes=(*trace.sizes, *(trace.sizes[index] for index in storages)),
        classes=(*trace.classes, *(trace.classes[index] for index in storages)),
        units=(*trace.units, *(trace.units[index] for index in storages)),
        streams=(*trace.streams, *(trace.streams[index] for index in storages)) if trace.streams else (),
    )


def _inserted(trace: LedgerTrace, added: Mapping[int, list[int]], renamed: Mapping[int, int]) -> LedgerTrace:
    """Return a trace with events before others, later releases renamed, and no ops."""
    events, places = list[int](), list[int]()
    for position, entry in enumerate((*trace.events, None)):
        events += added.get(position, ())
        places.append(len(events))
        if entry is not None:
            events.append(~renamed.get(~entry, ~entry) if entry < 0 else entry)
    steps = tuple(StepMark(places[mark.event], mark.op) for mark in trace.steps)
    releases = tuple(places[position] for position in trace.cache_releases)
    return replace(trace, events=tuple(events), steps=steps, cache_releases=releases, ops=())
