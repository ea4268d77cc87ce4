"""The allocator's rules one by one, at their boundaries, and against a dump of a real card."""

import pytest

from hybridtrain.errors import OutOfMemoryError
from hybridtrain.virtual_gpu.allocator.allocator import AllocatorOutOfMemory, CachingAllocator
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig, round_size, segment_size
from hybridtrain.virtual_gpu.allocator.segments import BlockState

KIB = 2**10
MIB = 2**20
USED, WAITING, FREE = (BlockState.ACTIVE_ALLOCATED, BlockState.ACTIVE_PENDING_FREE, BlockState.INACTIVE)


def blocks(allocator: CachingAllocator) -> list[list[tuple[int, BlockState]]]:
    return [[(block.size, block.state) for block in segment.blocks] for segment in allocator.segments()]


def segment_sizes(allocator: CachingAllocator) -> list[int]:
    return [segment.total_size for segment in allocator.segments()]


def cache(allocator: CachingAllocator, *sizes: int, stream: int = 0) -> None:
    """Leave a free segment for each size behind."""
    for address in [allocator.malloc(size, stream) for size in sizes]:
        allocator.free(address)


# A memory snapshot of a real card, from https://discuss.pytorch.org/t/178671: five small tensors of which
# the fourth is gone, and the cuBLAS workspace.
def test_blocks_equal_the_dump_of_a_real_card() -> None:
    allocator = CachingAllocator()
    small = [allocator.malloc(size) for size in (40_000, 512, 4096, 512, 4)]
    allocator.malloc(4096 * 2 * KIB + 16 * 8 * KIB)
    allocator.free(small[3])
    assert blocks(allocator) == [
        [(40_448, USED), (512, USED), (4096, USED), (512, FREE), (512, USED), (2_051_072, FREE)],
        [(8_519_680, USED), (12_451_840, FREE)],
    ]
    assert allocator.reserved_bytes == 2 * MIB + 20 * MIB
    assert allocator.allocated_bytes == 40_448 + 512 + 4096 + 512 + 8_519_680
    assert allocator.inactive_split_bytes == 512 + 2_051_072 + 12_451_840


@pytest.mark.parametrize(
    ("size", "rounded"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB - 511, MIB), (MIB, MIB), (MIB + 1, MIB + 512)],
)
def test_sizes_are_rounded_up_to_512_bytes(size: int, rounded: int) -> None:
    assert round_size(size) == rounded
    assert round_size(size, 1) == rounded


@pytest.mark.parametrize(
    ("size", "divisions", "rounded"),
    [
        (2048, 4, 2048),
        (2049, 4, 2560),  # above 512 * 4 the steps are a quarter of the power of two below
        (1200, 4, 1536),  # below it, the steps are 512 bytes as usual
        (4096, 4, 4096),
        (4097, 4, 5120),
        (5120, 4, 5120),
        (7169, 4, 8192),
        (1025, 2, 1536),
        (9 * MIB, 8, 9 * MIB),
        (9 * MIB + 1, 8, 10 * MIB),
        (MIB + 1, 1024, MIB + KIB),
    ],
)
def test_sizes_are_rounded_to_divisions_of_powers_of_two(size: int, divisions: int, rounded: int) -> None:
    assert round_size(size, divisions) == rounded
    allocator = CachingAllocator(AllocatorConfig(roundup_power2_divisions=divisions))
    allocator.malloc(size)
    # Larger blocks keep a remainder of up to 1 MiB, so only small ones show the rounded size.
    if rounded <= MIB:
        assert allocator.allocated_bytes == rounded


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (12 * MIB, 12 * MIB),
        (12 * MIB + 512, 14 * MIB),
    ],
)
def test_segment_size(size: int, segment: int) -> None:
    assert segment_size(size) == segment
    allocator = CachingAllocator()
    allocator.malloc(size)
    assert segment_sizes(allocator) == [segment]


