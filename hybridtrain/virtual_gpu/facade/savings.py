"""Memory that a run would need with a technique that it does not use: the same trace, changed and replayed.

What each technique changes:

    gradient checkpointing   a block's forward pass keeps its result alone; its events come again before its backward
    ... of some blocks       likewise of those that cost least time, where not all are needed to fit
    half the batch           what a step allocates and releases of activations has half the size
    8-bit optimizer state    float32 state of 4096 values or more takes a byte per value, and 4 bytes per 256 values
    fused optimizer          the update has no temporaries
    expandable segments      another allocator

Blocks are the numbered children of a module, as ``layers.3``. Bytes are counted; that a batch can be halved is not.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest

from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, StepMark
from hybridtrain.virtual_gpu.account.op_record import Lane, Stage
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.allocator.allocator import AllocatorOutOfMemory, CachingAllocator
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.cards.card import Card
from hybridtrain.virtual_gpu.cards.kernels import KernelTimes, curves_of

_PRECISION = 128
"""The least capacity is found to one part of so many."""
_BLOCK_OF_STATE = 256
"""Values with one float32 scale, and sizes from which state is quantized (bitsandbytes/optim/optimizer.py)."""
LEAST_STATE = 4096
_CHECKPOINTING = "gradient checkpointing"
_TRIES = 4
"""Choices of blocks to checkpoint: the allocator may need a little more than their bytes say."""


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
    trace: LedgerTrace, config: AllocatorConfig | None, card: Card, *, float32_state: Collection[int], can_fuse: bool
) -> tuple[Saving, ...]:
    """Return the techniques that would lower a run's need, the largest saving first.

    Args:
        trace: Of a whole run.
        config: Settings of its allocator.
        card: What the run is to fit on.
        float32_state: Storages of optimizer state in float32, of ``LEAST_STATE`` values or more.
        can_fuse: Whether an optimizer has an unused argument ``fused``.
    """
    config = config or AllocatorConfig()
    changes: dict[str, Callable[[LedgerTrace], LedgerTrace]] = {
        _CHECKPOINTING: checkpointed,
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
    goal = card.memory_bytes - card.margin_bytes - card.context_bytes
    if any(one.technique == _CHECKPOINTING and one.capacity_bytes <= goal < needed for one in found):
        partly = _of_some_blocks(trace, config, card, goal, needed)
        found += [] if partly is None else [partly]
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


@dataclass(frozen=True, slots=True)
class _Recomputation:
    """A forward pass of a block that checkpointing would run again."""

    forward: _Pass
    saved: frozenset[int]
    """Storages that would be released after it."""
    place: int
    """Event before which it would run again."""


def _recomputations(trace: LedgerTrace, ends: Mapping[int, int]) -> Iterator[_Recomputation]:
    """Yield what checkpointing of every block would run again; ``ends``: the place of each storage's release.

    The last storage of a forward pass that stays is its result. Recomputation does not make it again, as torch stops
    when it has what the backward pass needs.
    """
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
        if forward.step == one.step and saved:
            yield _Recomputation(forward, frozenset(saved), now)


def _ends(trace: LedgerTrace) -> dict[int, int]:
    return {~entry: position for position, entry in enumerate(trace.events) if entry < 0}


def checkpointed(trace: LedgerTrace, blocks: Collection[str] | None = None) -> LedgerTrace:
    """Return the trace of the same run with gradient checkpointing of some blocks; None: of every one."""
    ends = _ends(trace)
    added, renamed = defaultdict[int, list[int]](list), dict[int, int]()
    copied = list[int]()
    for one in _recomputations(trace, ends):
        forward, saved = one.forward, one.saved
        if blocks is not None and forward.block not in blocks:
            continue
        entries = trace.events[forward.events.start : forward.events.stop]
        first = len(trace.sizes) + len(copied)
        made = [e for e in entries if e in saved or (e >= 0 and ends.get(e, -1) in forward.events)]
        again = {index: first + place for place, index in enumerate(made)}
        copied += made
        added[forward.events.stop] += [~index for index in saved]
        added[one.place] += [again[e] if e >= 0 else ~again[~e] for e in entries if max(e, ~e) in again]
        renamed |= {index: again[index] for index in saved}
    return _inserted(_copied(trace, copied), added, renamed)


def _of_some_blocks(
    trace: LedgerTrace, config: AllocatorConfig, card: Card, goal: int, needed: int
) -> Saving | None:  # fmt: skip
    """Return gradient checkpointing of the blocks that cost least time and let the run fit; None: all of them must.

    Args:
        trace: Of a whole run.
        config: Settings of its allocator.
        card: What it is to fit on.
        goal: Reserved bytes of the card that it may take.
        needed: Those that it needs as it is.
    """
    times = KernelTimes(card, curves_of(card))
    ops = [op for op in trace.ops if op.lane is Lane.COMPUTE]
    events = [op.event for op in ops]
    until = [0.0, *accumulate(max(times.seconds(op)[:2]) for op in ops)]
    bytes_of, seconds_of = Counter[str](), defaultdict[str, float](float)
    for one in sorted(_recomputations(trace, _ends(trace)), key=lambda one: one.forward.events.start):
        block = one.forward.block
        bytes_of[block] = max(bytes_of[block], sum(trace.sizes[index] for index in one.saved))
        first, stop = (bisect_left(events, event) for event in (one.forward.events.start, one.forward.events.stop))
        seconds_of[block] += until[stop] - until[first]
    blocks, missing = list(bytes_of), needed - goal
    for _ in range(_TRIES):
        chosen = cheapest([bytes_of[block] for block in blocks], [seconds_of[block] for block in blocks], missing)
        if not 0 < len(chosen) < len(blocks):
            return None
        some = [blocks[place] for place in chosen]
        capacity = least_capacity(checkpointed(trace, some), config)
        if capacity <= goal:
            more = sum(seconds_of[block] for block in some) / until[-1]
            which = f"{some[0]} to {some[-1]}" if chosen == list(range(chosen[0], chosen[-1] + 1)) else ", ".join(some)
            told = f"{len(some)} of {len(blocks)} blocks, about {100 * more:.0f} % more time"
            return Saving(technique=f"{_CHECKPOINTING} of {which} ({told})", capacity_bytes=capacity)
        missing = sum(bytes_of[block] for block in some) + capacity - goal
    return None


def cheapest(gains: Sequence[int], costs: Sequence[float], least: int) -> list[int]:
    """Return the places of items whose gains reach ``least`` at the lowest cost; empty: no choice does.

    An exact 0/1 knapsack, of equal choices the one with the first items.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415  most runs fit, and need no second for it

    if not costs or least <= 0:
        return []
    unit = max(costs) or 1.0
    found = milp(
        [cost / unit + 1e-6 * (place + 1) for place, cost in enumerate(costs)],
        constraints=LinearConstraint([[gain / least for gain in gains]], lb=1.0), integrality=1, bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )  # fmt: skip
    return [] if found.x is None else [place for place, taken in enumerate(found.x) if taken > 0.5]


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
