from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerstream.slots import SlotAllocator


def runs(slots: list[int]) -> list[tuple[int, int]]:
    """(first, count) of consecutive slots in the order given."""
    found: list[tuple[int, int]] = []
    for slot in slots:
        if found and sum(found[-1]) == slot:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((slot, 1))
    return found


def with_free(slots: int, free: list[int]) -> SlotAllocator:
    allocator = SlotAllocator(slots)
    allocator.take(slots)
    allocator.give(free)
    return allocator


def test_the_shortest_run_that_is_long_enough_is_used() -> None:
    allocator = with_free(20, [0, 1, 2, 3, 6, 7, 8, 11, 12])
    assert allocator.take(3) == [6, 7, 8]
    assert allocator.take(2) == [11, 12]
    assert allocator.take(2) == [0, 1]
    assert allocator.take(2) == [2, 3]


def test_where_no_run_is_long_enough_the_fewest_runs_are_used() -> None:
    allocator = with_free(20, [0, 2, 3, 5, 6, 7, 9, 10, 11, 12])
    assert allocator.take(8) == [9, 10, 11, 12, 5, 6, 7, 0]


def test_all_or_nothing() -> None:
    allocator = with_free(8, [1, 3, 5])
    assert allocator.take(4) is None
    assert allocator.free == 3
    assert sorted(allocator.take(3) or []) == [1, 3, 5]
    assert allocator.free == 0 and allocator.take(1) is None


def test_nothing_can_be_taken() -> None:
    allocator = SlotAllocator(0)
    assert allocator.take(0) == [] and allocator.take(1) is None


def test_slots_given_back_join_their_neighbours() -> None:
    allocator = with_free(9, [])
    for slot in (0, 8, 2, 6, 4, 1, 7, 5, 3):
        allocator.give([slot])
    assert runs(allocator.take(9) or []) == [(0, 9)]


def test_giving_a_slot_twice_is_caught() -> None:
    allocator = with_free(4, [2])
    with pytest.raises(AssertionError, match="given back twice"):
        allocator.give([2])
    with pytest.raises(AssertionError, match="given back twice"):
        allocator.give([1, 2, 3])


def test_new_slots_join_the_free_run_before_them() -> None:
    allocator = with_free(4, [2, 3])
    allocator.grow(7)
    assert (allocator.slots, allocator.free) == (7, 5)
    assert allocator.take(5) == [2, 3, 4, 5, 6]


def test_growth_leaves_taken_slots_alone() -> None:
    allocator = with_free(4, [])
    allocator.grow(4)
    assert allocator.take(1) is None
    allocator.grow(6)
    assert allocator.take(2) == [4, 5]
    allocator.give([3, 4])
    assert allocator.take(2) == [3, 4]


def test_an_allocator_never_shrinks() -> None:
    with pytest.raises(AssertionError, match="4 slots was asked to shrink to 3"):
        SlotAllocator(4).grow(3)


def test_ten_thousand_random_sizes_leave_no_fragments() -> None:
    allocator = SlotAllocator(500)
    held: list[list[int]] = []
    for step in range(10_000):
        size = step * 7919 % 61 + 1
        taken = allocator.take(size)
        if taken is None:
            allocator.give(held.pop(step % len(held)))
        else:
            held.append(taken)
    allocator.give(itertools.chain.from_iterable(held))
    assert allocator.take(500) == list(range(500))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 24), st.lists(st.tuples(st.sampled_from(["take", "give", "grow"]), st.integers(0, 30)), max_size=40)
)
def test_it_behaves_like_a_set_of_free_slots(slots: int, operations: list[tuple[str, int]]) -> None:
    allocator = SlotAllocator(slots)
    free = set(range(slots))
    taken: list[int] = []
    for what, number in operations:
        if what == "grow":
            more = slots + number % 6
            allocator.grow(more)
            free |= set(range(slots, more))
            slots = more
        elif what == "take":
            lengths = sorted((count for _, count in runs(sorted(free))), reverse=True)
            got = allocator.take(number)
            if number > len(free):
                assert got is None
            else:
                assert got is not None and len(got) == len(set(got)) == number and set(got) <= free
                fewest = next(n for n in range(len(lengths) + 1) if sum(lengths[:n]) >= number)
                assert len(runs(got)) == fewest
                free -= set(got)
                taken += got
        elif taken:
            back = [taken.pop(number % len(taken)) for _ in range(min(number % 4, len(taken)))]
            allocator.give(back)
            free |= set(back)
        assert (allocator.slots, allocator.free) == (slots, len(free))
