"""Who goes first when the host pool is full: eviction behind one small interface."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar


class Evictable(Protocol):
    """What a policy may know of an item; items compare and hash by identity."""

    used: int
    """When it was last used, in ticks of the policy that stamps it; below every stamp until it has one."""


Item = TypeVar("Item", bound=Evictable)


class EvictionPolicy(Protocol[Item]):
    """Chooses among the items that may be evicted at this moment.

    The index adds an item when nothing needs it any more and discards it when something does, so an item that is in
    use is never even considered.
    """

    def resize(self, slots: int) -> None:
        """There is room for so many items."""

    def see(self, hashes: Sequence[Hashable]) -> None:
        """A prompt with these block hashes was asked for, whatever of it is there."""

    def enter(self, item: Item, continues: Item | None) -> None:
        """`item` is new. `continues`: the one it hangs behind, if nothing hung there before."""

    def fill(self, item: Item) -> None:
        """Blocks are being written into `item`, its first or more of them. It need not be evictable."""

    def touch(self, item: Item) -> None:
        """`item` was used again. It need not be evictable."""

    def add(self, item: Item) -> None:
        """`item` may be evicted; nothing happens if it already may."""

    def discard(self, item: Item) -> None:
        """`item` may not be evicted; nothing happens if it already may not."""

    def pop(self) -> Item | None:
        """The item to evict first, which then no longer counts as evictable; None if there is none."""


class UseOrder(Generic[Item]):
    """Items by their stamp of last use, the oldest first, whoever stamps them.

    A heap with stale entries: an entry counts only while its number is the one on record for its item, and the heap is
    rebuilt before stale entries outnumber the others, so every operation is O(log n) amortised.
    """

    def __init__(self) -> None:
        self._number = 0
        self._heap: list[tuple[int, int, Item]] = []
        """(used, number, item)."""
        self._current: dict[Item, int] = {}
        """Item -> number of its entry."""

    def add(self, item: Item) -> None:
        """Nothing happens if it is there."""
        if item not in self._current:
            self._push(item)

    def renew(self, item: Item) -> None:
        """The item has a newer stamp; nothing happens if it is not there."""
        if item in self._current:
            self._push(item)

    def discard(self, item: Item) -> None:
        """Nothing happens if it is not there."""
        self._current.pop(item, None)

    def pop(self) -> Item | None:
        """Take out the item with the oldest stamp; None if there is none."""
        while self._heap:
            _, number, item = heapq.heappop(self._heap)
            if self._current.get(item) == number:
                del self._current[item]
                return item
        return None

    def _push(self, item: Item) -> None:
        if len(self._heap) > 2 * len(self._current) + 64:
            self._heap = [entry for entry in self._heap if self._current.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
        self._number += 1
        self._current[item] = self._number
        heapq.heappush(self._heap, (item.used, self._number, item))


class LRU(UseOrder[Item], EvictionPolicy[Item]):
    """Least recently used first. An item keeps its place in time while it is not evictable."""

    def __init__(self) -> None:
        super().__init__()
        self._tick = 0

    def touch(self, item: Item) -> None:
        self._tick += 1
        item.used = self._tick
        self.renew(item)

    def fill(self, item: Item) -> None:
        self.touch(item)

    def resize(self, slots: int) -> None:
        """The order of use is the same in a pool of any size."""

    def see(self, hashes: Sequence[Hashable]) -> None:
        """What is not there has no place in the order."""

    def enter(self, item: Item, continues: Item | None) -> None:
        """A new item gets its place when it is filled."""