def test_large_segment_size_is_used_between_1_and_10_mib_only() -> None:
    assert segment_size(MIB + 512, 32 * MIB) == 32 * MIB
    assert segment_size(10 * MIB, 32 * MIB) == 10 * MIB
    allocator = CachingAllocator(AllocatorConfig(large_segment_size=32 * MIB))
    for size in (MIB, 2 * MIB, 10 * MIB):
        allocator.malloc(size)
    assert segment_sizes(allocator) == [2 * MIB, 32 * MIB]  # the third block fits behind the second


@pytest.mark.parametrize(("size", "is_small"), [(MIB - 511, True), (MIB, True), (MIB + 1, False)])
def test_the_rounded_size_decides_the_pool(size: int, *, is_small: bool) -> None:
    allocator = CachingAllocator()
    allocator.malloc(size)
    assert [segment.is_small for segment in allocator.segments()] == [is_small]


def test_pools_do_not_share_segments() -> None:
    allocator = CachingAllocator()
    cache(allocator, 5 * MIB)
    allocator.malloc(MIB)
    assert segment_sizes(allocator) == [20 * MIB, 2 * MIB]


def test_zero_bytes_are_no_block() -> None:
    allocator = CachingAllocator(record_history=True)
    assert allocator.malloc(0) == 0
    allocator.free(0)
    allocator.record_stream(0, 1)
    assert allocator.history == []


def test_small_blocks_are_split_down_to_512_bytes() -> None:
    allocator = CachingAllocator()
    allocator.malloc(MIB)
    allocator.malloc(MIB - 512)
    assert blocks(allocator) == [[(MIB, USED), (MIB - 512, USED), (512, FREE)]]
    allocator.malloc(1)
    assert blocks(allocator) == [[(MIB, USED), (MIB - 512, USED), (512, USED)]]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (19 * MIB, [(20 * MIB, USED)]),  # 1 MiB would remain: exactly the limit, so not split
        (19 * MIB - 512, [(19 * MIB - 512, USED), (MIB + 512, FREE)]),
    ],
)
def test_large_blocks_are_split_when_more_than_1_mib_remains(size: int, expected: list[tuple[int, BlockState]]) -> None:
    allocator = CachingAllocator()
    cache(allocator, 5 * MIB)
    allocator.malloc(size)
    assert blocks(allocator) == [expected]
    assert allocator.allocated_bytes == expected[0][0]
    assert allocator.requested_bytes == size


def test_new_segments_are_split_by_the_same_rule() -> None:
    allocator = CachingAllocator()
    allocator.malloc(11 * MIB)
    allocator.malloc(11 * MIB - 512)
    assert blocks(allocator) == [[(12 * MIB, USED)], [(11 * MIB - 512, USED), (MIB + 512, FREE)]]


def test_best_fit_is_the_smallest_sufficient_block() -> None:
    allocator = CachingAllocator()
    cache(allocator, 30 * MIB, 22 * MIB, 24 * MIB)
    address = allocator.malloc(23 * MIB)
    assert address == allocator.segments()[2].address
    assert allocator.allocated_bytes == 24 * MIB


def test_of_equal_blocks_the_lowest_address_is_taken() -> None:
    allocator = CachingAllocator()
    first, second, third = (allocator.malloc(12 * MIB) for _ in range(3))
    for address in (third, first, second):
        allocator.free(address)
    assert [allocator.malloc(12 * MIB) for _ in range(3)] == [first, second, third]


def test_streams_do_not_share_blocks() -> None:
    allocator = CachingAllocator()
    cache(allocator, 12 * MIB, stream=1)
    allocator.malloc(12 * MIB, stream=0)
    allocator.malloc(12 * MIB, stream=1)
    assert [(segment.stream, segment.total_size) for segment in allocator.segments()] == [(1, 12 * MIB), (0, 12 * MIB)]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_free_neighbours_merge_in_every_order(order: tuple[int, int, int]) -> None:
    allocator = CachingAllocator()
    addresses = [allocator.malloc(300 * KIB) for _ in range(3)]
    tail = 2 * MIB - 900 * KIB
    assert allocator.inactive_split_bytes == tail
    for place in order:
        allocator.free(addresses[place])
    assert blocks(allocator) == [[(2 * MIB, FREE)]]
    assert allocator.inactive_split_bytes == 0  # the segment is whole again


