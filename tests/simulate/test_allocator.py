"""The caching allocator: segments, splits, joins, pools per stream. Sizes as in c10/cuda/CUDACachingAllocator.cpp."""

from __future__ import annotations

import random

import pytest

from meshweave.cost.simulate.memory import CachingAllocator, reserved_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (9 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segments_by_size(size: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(size, "s")
    assert allocator.reserved == reserved


def test_small_blocks_share_a_segment() -> None:
    allocator = CachingAllocator()
    for _ in range(4096):
        allocator.allocate(512, "s")
    assert allocator.reserved == 2 * MIB
    allocator.allocate(1, "s")
    assert allocator.reserved == 4 * MIB


def test_what_is_freed_is_used_again_and_joined() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(8 * MIB, "s"), allocator.allocate(8 * MIB, "s")
    assert allocator.reserved == 20 * MIB
    allocator.free(first)
    allocator.free(second)
    allocator.allocate(20 * MIB - 512, "s")
    assert allocator.reserved == 20 * MIB


def test_streams_do_not_share() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(64 * MIB, "s"))
    allocator.allocate(64 * MIB, "t")
    assert allocator.reserved == 128 * MIB


def test_a_large_block_is_not_split_for_little() -> None:
    """What is left of a large block stays with it if it is at most 1 MiB."""
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(64 * MIB, "s"))
    allocator.allocate(63 * MIB, "s")
    allocator.allocate(MIB + 512, "s")
    assert allocator.reserved == 84 * MIB


def test_fragments_cost() -> None:
    """Room enough in all, but not in one piece."""
    allocator = CachingAllocator()
    handles = [allocator.allocate(16 * MIB, "s") for _ in range(4)]
    allocator.free(handles[0])
    allocator.free(handles[2])
    allocator.allocate(32 * MIB, "s")
    assert allocator.reserved == 96 * MIB


def test_random_sequences_keep_their_books() -> None:
    chance = random.Random(0)
    allocator, held, alive, peak = CachingAllocator(), dict[int, int](), 0, 0
    for _ in range(3000):
        if held and chance.random() < 0.5:
            handle = chance.choice(list(held))
            alive -= held.pop(handle)
            allocator.free(handle)
        else:
            size = chance.choice([100, 5000, 3 * MIB, 12 * MIB, 40 * MIB])
            held[allocator.allocate(size, "s")] = size
            alive += size
        peak = max(peak, alive)
    assert peak <= allocator.reserved < 3 * peak
    for handle in list(held):
        allocator.free(handle)
    before = allocator.reserved
    again = [allocator.allocate(40 * MIB, "s") for _ in range(peak // (400 * MIB))]
    assert allocator.reserved == before, "free segments are used"
    assert again


def test_changes_in_pairs() -> None:
    assert reserved_bytes([(0, 30 * MIB, "s"), (0, 30 * MIB, "s"), (1, 30 * MIB, "s"), (2, 0, "s")]) == 30 * MIB


def test_one_tensor_that_comes_and_goes_costs_a_segment_where_it_does_not_fit() -> None:
    for sizes in ([100, 200, 300, 400], [64, 33, 7, 91]):
        changes = [(i, size * MIB, "s") for i, size in enumerate(sizes) for _ in range(2)]
        assert (
            reserved_bytes(changes)
            == sum(size + size % 2 for i, size in enumerate(sizes) if size > max([0, *sizes[:i]])) * MIB
        )
