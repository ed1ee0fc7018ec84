from __future__ import annotations

import pytest

from layerstream.ghosts import SIZES, Ghosts
from layerstream.index import PrefixIndex

SLOTS = 8


def hashes(number: int) -> list[bytes]:
    return [f"{number}".encode()]


def pool(slots: int = SLOTS) -> PrefixIndex:
    return PrefixIndex(slots=slots, chunk_blocks=1)


def use(index: PrefixIndex, number: int) -> bool:
    """Use a prompt of one chunk; whether it was there."""
    there = index.match(hashes(number), 1) == 1
    if there:
        index.touch(hashes(number), 1)
    else:
        spans = index.reserve(hashes(number), 0, 1)
        assert spans is not None
        index.publish(spans)
    return there


@pytest.mark.parametrize("extra", [1, 2, 3, 4, 5, 8])
def test_a_pool_of_the_size_that_is_said_would_have_kept_what_came_back_and_a_smaller_one_not(extra: int) -> None:
    """Prompts in turns, one of `extra` too many for the pool: each comes back just after it has gone."""
    index = pool()
    for _ in range(3):
        for number in range(SLOTS + extra):
            use(index, number)
    (label,) = index.returned
    smaller = [other for other in SIZES if SIZES[other] < SIZES[label]]
    for size, kept in [(SIZES[label], True), *((SIZES[other], False) for other in smaller)]:
        other_pool = pool(int(SLOTS * size))
        for number in range(SLOTS + extra):
            use(other_pool, number)
        assert all(use(other_pool, number) for number in range(SLOTS + extra)) is kept


def test_what_no_pool_of_twice_the_size_would_have_is_not_counted() -> None:
    index = pool()
    for _ in range(3):
        for number in range(2 * SLOTS + 1):
            use(index, number)
    assert index.returned == {} and index.evicted > 0


def test_what_came_back_is_counted_once_and_what_never_left_not_at_all() -> None:
    ghosts = Ghosts()
    ghosts.evicted(b"a", SLOTS)
    assert ghosts.returned(b"b", SLOTS) is None
    assert ghosts.returned(b"a", SLOTS) == "1.25"
    assert ghosts.returned(b"a", SLOTS) is None


def test_no_more_ghosts_are_kept_than_a_pool_of_twice_the_size_could_tell_of() -> None:
    ghosts = Ghosts()
    for number in range(100):
        ghosts.evicted(b"%d" % number, SLOTS)
    assert len(ghosts._evicted_at) == 2 * SLOTS


def test_after_a_reset_nothing_can_come_back() -> None:
    index = pool()
    for number in range(SLOTS + 1):
        use(index, number)
    index.clear()
    use(index, 0)
    assert index.returned == {}
