"""Which slots of the host pool are free, kept as runs of consecutive slots.

Slots that lie side by side make long pool runs, so each layer of a prefix saved in order is a few large copies.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable


class SlotAllocator:
    """Hands out the slots `0 .. slots - 1`, in runs as long as can be; `grow` adds more.

    Free runs never touch each other: a slot that is given back joins its neighbours. `take` and `give` cost O(log runs)
    plus a move inside a sorted list for each run they change.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.free = slots
        """Number of slots that can be taken."""
        self._taken = bytearray(slots)
        self._length: dict[int, int] = {}
        """First slot of each free run -> its length."""
        self._first: dict[int, int] = {}
        """Slot after each free run -> its first slot."""
        self._by_length: list[tuple[int, int]] = []
        """(length, first slot) of each free run, sorted."""
        if slots:
            self._insert(0, slots)

    def take(self, count: int) -> list[int] | None:
        """Take `count` slots, all or none.

        Returns:
            The slots, ascending inside each run: the head of the shortest run that is long enough or, if there is none,
            the longest runs first. None if fewer than `count` slots are free.
        """
        if count > self.free:
            return None
        taken: list[int] = []
        while (rest := count - len(taken)) > 0:
            fitting = bisect_left(self._by_length, (rest, 0))
            length, first = self._by_length[min(fitting, len(self._by_length) - 1)]
            used = min(length, rest)
            self._remove(first, length)
            if used < length:
                self._insert(first + used, length - used)
            taken.extend(range(first, first + used))
            self._taken[first : first + used] = b"\1" * used
        self.free -= count
        return taken

    def give(self, slots: Iterable[int]) -> None:
        """Give slots back, in any order. Giving a slot that is not taken is a bug of the caller."""
        first, length = 0, 0
        for slot in sorted(slots):
            if length and slot == first + length:
                length += 1
                continue
            if length:
                self._give_run(first, length)
            first, length = slot, 1
        if length:
            self._give_run(first, length)

    def grow(self, slots: int) -> None:
        """Add the slots from the present number up to `slots`, which may not be smaller, as free ones."""
        more = slots - self.slots
        assert more >= 0, f"an allocator of {self.slots} slots was asked to shrink to {slots}"
        if more:
            first, self.slots = self.slots, slots
            self._taken.extend(b"\1" * more)
            self._give_run(first, more)

    def _give_run(self, first: int, length: int) -> None:
        after = first + length
        assert self._taken.count(1, first, after) == length, f"a slot of {first} .. {after - 1} was given back twice"
        self._taken[first:after] = bytes(length)
        self.free += length
        before = self._first.get(first)
        if before is not None:
            self._remove(before, first - before)
            length += first - before
            first = before
        more = self._length.get(after)
        if more is not None:
            self._remove(after, more)
            length += more
        self._insert(first, length)

    def _insert(self, first: int, length: int) -> None:
        self._length[first] = length
        self._first[first + length] = first
        insort(self._by_length, (length, first))

    def _remove(self, first: int, length: int) -> None:
        del self._length[first]
        del self._first[first + length]
        del self._by_length[bisect_left(self._by_length, (length, first))]
