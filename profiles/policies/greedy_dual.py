from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from layerstream.chunks import Chunk
from layerstream.policies import EvictionPolicy, UseOrder


class GreedyDual(EvictionPolicy[Chunk]):
    """Greedy-Dual-Size-Frequency (Cherkasova 1998), over chunks that nothing hangs behind: what a chunk is worth is the
    prefill that it saves for each byte, times how often it was used.

    A chunk's rank is what it is worth plus the rank of the last one that went, and the lowest goes first. All chunks
    have the same bytes, so only what they cost counts, in units of the prompt's first chunk. As only the last chunk
    of what a request uses is touched, its uses are handed to the one before it when it goes.

    Args:
        cost: what computing a chunk takes that has so many blocks before it.
    """

    UNIT = 1 << 20

    def __init__(self, cost: Callable[[int], float]) -> None:
        self._cost = cost
        self._floor = 1
        self._depth: dict[Chunk, int] = {}
        self._uses: dict[Chunk, int] = {}
        self._order: UseOrder[Chunk] = UseOrder()

    def resize(self, slots: int) -> None:
        pass

    def see(self, hashes: Sequence[Hashable]) -> None:
        pass

    def enter(self, item: Chunk, continues: Chunk | None) -> None:
        self._depth[item] = 0 if item.parent is None else self._depth[item.parent] + item.at
        self._uses[item] = 1

    def fill(self, item: Chunk) -> None:
        self._stamp(item)

    def touch(self, item: Chunk) -> None:
        self._uses[item] += 1
        self._stamp(item)

    def add(self, item: Chunk) -> None:
        self._order.add(item)

    def discard(self, item: Chunk) -> None:
        self._order.discard(item)
        if not item.live and item in self._depth:
            del self._depth[item], self._uses[item]

    def pop(self) -> Chunk | None:
        item = self._order.pop()
        if item is None:
            return None
        self._floor = max(self._floor, item.used)
        parent = item.parent
        if parent is not None:
            self._uses[parent] += self._uses[item] - 1
            if not parent.used:
                # What came in with the chunk behind it is ranked from the same time on.
                before = item.used - self._worth(item)
                parent.used = before + self._worth(parent)
        return item

    def _stamp(self, item: Chunk) -> None:
        item.used = self._floor + self._worth(item)
        self._order.renew(item)

    def _worth(self, item: Chunk) -> int:
        return int(self.UNIT * self._uses[item] * self._cost(self._depth[item]))
