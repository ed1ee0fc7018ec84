"""Who touched which bytes last, and which of two accesses came first: the two halves of finding a race."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from layerstream.streams.accesses import Ranges

Clock: TypeAlias = dict[int, int]
"""Vector clock: for each stream, how many of its operations are known to have come before."""


def join(clock: Clock, other: Mapping[int, int]) -> bool:
    """Know in `clock` what is known in `other` as well; whether anything was new."""
    changed = False
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time
            changed = True
    return changed


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One operation of a stream or of the host."""

    stream: str
    what: str
    site: str
    """Where it was queued: file:line."""


class Access(NamedTuple):
    """An operation as one that touched bytes."""

    stream: int
    time: int
    """Which of its stream's operations it is."""
    operation: Operation

    def before(self, clock: Mapping[int, int]) -> bool:
        """Whether it came before whatever has this clock."""
        return clock.get(self.stream, 0) >= self.time


class Conflict(NamedTuple):
    """Bytes that an earlier access touched and no order separates from the present one."""

    earlier: Access
    wrote: bool
    """Whether the earlier one wrote them."""
    start: int
    end: int


class _Cell(NamedTuple):
    """What is known of bytes with equal history."""

    write: Access | None
    reads: tuple[Access, ...]
    """Since the write, without those that came before another one of these: whoever comes after that comes after
    both."""


_UNTOUCHED = _Cell(None, ())


class Shadow:
    """The last write of every byte and the reads since, kept for intervals of addresses with equal history."""

    def __init__(self) -> None:
        # Cell i is about the bytes from `_starts[i]` to `_starts[i + 1]`.
        self._starts = [-1]
        self._cells = [_UNTOUCHED]

    def __len__(self) -> int:
        """Intervals that are kept apart."""
        return len(self._starts)

    def read(self, ranges: Ranges, access: Access, clock: Mapping[int, int]) -> list[Conflict]:
        """Note a read of `ranges`, of an operation with this clock; what it conflicts with."""
        conflicts: list[Conflict] = []
        for start, end in ranges.tolist():
            first, last = self._cut(start), self._cut(end)
            for index in range(first, last):
                write, reads = self._cells[index]
                if write is not None and not write.before(clock):
                    conflicts.append(Conflict(write, True, *self._bounds(index)))
                kept = tuple(read for read in reads if not read.before(clock))
                self._cells[index] = _Cell(write, (*kept, access))
            self._merge(first, last)
        return conflicts

    def write(self, ranges: Ranges, access: Access, clock: Mapping[int, int]) -> list[Conflict]:
        """Note a write of `ranges`, of an operation with this clock; what it conflicts with."""
        conflicts: list[Conflict] = []
        cell = _Cell(access, ())
        for start, end in ranges.tolist():
            first, last = self._cut(start), self._cut(end)
            for index in range(first, last):
                write, reads = self._cells[index]
                if write is not None and not write.before(clock):
                    conflicts.append(Conflict(write, True, *self._bounds(index)))
                conflicts += [Conflict(read, False, *self._bounds(index)) for read in reads if not read.before(clock)]
            self._replace(first, last, cell)
        return conflicts

    def forget(self, start: int, end: int) -> None:
        """Know nothing of these bytes any more: they have become other memory."""
        first, last = self._cut(start), self._cut(end)
        self._replace(first, last, _UNTOUCHED)

    def _cut(self, address: int) -> int:
        """Index of the cell that starts at `address`, cutting one in two if none does."""
        index = bisect_right(self._starts, address) - 1
        if self._starts[index] != address:
            index += 1
            self._starts.insert(index, address)
            self._cells.insert(index, self._cells[index - 1])
        return index

    def _replace(self, first: int, last: int, cell: _Cell) -> None:
        """Make cells `first` to `last - 1` one."""
        self._cells[first] = cell
        if last > first + 1:
            del self._starts[first + 1 : last], self._cells[first + 1 : last]
        self._merge(first, first + 1)

    def _bounds(self, index: int) -> tuple[int, int]:
        return self._starts[index], self._starts[index + 1]

    def _merge(self, first: int, last: int) -> None:
        """Join neighbours of equal history, from the cell before `first` to the one at `last`."""
        for index in range(min(last, len(self._cells) - 1), max(first, 1) - 1, -1):
            if self._cells[index] == self._cells[index - 1]:
                del self._starts[index], self._cells[index]