def test_inactive_split_counts_free_blocks_of_cut_segments() -> None:
    allocator = CachingAllocator()
    first, second = allocator.malloc(MIB), allocator.malloc(256 * KIB)
    assert allocator.inactive_split_bytes == 768 * KIB
    allocator.free(first)
    assert allocator.inactive_split_bytes == 1792 * KIB
    allocator.malloc(128 * KIB)  # from the smaller of the two free blocks
    assert allocator.inactive_split_bytes == 1664 * KIB
    assert blocks(allocator) == [[(MIB, FREE), (256 * KIB, USED), (128 * KIB, USED), (640 * KIB, FREE)]]
    allocator.free(second)
    assert blocks(allocator) == [[(1280 * KIB, FREE), (128 * KIB, USED), (640 * KIB, FREE)]]
    assert allocator.inactive_split_bytes == 1920 * KIB


def test_empty_cache_releases_whole_segments_only() -> None:
    allocator = CachingAllocator()
    kept, gone = allocator.malloc(512), allocator.malloc(512)
    cache(allocator, 30 * MIB, 40 * MIB)
    allocator.free(gone)
    allocator.empty_cache()
    assert segment_sizes(allocator) == [2 * MIB]
    assert allocator.reserved_bytes == 2 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.segments() == ()
    assert allocator.reserved_bytes == 0
    assert allocator.peak_reserved_bytes == 72 * MIB


def test_segments_are_released_by_pool_stream_size_and_address() -> None:
    allocator = CachingAllocator(record_history=True)
    for stream, size in ((1, 512), (0, 512), (1, 12), (0, 14), (0, 12), (0, 12)):
        allocator.malloc(size if size == 512 else size * MIB, stream)
    segments = allocator.segments()
    for segment in segments:
        allocator.free(segment.address)
    allocator.empty_cache()
    assert allocator.history is not None
    released = [event.address for event in allocator.history if event.action == "segment_free"]
    assert released == [segments[place].address for place in (4, 5, 3, 2, 1, 0)]


def test_segments_start_at_rising_multiples_of_2_mib_and_blocks_tile_them() -> None:
    allocator = CachingAllocator()
    for size in (512, 12 * MIB + 1, 3 * MIB, 700 * KIB):
        allocator.malloc(size)
    segments = allocator.segments()
    assert [segment.address for segment in segments] == sorted({segment.address for segment in segments})
    for segment in segments:
        assert segment.address % (2 * MIB) == 0
        address = segment.address
        for block in segment.blocks:
            assert block.address == address
            address += block.size
        assert address == segment.address + segment.total_size


def test_peaks_stay_until_reset() -> None:
    allocator = CachingAllocator()
    large, small = allocator.malloc(12 * MIB - 1), allocator.malloc(100)
    allocator.free(large)
    peaks = (
        allocator.peak_requested_bytes,
        allocator.peak_allocated_bytes,
        allocator.peak_active_bytes,
        allocator.peak_reserved_bytes,
    )
    assert peaks == (12 * MIB + 99, 12 * MIB + 512, 12 * MIB + 512, 14 * MIB)
    allocator.reset_peaks()
    assert allocator.peak_requested_bytes == 100
    assert allocator.peak_allocated_bytes == allocator.peak_active_bytes == 512
    assert allocator.peak_reserved_bytes == 14 * MIB
    allocator.free(small)
    assert allocator.peak_allocated_bytes == 512


@pytest.mark.parametrize(("capacity", "fits"), [(40 * MIB, True), (40 * MIB - 1, False)])
def test_the_capacity_itself_may_be_reserved(capacity: int, *, fits: bool) -> None:
    allocator = CachingAllocator(capacity_bytes=capacity)
    allocator.malloc(10 * MIB)
    if fits:
        allocator.malloc(30 * MIB)
        assert allocator.reserved_bytes == capacity
    else:
        with pytest.raises(AllocatorOutOfMemory):
            allocator.malloc(30 * MIB)


def test_the_capacity_counts_the_segment_and_not_the_request() -> None:
    allocator = CachingAllocator(capacity_bytes=20 * MIB - 1)
    with pytest.raises(AllocatorOutOfMemory):
        allocator.malloc(2 * MIB)
    allocator.malloc(18 * MIB)


