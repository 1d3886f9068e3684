"""What torch's caching allocator reserves: answers by hand from the constants and rules of
``c10/cuda/CUDACachingAllocator.cpp``, and from torch's own tests (``test/test_cuda.py``).
"""

from __future__ import annotations

import random

import pytest

from autopar import PlanError
from autopar.cost_model.caching_allocator import (
    CachingAllocator,
    MemoryEvent,
    simulate_allocator,
)

MIB = 2**20


def allocator(*sizes: float, capacity: float = float("inf"), expandable: bool = False):
    """An allocator with tensors 0, 1, 2 … of these MiB."""
    found = CachingAllocator(capacity, expandable)
    for tensor, size in enumerate(sizes):
        found.allocate(tensor, int(size * MIB))
    return found


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (0, 0, 0),
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # less than 1 MiB remains: it is not split off
        (19 * MIB, 20 * MIB, 20 * MIB),  # 1 MiB is not more than 1 MiB
        (4 * 21 * MIB, 4 * 21 * MIB, 84 * MIB),  # test_allocator_settings of torch's test_cuda.py
    ],
)
def test_one_tensor(nbytes: int, allocated: int, reserved: int) -> None:
    found = simulate_allocator([MemoryEvent("x", nbytes)])
    assert (found.allocated, found.reserved, found.retries) == (allocated, reserved, 0)


def test_small_tensors_share_a_segment() -> None:
    found = allocator(1, 0.5, 0.5)
    assert found.reserved == 2 * MIB
    found.allocate("one more", 1)
    assert found.reserved == 4 * MIB


def test_a_segment_of_20_mib_holds_two_tensors_of_8() -> None:
    assert allocator(8, 8).reserved == 20 * MIB
    assert allocator(8, 8, 4).reserved == 20 * MIB
    assert allocator(8, 8, 8).reserved == 40 * MIB


def test_free_neighbours_join() -> None:
    found = allocator(8, 8)
    found.free(0)
    found.free(1)
    found.allocate("whole", 20 * MIB)
    assert (found.reserved, found.allocated) == (20 * MIB, 20 * MIB)


def test_free_blocks_that_are_no_neighbours_do_not_join() -> None:
    found = allocator(6, 6, 6)
    found.free(0)
    found.free(2)  # 8 MiB with what remains of the segment
    found.allocate("x", 9 * MIB)
    assert found.reserved == 40 * MIB


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    found = allocator(40, 30, 50)
    for tensor in range(3):
        found.free(tensor)
    found.allocate("x", 29 * MIB + 512)  # of the 30: less than 1 MiB remains
    found.allocate("y", 35 * MIB)  # of the 40
    found.allocate("z", 50 * MIB)
    assert found.reserved == 120 * MIB
    assert found.allocated == (30 + 35 + 50) * MIB


def test_a_split_segment_of_its_own_serves_smaller_requests() -> None:
    found = allocator(100)
    found.free(0)
    for tensor in range(10):
        found.allocate(tensor, 10 * MIB)
    assert found.reserved == 100 * MIB


def test_each_stream_has_its_own_memory() -> None:
    events = [MemoryEvent("a", 64 * MIB, "compute"), MemoryEvent("a", None)]
    events += [MemoryEvent("b", 64 * MIB, "gather")]
    found = simulate_allocator(events)
    assert (found.allocated, found.reserved) == (64 * MIB, 128 * MIB)


def test_small_requests_take_nothing_of_large_segments() -> None:
    found = allocator(30)
    found.free(0)
    found.allocate("small", MIB)
    assert found.reserved == 32 * MIB


def test_free_segments_go_back_before_memory_runs_out() -> None:
    found = allocator(60, 30, capacity=100 * MIB)
    found.free(0)
    found.allocate("x", 70 * MIB)
    assert (found.retries, found.reserved, found.max_reserved) == (1, 100 * MIB, 100 * MIB)


def test_a_segment_in_use_does_not_go_back() -> None:
    found = allocator(60, capacity=100 * MIB)
    found.free(0)
    found.allocate("part", 10 * MIB)
    with pytest.raises(PlanError, match=r"58720256 bytes .* 62914560 of 104857600 are reserved"):
        found.allocate("x", 56 * MIB)
    assert found.retries == 1


def test_a_tensor_is_allocated_once_and_then_freed() -> None:
    found = allocator(1)
    with pytest.raises(ValueError, match="0 is allocated already"):
        found.allocate(0, 1)
    found.free(0)
    with pytest.raises(KeyError):
        found.free(0)


# Expandable segments


@pytest.mark.parametrize(
    ("mib", "reserved"), [(0.5, 2), (1, 2), (2, 20), (20, 20), (21, 40), (100, 100)]
)
def test_an_expandable_segment_grows_by_pages(mib: float, reserved: int) -> None:
    assert allocator(mib, expandable=True).reserved == reserved * MIB


def test_a_free_end_of_an_expandable_segment_grows() -> None:
    for expandable, reserved in ((False, 180), (True, 120)):
        found = allocator(40, 60, expandable=expandable)
        found.free(1)
        found.allocate("x", 80 * MIB)
        assert found.reserved == reserved * MIB


def test_a_hole_in_an_expandable_segment_is_not_enlarged() -> None:
    found = allocator(40, 60, expandable=True)
    found.free(0)
    found.allocate("x", 50 * MIB)
    assert found.reserved == 160 * MIB  # 150, in pages of 20
    found.allocate("y", 40 * MIB)
    assert found.reserved == 160 * MIB


def test_expandable_segments_of_streams_and_of_small_tensors_are_apart() -> None:
    events = [MemoryEvent("a", 20 * MIB, 0), MemoryEvent("b", 20 * MIB, 1), MemoryEvent("c", 9, 0)]
    assert simulate_allocator(events, expandable=True).reserved == 42 * MIB


def test_free_pages_of_an_expandable_segment_go_back() -> None:
    found = allocator(30, 50, 20, capacity=120 * MIB, expandable=True)
    found.free(1)  # from 30 to 80 MiB: the whole pages are those from 40 to 80
    found.allocate("x", 60 * MIB)  # 100 are reserved: it asks for 60 more, and 40 go back
    assert (found.retries, found.reserved, found.max_reserved) == (1, 120 * MIB, 120 * MIB)
    with pytest.raises(PlanError, match="out of memory"):
        found.allocate("y", 20 * MIB)
    found.allocate("z", 10 * MIB)  # from 30 to 40 MiB


@pytest.mark.parametrize("expandable", [False, True])
def test_when_all_is_freed_all_can_go_back(expandable: bool) -> None:
    draw = random.Random(0)
    found, live = CachingAllocator(expandable=expandable), dict[int, tuple[int, int]]()
    for tensor in range(3000):
        if live and draw.random() < 0.5:
            found.free(gone := draw.choice([*live]))
            del live[gone]
        nbytes, stream = int(2 ** draw.uniform(0, 28)), draw.randrange(3)
        found.allocate(tensor, nbytes, stream)
        live[tensor] = nbytes, stream
        assert sum(nbytes for nbytes, _ in live.values()) <= found.allocated <= found.reserved
    for tensor in live:
        found.free(tensor)
    assert found.allocated == 0
    found._release_cached()
    assert found.reserved == 0
