"""Expandable segments: what is mapped, what is unmapped, and which block is taken."""

import pytest

from hybridtrain.virtual_gpu.allocator.allocator import AllocatorOutOfMemory, CachingAllocator, Segment
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig

MIB = 2**20
EXPANDABLE = AllocatorConfig(expandable_segments=True)


def sizes(segments: tuple[Segment, ...]) -> list[list[tuple[int, str]]]:
    return [[(block.size // MIB, block.state.value) for block in segment.blocks] for segment in segments]


def actions(allocator: CachingAllocator) -> list[tuple[str, int]]:
    assert allocator.history is not None
    return [(event.action, event.size // MIB) for event in allocator.history if event.action.startswith("segment_")]


def test_one_range_per_pool_and_stream_grows_by_pages() -> None:
    allocator = CachingAllocator(EXPANDABLE, record_history=True)
    allocator.malloc(512)
    allocator.malloc(3 * MIB)
    allocator.malloc(30 * MIB)  # 17 MiB are free behind the 3: one more page of 20 MiB
    allocator.malloc(2 * MIB, stream=1)
    assert actions(allocator) == [("segment_map", 2), ("segment_map", 20), ("segment_map", 20), ("segment_map", 20)]
    small, large, other = allocator.segments()
    assert (small.is_small, small.total_size) == (True, 2 * MIB)
    assert [block.size for block in large.blocks] == [3 * MIB, 30 * MIB, 7 * MIB]
    assert (other.stream, other.total_size) == (1, 20 * MIB)
    assert all(segment.is_expandable for segment in allocator.segments())
    assert allocator.reserved_bytes == 62 * MIB
    assert allocator.inactive_split_bytes == 0  # left out, as in torch


def test_large_blocks_are_split_down_to_512_bytes() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    allocator.malloc(20 * MIB - 512)
    assert allocator.allocated_bytes == 20 * MIB - 512
    assert [block.size for block in allocator.segments()[0].blocks] == [20 * MIB - 512, 512]


def test_the_page_of_the_large_pool_is_large_segment_size() -> None:
    allocator = CachingAllocator(AllocatorConfig(expandable_segments=True, large_segment_size=32 * MIB))
    allocator.malloc(33 * MIB)
    assert allocator.reserved_bytes == 64 * MIB


def test_empty_cache_unmaps_whole_pages_inside_free_blocks() -> None:
    allocator = CachingAllocator(EXPANDABLE, record_history=True)
    first, second, third = (allocator.malloc(size * MIB) for size in (3, 70, 7))
    allocator.free(second)
    allocator.empty_cache()
    # Bytes 3 to 73 of the range are free: the pages 20-40 and 40-60 lie inside, 0-20 and 60-80 do not.
    assert actions(allocator)[-1] == ("segment_unmap", 40)
    assert sizes(allocator.segments()) == [
        [(3, "active_allocated"), (17, "inactive")],
        [(13, "inactive"), (7, "active_allocated")],
    ]
    assert allocator.reserved_bytes == 40 * MIB
    allocator.free(first)
    allocator.free(third)
    allocator.empty_cache()
    assert allocator.segments() == ()
    assert allocator.reserved_bytes == 0


def test_the_lowest_hole_with_room_is_filled_and_joins_its_neighbours() -> None:
    allocator = CachingAllocator(EXPANDABLE, record_history=True)
    first, second, third = (allocator.malloc(size * MIB) for size in (3, 70, 7))
    allocator.free(second)
    allocator.empty_cache()
    # 17 free, 40 unmapped and 13 free MiB lie together: 70 MiB fit again at the old place.
    assert allocator.malloc(70 * MIB) == second
    assert actions(allocator)[-1] == ("segment_map", 40)
    assert allocator.reserved_bytes == 80 * MIB
    # Holes too small are passed over.
    allocator.free(second)
    allocator.empty_cache()
    assert allocator.malloc(71 * MIB) == third + 7 * MIB
    assert allocator.reserved_bytes == 40 * MIB + 80 * MIB
    assert sizes(allocator.segments())[1][:2] == [(13, "inactive"), (7, "active_allocated")]
    assert first < second < third


def test_a_hole_is_mapped_only_as_far_as_needed() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    second = [allocator.malloc(size * MIB) for size in (3, 70, 7)][1]
    allocator.free(second)
    allocator.empty_cache()
    # Too large for the 13 and 17 MiB that are mapped: 17 and one page of 20 MiB from the hole hold it.
    assert allocator.malloc(30 * MIB) == second
    assert sizes(allocator.segments())[0] == [(3, "active_allocated"), (30, "active_allocated"), (7, "inactive")]
    assert allocator.reserved_bytes == 60 * MIB


def test_blocks_that_could_grow_less_are_preferred() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    _, middle, _, _ = (allocator.malloc(size * MIB) for size in (2, 6, 2, 6))
    allocator.free(middle)
    # Free are 6 MiB between blocks and 4 MiB at the end of the mapped pages. The latter fit better, but
    # unmapped addresses follow them, so they count as large.
    assert allocator.malloc(3 * MIB) == middle


def test_nothing_is_released_for_being_old() -> None:
    config = AllocatorConfig(expandable_segments=True, garbage_collection_threshold=0.1)
    allocator = CachingAllocator(config, capacity_bytes=200 * MIB, record_history=True)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(61 * MIB)
    assert [action for action, _ in actions(allocator)] == ["segment_map", "segment_map"]


def test_the_capacity_is_compared_with_the_classic_segment_size() -> None:
    allocator = CachingAllocator(EXPANDABLE, capacity_bytes=30 * MIB, record_history=True)
    allocator.malloc(22 * MIB)
    assert allocator.reserved_bytes == 40 * MIB  # two pages: above the capacity, as on a card
    allocator.malloc(18 * MIB)  # cached, so the capacity is not asked
    with pytest.raises(AllocatorOutOfMemory) as caught:
        allocator.malloc(512)
    assert caught.value.reserved_bytes == 40 * MIB
    assert allocator.history is not None
    assert allocator.history[-1].address == 0  # nothing is free, rather than less than nothing


def test_a_retry_unmaps_pages_of_other_streams() -> None:
    allocator = CachingAllocator(EXPANDABLE, capacity_bytes=60 * MIB, record_history=True)
    allocator.free(allocator.malloc(40 * MIB, stream=1))
    allocator.malloc(30 * MIB)
    assert allocator.num_alloc_retries == 1
    assert actions(allocator) == [("segment_map", 40), ("segment_unmap", 40), ("segment_map", 40)]


def test_a_rejected_oversize_block_is_found_again_by_address() -> None:
    # By size, a cached block of max_split_size or more serves no smaller request; but growing starts at it.
    config = AllocatorConfig(expandable_segments=True, max_split_size=20 * MIB)
    allocator = CachingAllocator(config, record_history=True)
    address = allocator.malloc(40 * MIB)
    allocator.free(address)
    assert allocator.malloc(5 * MIB) == address
    assert actions(allocator) == [("segment_map", 40)]


def test_ranges_never_touch() -> None:
    # The snapshot viewer would take the end of one and the start of the next for one segment.
    allocator = CachingAllocator(EXPANDABLE, capacity_bytes=102 * MIB)  # six large pages of addresses
    pages = [allocator.malloc(20 * MIB) for _ in range(5)]
    allocator.free(pages[0])
    allocator.free(pages[4])
    allocator.malloc(30 * MIB)  # in the last two pages, as one alone at the start is too small
    allocator.malloc(512)
    middle, small = allocator.segments()
    assert middle.address + middle.total_size == pages[0] + 120 * MIB
    assert middle.address + middle.total_size < small.address


def test_without_a_capacity_a_range_holds_any_request() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    allocator.malloc(3 * 2**40)
    assert allocator.reserved_bytes == 157_287 * 20 * MIB  # 3 TiB in pages of 20 MiB, rounded up