def test_retry_succeeds_after_cached_segments_are_released() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB, record_history=True)
    cache(allocator, 12 * MIB, 14 * MIB)
    allocator.malloc(30 * MIB)
    assert segment_sizes(allocator) == [30 * MIB]
    assert (allocator.num_alloc_retries, allocator.num_ooms) == (1, 0)
    assert allocator.peak_reserved_bytes == 30 * MIB
    assert allocator.history is not None
    assert [event.action for event in allocator.history[-4:]] == [
        "segment_free",
        "segment_free",
        "segment_alloc",
        "alloc",
    ]


def test_out_of_memory_tells_its_numbers_and_leaves_the_allocator_usable() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB, record_history=True)
    allocator.malloc(12 * MIB - 512)
    cache(allocator, 14 * MIB)
    with pytest.raises(AllocatorOutOfMemory, match=r"28\.50 MiB.*12\.00 MiB reserved.*40\.00 MiB") as caught:
        allocator.malloc(28 * MIB + 512 * KIB)
    error = caught.value
    assert isinstance(error, OutOfMemoryError)
    assert error.requested_bytes == 28 * MIB + 512 * KIB
    assert error.reserved_bytes == 12 * MIB
    assert error.allocated_bytes == 12 * MIB
    assert error.capacity_bytes == 40 * MIB
    assert (allocator.num_alloc_retries, allocator.num_ooms) == (1, 1)
    assert allocator.history is not None
    oom = allocator.history[-1]
    assert (oom.action, oom.address, oom.size) == ("oom", 28 * MIB, 28 * MIB + 512 * KIB)
    allocator.malloc(28 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_a_cut_segment_cannot_be_released_for_a_retry() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    first, second = allocator.malloc(2 * MIB), allocator.malloc(18 * MIB)
    allocator.free(second)
    with pytest.raises(AllocatorOutOfMemory):
        allocator.malloc(22 * MIB)
    allocator.free(first)
    allocator.malloc(22 * MIB)
    assert segment_sizes(allocator) == [22 * MIB]


def test_one_exbibyte_is_refused_without_a_capacity() -> None:
    allocator = CachingAllocator()
    with pytest.raises(AllocatorOutOfMemory, match="1 EiB"):
        allocator.malloc(2**60)
    assert allocator.num_ooms == 0  # torch refuses before it counts
    allocator.malloc(2**60 - 1)


def collectable(threshold: float) -> CachingAllocator:
    """Return an allocator with 62 of 100 MiB reserved; the cached 12 MiB are older than the cached 16."""
    allocator = CachingAllocator(AllocatorConfig(garbage_collection_threshold=threshold), capacity_bytes=100 * MIB)
    old, added_field = allocator.malloc(12 * MIB), allocator.malloc(16 * MIB)
    allocator.malloc(14 * MIB)
    cache(allocator, 2 * MIB, stream=1)
    allocator.free(old)
    for _ in range(4):  # hits on another stream: blocks age, nothing new is reserved
        cache(allocator, 2 * MIB, stream=1)
    allocator.free(added_field)
    assert segment_sizes(allocator) == [12 * MIB, 16 * MIB, 14 * MIB, 20 * MIB]
    return allocator


def test_garbage_collection_takes_the_older_blocks_first() -> None:
    allocator = collectable(threshold=0.52)
    allocator.malloc(24 * MIB)
    # 10 MiB are too much. Ages 5, 1 and 1: the mean takes the first segment only, which is enough.
    assert segment_sizes(allocator) == [16 * MIB, 14 * MIB, 20 * MIB, 24 * MIB]
    assert allocator.num_alloc_retries == 0


def test_garbage_collection_repeats_until_the_threshold_is_met() -> None:
    allocator = collectable(threshold=0.49)
    allocator.malloc(24 * MIB)
    assert segment_sizes(allocator) == [14 * MIB, 24 * MIB]


@pytest.mark.parametrize(("threshold", "collects"), [(0.62, False), (0.61, True)])
def test_garbage_collection_starts_above_the_threshold(threshold: float, *, collects: bool) -> None:
    allocator = collectable(threshold)
    allocator.malloc(24 * MIB)
    assert (12 * MIB not in segment_sizes(allocator)) == collects


def test_garbage_collection_needs_a_capacity() -> None:
    allocator = CachingAllocator(AllocatorConfig(garbage_collection_threshold=0.01))
    cache(allocator, 12 * MIB)
    allocator.malloc(40 * MIB)
    assert segment_sizes(allocator) == [12 * MIB, 40 * MIB]


def test_garbage_collection_leaves_cut_segments_and_the_small_pool() -> None:
    allocator = CachingAllocator(AllocatorConfig(garbage_collection_threshold=0.1), capacity_bytes=100 * MIB)
    allocator.malloc(2 * MIB)
    cache(allocator, 512)
    allocator.malloc(40 * MIB)
    assert segment_sizes(allocator) == [20 * MIB, 2 * MIB, 40 * MIB]


OVERSIZE = AllocatorConfig(max_split_size=32 * MIB)


@pytest.mark.parametrize(
    ("size", "reuses"),
    [
        (32 * MIB - 1024, False),  # below max_split_size: oversize blocks are not for it
        (44 * MIB, False),  # the block is larger by 20 MiB: too much is lost
        (44 * MIB + 512, True),
        (64 * MIB, True),
    ],
)
def test_oversize_blocks_serve_oversize_requests_of_nearly_their_size(size: int, *, reuses: bool) -> None:
    allocator = CachingAllocator(OVERSIZE)
    cache(allocator, 64 * MIB)
    allocator.malloc(size)
    assert (len(allocator.segments()) == 1) == reuses
    if reuses:
        assert blocks(allocator) == [[(64 * MIB, USED)]]


def test_max_non_split_rounding_widens_what_an_oversize_block_serves() -> None:
    allocator = CachingAllocator(AllocatorConfig(max_split_size=32 * MIB, max_non_split_rounding=31 * MIB))
    cache(allocator, 64 * MIB)
    allocator.malloc(33 * MIB + 512)
    assert blocks(allocator) == [[(64 * MIB, USED)]]


@pytest.mark.parametrize(
    ("size", "expected"),
    [(31 * MIB - 512, [(31 * MIB - 512, USED), (MIB + 512, FREE)]), (32 * MIB + 512, [(34 * MIB, USED)])],
)
def test_requests_from_max_split_size_on_are_not_split(size: int, expected: list[tuple[int, BlockState]]) -> None:
    allocator = CachingAllocator(OVERSIZE)
    allocator.malloc(size)
    assert blocks(allocator) == [expected]


def test_near_the_capacity_one_sufficient_oversize_block_is_released() -> None:
    allocator = CachingAllocator(OVERSIZE, capacity_bytes=150 * MIB)
    cache(allocator, 12 * MIB, 60 * MIB, 62 * MIB)
    allocator.malloc(36 * MIB)
    assert segment_sizes(allocator) == [12 * MIB, 62 * MIB, 36 * MIB]
    assert allocator.num_alloc_retries == 0


def test_near_the_capacity_the_largest_oversize_blocks_are_released_until_enough() -> None:
    allocator = CachingAllocator(OVERSIZE, capacity_bytes=150 * MIB)
    cache(allocator, 12 * MIB, 40 * MIB, 44 * MIB, 48 * MIB)
    allocator.malloc(80 * MIB)
    assert segment_sizes(allocator) == [12 * MIB, 40 * MIB, 80 * MIB]
    assert allocator.num_alloc_retries == 0


def test_oversize_blocks_of_other_streams_wait_for_the_full_release() -> None:
    allocator = CachingAllocator(OVERSIZE, capacity_bytes=100 * MIB)
    cache(allocator, 60 * MIB, stream=1)
    cache(allocator, 12 * MIB)
    allocator.malloc(50 * MIB)
    assert segment_sizes(allocator) == [50 * MIB]
    assert allocator.num_alloc_retries == 1


def test_a_block_used_by_another_stream_waits_for_it() -> None:
    allocator = CachingAllocator(record_history=True)
    address = allocator.malloc(700 * KIB)
    allocator.record_stream(address, 1)
    allocator.record_stream(address, 2)
    allocator.free(address)
    assert blocks(allocator) == [[(700 * KIB, WAITING), (1348 * KIB, FREE)]]
    assert allocator.allocated_bytes == 0
    assert allocator.active_bytes == allocator.requested_bytes == 700 * KIB
    allocator.complete_stream(1)
    allocator.complete_stream(3)
    assert allocator.active_bytes == 700 * KIB
    allocator.complete_stream(2)
    assert blocks(allocator) == [[(2 * MIB, FREE)]]
    assert allocator.active_bytes == allocator.requested_bytes == 0
    assert allocator.history is not None
    assert [event.action for event in allocator.history[-2:]] == ["free_requested", "free_completed"]


def test_use_on_the_own_stream_does_not_wait() -> None:
    allocator = CachingAllocator()
    address = allocator.malloc(512, stream=4)
    allocator.record_stream(address, 4)
    allocator.free(address)
    assert allocator.active_bytes == 0


def test_work_recorded_after_a_completion_is_waited_for() -> None:
    allocator = CachingAllocator()
    address = allocator.malloc(512)
    allocator.record_stream(address, 1)
    allocator.complete_stream(1)  # before the free, so it says nothing about the last use
    allocator.free(address)
    assert allocator.active_bytes == 512


def test_waiting_blocks_do_not_merge_and_are_not_reused() -> None:
    allocator = CachingAllocator()
    first, second = allocator.malloc(MIB), allocator.malloc(MIB)
    allocator.record_stream(first, 1)
    allocator.free(first)
    allocator.free(second)
    assert blocks(allocator) == [[(MIB, WAITING), (MIB, FREE)]]
    assert allocator.malloc(512) == second


def test_a_retry_waits_for_all_streams() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    address = allocator.malloc(30 * MIB)
    allocator.record_stream(address, 1)
    allocator.free(address)
    allocator.malloc(38 * MIB)
    assert segment_sizes(allocator) == [38 * MIB]
    assert allocator.num_alloc_retries == 1


@pytest.mark.parametrize("bad", ["freed", "inside", "never", "released"])
def test_only_addresses_in_use_may_be_freed_or_used(bad: str) -> None:
    allocator = CachingAllocator()
    kept, freed = allocator.malloc(1024), allocator.malloc(1024)
    allocator.free(freed)
    released = allocator.malloc(30 * MIB)
    allocator.free(released)
    allocator.empty_cache()
    address = {"freed": freed, "inside": kept + 512, "never": 4096, "released": released}[bad]
    with pytest.raises(ValueError, match=rf"address {address:#x}: no block in use"):
        allocator.free(address)
    with pytest.raises(ValueError, match=rf"address {address:#x}: no block in use"):
        allocator.record_stream(address, 1)
    assert allocator.allocated_bytes == 1024


def test_a_waiting_block_cannot_be_freed_again() -> None:
    allocator = CachingAllocator()
    address = allocator.malloc(512)
    allocator.record_stream(address, 1)
    allocator.free(address)
    with pytest.raises(ValueError, match="no block in use"):
        allocator.free(address)


def test_negative_sizes_and_capacities_are_refused() -> None:
    with pytest.raises(ValueError, match="size: -1 is negative"):
        CachingAllocator().malloc(-1)
    with pytest.raises(ValueError, match="capacity_bytes: -1 is negative"):
        CachingAllocator(capacity_bytes=-1)


def test_history_lists_every_step_with_its_place() -> None:
    allocator = CachingAllocator(record_history=True)
    address = allocator.malloc(1000, stream=3)
    allocator.free(address)
    allocator.empty_cache()
    assert allocator.history is not None
    assert [tuple(event) for event in allocator.history] == [
        (0, "segment_alloc", address, 2 * MIB, 3),
        (1, "alloc", address, 1000, 3),
        (2, "free_requested", address, 1000, 3),
        (3, "free_completed", address, 1000, 3),
        (4, "segment_free", address, 2 * MIB, 3),
    ]
    assert CachingAllocator().history is None
