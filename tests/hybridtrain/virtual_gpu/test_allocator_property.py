"""The allocator against a slow reference that keeps plain lists, scans them and sums by definition."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrain.virtual_gpu.allocator.allocator import AllocatorOutOfMemory, CachingAllocator
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.allocator.snapshot import build_snapshot

MIB = 2**20
STRIP_DISTANCE = 2**44

USED, WAITING, FREE, HOLE = "active_allocated", "active_pending_free", "inactive", "unmapped"


@dataclass(eq=False)
class Cell:
    start: int
    size: int
    state: str
    asked: int = 0
    born: int = 0
    users: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Strip:
    """A segment, or the address range of an expandable one."""

    base: int
    stream: int
    small: bool
    cells: list[Cell]


class Found(NamedTuple):
    strip: Strip
    cell: Cell


class ReferenceAllocator:
    """Written from the text of the rules; shares nothing with the allocator but the settings."""

    def __init__(self, config: AllocatorConfig, capacity: int | None) -> None:
        self.config = config
        self.capacity = capacity
        self.strips: list[Strip] = []
        self.num_strips = 0
        self.searches = {True: 0, False: 0}
        self.retries = 0
        self.ooms = 0
        self.gc_on = capacity is not None and config.garbage_collection_threshold > 0

    def round_size(self, size: int) -> int:
        divisions = self.config.roundup_power2_divisions
        if divisions > 1 and size > 512 * divisions:
            power = 1
            while power * 2 <= size:
                power *= 2
            candidates = [power + power * step // divisions for step in range(divisions + 1)]
            return min(candidate for candidate in candidates if candidate >= size)
        return max(1, (size + 511) // 512) * 512

    def segment_size(self, size: int) -> int:
        if size <= MIB:
            return 2 * MIB
        if size < 10 * MIB:
            return self.config.large_segment_size
        return (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB

    def page(self, *, small: bool) -> int:
        return 2 * MIB if small else self.config.large_segment_size

    def free_cells(self, *, small: bool, stream: int | None = None) -> list[Found]:
        found = [
            Found(strip, cell)
            for strip in self.strips
            if strip.small == small and stream in {None, strip.stream}
            for cell in strip.cells
            if cell.state == FREE
        ]
        return sorted(found, key=lambda pair: (pair.strip.stream, pair.cell.size, pair.cell.start))

    def malloc(self, asked: int, stream: int) -> int | None:
        """Return the address, None for out of memory."""
        size = self.round_size(asked)
        small = size <= MIB
        self.searches[small] += self.gc_on
        found = self.cached(size, small=small, stream=stream)
        if found is None:
            found = self.new(size, small=small, stream=stream)
        if found is None:
            self.ooms += 1
            return None
        strip, cell = found
        remaining = cell.size - size
        limit = self.config.max_split_size
        if small or self.config.expandable_segments:
            split = remaining >= 512
        else:
            split = remaining > MIB and (limit is None or size < limit)
        if split:
            rest = Cell(cell.start + size, remaining, FREE, born=self.searches[small])
            strip.cells.insert(strip.cells.index(cell) + 1, rest)
            cell.size = size
        cell.state, cell.asked = USED, asked
        return cell.start

    def cached(self, size: int, *, small: bool, stream: int) -> Found | None:
        fitting = [pair for pair in self.free_cells(small=small, stream=stream) if pair.cell.size >= size]
        if not fitting:
            return None
        best = fitting[0]
        if self.config.expandable_segments:
            for pair in fitting[1:]:
                if self.reach(pair) >= self.reach(best):
                    break
                best = pair
        limit = self.config.max_split_size
        if limit is not None:
            if size < limit and best.cell.size >= limit:
                return None
            if size >= limit and best.cell.size >= size + self.config.max_non_split_rounding:
                return None
        return best

    def reach(self, pair: Found) -> int:
        cells = pair.strip.cells
        index = cells.index(pair.cell)
        hole = cells[index + 1].size if index + 1 < len(cells) and cells[index + 1].state == HOLE else 0
        return pair.cell.size + hole

    def new(self, size: int, *, small: bool, stream: int) -> Found | None:
        if self.gc_on:
            self.collect()
        found = self.reserve(size, small=small, stream=stream)
        if found is None and self.release_oversize(size, small=small, stream=stream):
            found = self.reserve(size, small=small, stream=stream)
        if found is None:
            self.empty_cache()
            self.retries += 1
            found = self.reserve(size, small=small, stream=stream)
        return found

    def reserve(self, size: int, *, small: bool, stream: int) -> Found | None:
        wanted = self.segment_size(size)
        if self.capacity is not None and self.figures()["reserved"] + wanted > self.capacity:
            return None
        if self.config.expandable_segments:
            return self.expand(size, small=small, stream=stream)
        return self.add_strip(wanted, FREE, small=small, stream=stream)

    def add_strip(self, size: int, state: str, *, small: bool, stream: int) -> Found:
        self.num_strips += 1
        base = self.num_strips * STRIP_DISTANCE
        strip = Strip(base, stream, small, [Cell(base, size, state)])
        self.strips.append(strip)
        return Found(strip, strip.cells[0])

    def expand(self, size: int, *, small: bool, stream: int) -> Found:
        page = self.page(small=small)
        for strip in self.strips:
            if strip.small != small or strip.stream != stream:
                continue
            for index, cell in enumerate(strip.cells):
                if cell.state != HOLE:
                    continue
                first = index - 1 if index and strip.cells[index - 1].state == FREE else index
                if self.run_size(strip, first) >= size:
                    return self.map_run(strip, strip.cells[first].start, size)
        memory = 2**40 if self.capacity is None else self.capacity
        pages = (max(memory + memory // 8, size) + page - 1) // page
        strip = self.add_strip(pages * page, HOLE, small=small, stream=stream).strip
        return self.map_run(strip, strip.base, size)

    @staticmethod
    def run_size(strip: Strip, first: int) -> int:
        total = 0
        for cell in strip.cells[first:]:
            if cell.state not in {FREE, HOLE}:
                break
            total += cell.size
        return total

    def map_run(self, strip: Strip, start: int, size: int) -> Found:
        page = self.page(small=strip.small)
        for cell in [cell for cell in strip.cells if cell.start >= start]:
            missing = start + size - cell.start
            if missing <= 0:
                break
            if cell.state == HOLE:
                mapped = min(cell.size, (missing + page - 1) // page * page)
                if mapped < cell.size:
                    rest = Cell(cell.start + mapped, cell.size - mapped, HOLE)
                    strip.cells.insert(strip.cells.index(cell) + 1, rest)
                cell.size, cell.state = mapped, FREE
        self.join(strip)
        return Found(strip, next(cell for cell in strip.cells if cell.start == start))

    def collect(self) -> None:
        if self.config.expandable_segments:
            return
        assert self.capacity is not None
        target = self.figures()["reserved"] - int(self.config.garbage_collection_threshold * self.capacity)
        while target > 0:
            whole = [pair for pair in self.free_cells(small=False) if len(pair.strip.cells) == 1]
            if not whole:
                return
            ages = {pair.strip.base: self.searches[False] - pair.cell.born for pair in whole}
            mean = sum(ages.values()) / len(ages)
            for strip, cell in whole:
                if ages[strip.base] >= mean:
                    self.strips.remove(strip)
                    target -= cell.size

    def release_oversize(self, size: int, *, small: bool, stream: int) -> bool:
        limit = self.config.max_split_size
        if limit is None or self.config.expandable_segments:
            return False
        wanted = max(size, limit)
        cells = self.free_cells(small=small, stream=stream)
        enough = [pair for pair in cells if pair.cell.size >= wanted]
        if enough:
            self.strips.remove(enough[0].strip)
            return True
        released = 0
        for strip, cell in reversed(cells):
            if released < wanted and cell.size >= limit:
                released += cell.size
                self.strips.remove(strip)
        return released >= wanted

    def empty_cache(self) -> None:
        for stream in range(3):
            self.complete(stream)
        for small in (False, True):
            for strip, cell in self.free_cells(small=small):
                if self.config.expandable_segments:
                    self.unmap(strip, cell)
                elif len(strip.cells) == 1:
                    self.strips.remove(strip)

    def unmap(self, strip: Strip, cell: Cell) -> None:
        page = self.page(small=strip.small)
        first = strip.base + (cell.start - strip.base + page - 1) // page * page
        last = strip.base + (cell.start + cell.size - strip.base) // page * page
        if first >= last:
            return
        end = cell.start + cell.size
        parts = [
            Cell(cell.start, first - cell.start, FREE),
            Cell(first, last - first, HOLE),
            Cell(last, end - last, FREE),
        ]
        index = strip.cells.index(cell)
        strip.cells[index : index + 1] = [part for part in parts if part.size]
        self.join(strip)
        if all(cell.state == HOLE for cell in strip.cells):
            self.strips.remove(strip)

    def join(self, strip: Strip) -> None:
        joined: list[Cell] = []
        for cell in strip.cells:
            if joined and cell.state == joined[-1].state and cell.state in {FREE, HOLE}:
                joined[-1].size += cell.size
                joined[-1].born = self.searches[strip.small]
            else:
                joined.append(cell)
        strip.cells = joined

    def at(self, address: int) -> Found:
        return next(Found(strip, cell) for strip in self.strips for cell in strip.cells if cell.start == address)

    def free(self, address: int) -> None:
        strip, cell = self.at(address)
        cell.state = WAITING
        self.settle(strip, cell)

    def settle(self, strip: Strip, cell: Cell) -> None:
        if not cell.users:
            cell.state, cell.asked, cell.born = FREE, 0, self.searches[strip.small]
            self.join(strip)

    def use(self, address: int, stream: int) -> None:
        strip, cell = self.at(address)
        cell.users |= {stream} - {strip.stream}

    def complete(self, stream: int) -> None:
        waiting = [
            Found(strip, cell)
            for strip in self.strips
            for cell in strip.cells
            if cell.state == WAITING and stream in cell.users
        ]
        for strip, cell in waiting:
            cell.users.discard(stream)
            self.settle(strip, cell)

    def figures(self) -> dict[str, int]:
        cells = [(strip, cell) for strip in self.strips for cell in strip.cells]
        split = not self.config.expandable_segments
        return {
            "allocated": sum(cell.size for _, cell in cells if cell.state == USED),
            "active": sum(cell.size for _, cell in cells if cell.state in {USED, WAITING}),
            "requested": sum(cell.asked for _, cell in cells if cell.state in {USED, WAITING}),
            "reserved": sum(cell.size for _, cell in cells if cell.state != HOLE),
            "inactive_split": sum(
                cell.size for strip, cell in cells if split and cell.state == FREE and len(strip.cells) > 1
            ),
        }

    def layout(self) -> list[tuple[int, bool, list[tuple[int, int, str]]]]:
        result: list[tuple[int, bool, list[tuple[int, int, str]]]] = []
        for strip in self.strips:
            previous = HOLE
            for cell in strip.cells:
                if cell.state != HOLE:
                    if previous == HOLE:
                        result.append((strip.stream, strip.small, []))
                    result[-1][2].append((cell.size, cell.asked, cell.state))
                previous = cell.state
        return result


def figures(allocator: CachingAllocator) -> dict[str, int]:
    return {
        "allocated": allocator.allocated_bytes,
        "active": allocator.active_bytes,
        "requested": allocator.requested_bytes,
        "reserved": allocator.reserved_bytes,
        "inactive_split": allocator.inactive_split_bytes,
    }


def layout(allocator: CachingAllocator) -> list[tuple[int, bool, list[tuple[int, int, str]]]]:
    return [
        (
            segment.stream,
            segment.is_small,
            [(block.size, block.requested_size, block.state.value) for block in segment.blocks],
        )
        for segment in allocator.segments()
    ]


class Pair:
    """Both allocators, driven by the same calls and compared after each."""

    def __init__(self, config: AllocatorConfig, capacity: int | None) -> None:
        self.fast = CachingAllocator(config, capacity, record_history=True)
        self.slow = ReferenceAllocator(config, capacity)
        self.live: list[tuple[int, int]] = []
        self.offsets: dict[int, int] = {}
        self.peaks = dict.fromkeys(("allocated", "active", "requested", "reserved"), 0)
        self.methods: dict[str, Callable[..., None]] = {
            "malloc": self.malloc,
            "free": self.free,
            "use": self.use,
            "complete": self.complete,
            "empty_cache": self.empty_cache,
            "reset_peaks": self.reset_peaks,
        }

    def malloc(self, size: int, stream: int) -> None:
        expected = self.slow.malloc(size, stream)
        if expected is None:
            with pytest.raises(AllocatorOutOfMemory) as caught:
                self.fast.malloc(size, stream)
            assert caught.value.requested_bytes == size
            assert caught.value.reserved_bytes == self.slow.figures()["reserved"]
            return
        address = self.fast.malloc(size, stream)
        # The two place segments elsewhere; inside a segment every address must have the same distance.
        base = expected // STRIP_DISTANCE
        assert self.offsets.setdefault(base, address - expected) == address - expected
        self.live.append((address, expected))

    def free(self, choice: int) -> None:
        if self.live:
            address, expected = self.live.pop(choice % len(self.live))
            self.fast.free(address)
            self.slow.free(expected)

    def use(self, choice: int, stream: int) -> None:
        if self.live:
            address, expected = self.live[choice % len(self.live)]
            self.fast.record_stream(address, stream)
            self.slow.use(expected, stream)

    def complete(self, stream: int) -> None:
        self.fast.complete_stream(stream)
        self.slow.complete(stream)

    def empty_cache(self) -> None:
        self.fast.empty_cache()
        self.slow.empty_cache()

    def reset_peaks(self) -> None:
        self.fast.reset_peaks()
        self.peaks = dict.fromkeys(self.peaks, 0)

    def compare(self) -> None:
        present = self.slow.figures()
        assert figures(self.fast) == present
        assert layout(self.fast) == self.slow.layout()
        assert (self.fast.num_alloc_retries, self.fast.num_ooms) == (self.slow.retries, self.slow.ooms)
        self.peaks = {name: max(peak, present[name]) for name, peak in self.peaks.items()}
        assert self.peaks == {
            "allocated": self.fast.peak_allocated_bytes,
            "active": self.fast.peak_active_bytes,
            "requested": self.fast.peak_requested_bytes,
            "reserved": self.fast.peak_reserved_bytes,
        }


@st.composite
def configs(draw: st.DrawFn) -> AllocatorConfig:
    large = draw(st.sampled_from([20 * MIB, 20 * MIB, 12 * MIB, 32 * MIB]))
    return AllocatorConfig(
        expandable_segments=draw(st.booleans()),
        large_segment_size=large,
        max_split_size=draw(st.sampled_from([None, None, large, large + 3 * MIB, 40 * MIB])),
        max_non_split_rounding=draw(st.sampled_from([20 * MIB, 32 * MIB])),
        roundup_power2_divisions=draw(st.sampled_from([0, 0, 1, 2, 8])),
        garbage_collection_threshold=draw(st.sampled_from([0.0, 0.0, 0.3, 0.8])),
    )


SMALL_SIZES = [1, 511, 512, 513, 4096, 300_000, MIB - 512, MIB - 511, MIB]
MIDDLE_SIZES = [MIB + 1, 2 * MIB, 3 * MIB, 9 * MIB, 10 * MIB - 1]
LARGE_SIZES = [10 * MIB, 10 * MIB + 1, 11 * MIB, 19 * MIB - 1, 19 * MIB, 20 * MIB, 21 * MIB, 22 * MIB]
HUGE_SIZES = [23 * MIB + 512, 31 * MIB, 32 * MIB, 33 * MIB, 40 * MIB, 44 * MIB, 53 * MIB, 60 * MIB]
SIZES = st.one_of(
    st.sampled_from(SMALL_SIZES),
    st.sampled_from(MIDDLE_SIZES),
    st.sampled_from(LARGE_SIZES),
    st.sampled_from(HUGE_SIZES),
    st.integers(1, 2 * MIB),
    st.integers(1, 48).map(lambda count: count * MIB),
)
STREAMS = st.sampled_from([0, 0, 0, 1, 2])
CHOICES = st.integers(0, 30)
MALLOC = st.tuples(st.just("malloc"), SIZES, STREAMS)
FREE_ONE = st.tuples(st.just("free"), CHOICES)
CALLS = st.one_of(
    MALLOC,
    MALLOC,
    MALLOC,
    FREE_ONE,
    FREE_ONE,
    st.tuples(st.just("use"), CHOICES, STREAMS),
    st.tuples(st.just("complete"), STREAMS),
    st.tuples(st.just("empty_cache")),
    st.tuples(st.just("reset_peaks")),
)
CAPACITIES = st.one_of(st.none(), st.sampled_from([MIB, 20 * MIB, 44 * MIB, 64 * MIB, 100 * MIB, 150 * MIB]))


# The same examples on every run, so that a failure here is never a matter of luck.
@settings(max_examples=300, deadline=None, derandomize=True)
@given(config=configs(), capacity=CAPACITIES, calls=st.lists(CALLS, min_size=10, max_size=80))
def test_every_figure_block_and_refusal_equals_the_reference(
    config: AllocatorConfig, capacity: int | None, calls: list[tuple[str, int, int]]
) -> None:
    pair = Pair(config, capacity)
    for name, *arguments in calls:
        pair.methods[name](*arguments)
        pair.compare()
    history = pair.fast.history
    assert history is not None
    assert [event.ordinal for event in history] == list(range(len(history)))
    # Raises when the recorded events do not lead to the segments.
    build_snapshot(history, pair.fast.segments(), config=config)


LONG_RUNS = {
    "classic": (AllocatorConfig(), None),
    "classic capped": (AllocatorConfig(), 200 * MIB),
    "garbage collection": (AllocatorConfig(garbage_collection_threshold=0.5), 300 * MIB),
    "oversize blocks": (AllocatorConfig(max_split_size=32 * MIB), 300 * MIB),
    "power of two.": (AllocatorConfig(roundup_power2_divisions=8, large_segment_size=12 * MIB), 200 * MIB),
    "expandable": (AllocatorConfig(expandable_segments=True), None),
    "expandable capped": (AllocatorConfig(expandable_segments=True), 200 * MIB),
    "expandable oversize": (AllocatorConfig(expandable_segments=True, max_split_size=20 * MIB), 300 * MIB),
}
# What must have happened, so that an empty comparison cannot pass.
RETRY_AND_OOM = {"oom", "served after retry"}
LONG_RUN_WITNESSES = {
    "classic": {"segment_free"},
    "classic capped": {"segment_free", *RETRY_AND_OOM},
    "garbage collection": {"released without retry", *RETRY_AND_OOM},
    "oversize blocks": {"released without retry", *RETRY_AND_OOM},
    "power of two.": {"segment_free", *RETRY_AND_OOM},
    "expandable": {"segment_map", "segment_unmap"},
    "expandable capped": {"segment_map", "segment_unmap", *RETRY_AND_OOM},
    "expandable oversize": {"segment_map", "segment_unmap", *RETRY_AND_OOM},
}


@pytest.mark.parametrize("name", LONG_RUNS)
def test_long_runs_near_the_capacity_equal_the_reference(name: str, pytestconfig: pytest.Config) -> None:
    seen: Counter[str] = Counter()
    for seed in range(15 if pytestconfig.getoption("every_case") else 6):
        drive(Pair(*LONG_RUNS[name]), random.Random(seed), seen)  # noqa: S311  no secrets here
    assert LONG_RUN_WITNESSES[name] <= {what for what, count in seen.items() if count}


def drive(pair: Pair, rng: random.Random, seen: Counter[str]) -> None:
    history = pair.fast.history
    assert history is not None
    for _ in range(400):
        num_events, retries, ooms = len(history), pair.fast.num_alloc_retries, pair.fast.num_ooms
        call = rng.choices(["malloc", "free", "use", "complete", "empty_cache"], weights=[50, 42, 4, 4, 1])[0]
        if call == "malloc":
            sizes = rng.choice([SMALL_SIZES, MIDDLE_SIZES, LARGE_SIZES, HUGE_SIZES])
            pair.malloc(rng.choice(sizes), rng.choice([0, 0, 0, 1]))
        elif call == "use":
            pair.use(rng.randrange(30), rng.randrange(3))
        elif call == "complete":
            pair.complete(rng.randrange(3))
        elif call == "empty_cache":
            pair.empty_cache()
        else:
            pair.free(rng.randrange(30))
        pair.compare()
        actions = [event.action for event in history[num_events:]]
        seen.update(actions)
        retried = pair.fast.num_alloc_retries > retries
        seen["served after retry"] += retried and pair.fast.num_ooms == ooms
        seen["released without retry"] += call == "malloc" and "segment_free" in actions and not retried
