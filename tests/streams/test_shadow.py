from __future__ import annotations

from layerstream.streams.accesses import ranges
from layerstream.streams.shadow import Access, Operation, Shadow, join

WRITER = Operation("a", "write", "here:1")


def access(time: int, stream: int = 1) -> Access:
    return Access(stream, time, WRITER)


def test_a_byte_without_history_conflicts_with_nothing() -> None:
    shadow = Shadow()
    assert shadow.read(ranges([(0, 10)]), access(1), {1: 1}) == []
    assert shadow.write(ranges([(10, 20)]), access(1), {1: 1}) == []
    assert shadow.read(ranges([(20, 2**63 - 1)]), access(1, 2), {2: 1}) == []


def test_a_conflict_is_told_for_each_stretch_of_equal_history() -> None:
    shadow = Shadow()
    shadow.write(ranges([(0, 4), (8, 12)]), access(1), {1: 1})
    found = shadow.read(ranges([(2, 10)]), access(1, 2), {2: 1})
    assert [(conflict.start, conflict.end, conflict.wrote) for conflict in found] == [(2, 4, True), (8, 10, True)]


def test_intervals_of_equal_history_become_one_again() -> None:
    shadow = Shadow()
    for page in range(100):
        shadow.write(ranges([(16 * page, 16 * page + 16)]), access(page + 1), {1: page + 1})
    assert len(shadow) == 102
    shadow.read(ranges([(0, 1600)]), access(101), {1: 101})
    assert len(shadow) == 102
    shadow.write(ranges([(0, 1600)]), access(102), {1: 102})
    assert len(shadow) == 3
    for page in range(100):
        shadow.read(ranges([(16 * page, 16 * page + 16)]), access(103), {1: 103})
    assert len(shadow) == 3
    for page in range(0, 100, 2):
        shadow.forget(16 * page, 16 * page + 16)
    for page in range(1, 100, 2):
        shadow.forget(16 * page, 16 * page + 16)
    assert len(shadow) == 1


def test_of_reads_in_a_row_the_last_is_kept() -> None:
    shadow = Shadow()
    for time in range(1, 50):
        shadow.read(ranges([(0, 8)]), access(time), {1: time})
    (conflict,) = shadow.write(ranges([(0, 8)]), access(1, 2), {2: 1})
    assert conflict.earlier.time == 49 and not conflict.wrote


def test_joining_clocks_keeps_the_later_time_of_each_stream() -> None:
    clock = {1: 5, 2: 1}
    assert join(clock, {1: 3, 2: 4, 3: 1})
    assert clock == {1: 5, 2: 4, 3: 1}
    assert not join(clock, {1: 5, 3: 1})
