from __future__ import annotations

from collections.abc import Hashable, Sequence

from layerstream.chunks import Chunk
from layerstream.policies import EvictionPolicy, UseOrder

SMALL = 0.1
"""Part of the pool that new chunks may fill before one of them goes."""
MOST_USES = 3


class S3FIFO(EvictionPolicy[Chunk]):
    """Three queues without any order of use (Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023),
    over chunks that nothing hangs behind.

    New chunks enter the small queue. Its first one goes, or moves to the main queue if it was used meanwhile; the first
    of the main queue is put at its end again as often as it was used. What went from the small queue enters the main
    one if it comes back while its name is known. A chunk's name is the hash of its first block.

    As only the last chunk of what a request uses is touched, the one before a chunk of the main queue joins that queue
    when the chunk goes.
    """

    def __init__(self) -> None:
        self._slots = 0
        self._tick = 0
        self._main: dict[Chunk, bool] = {}
        """All chunks there are -> whether they are in the main queue."""
        self._counts = [0, 0]
        self._uses: dict[Chunk, int] = {}
        self._queues: tuple[UseOrder[Chunk], UseOrder[Chunk]] = (UseOrder(), UseOrder())
        self._gone: dict[bytes, None] = {}

    def resize(self, slots: int) -> None:
        self._slots = slots

    def see(self, hashes: Sequence[Hashable]) -> None:
        pass

    def enter(self, item: Chunk, continues: Chunk | None) -> None:
        known = item.hashes[0] in self._gone
        self._gone.pop(item.hashes[0], None)
        self._main[item] = known
        self._counts[known] += 1
        self._uses[item] = 0
        self._stamp(item)

    def fill(self, item: Chunk) -> None:
        pass

    def touch(self, item: Chunk) -> None:
        self._uses[item] = min(MOST_USES, self._uses[item] + 1)

    def add(self, item: Chunk) -> None:
        self._queues[self._main[item]].add(item)

    def discard(self, item: Chunk) -> None:
        for queue in self._queues:
            queue.discard(item)
        if not item.live and item in self._main:
            self._counts[self._main.pop(item)] -= 1
            del self._uses[item]

    def pop(self) -> Chunk | None:
        while True:
            first = 0 if self._counts[0] >= SMALL * self._slots else 1
            item = self._queues[first].pop()
            if item is None:
                first = 1 - first
                item = self._queues[first].pop()
            if item is None:
                return None
            if not self._uses[item]:
                break
            if first == 0:
                self._main[item] = True
                self._counts[0] -= 1
                self._counts[1] += 1
                self._uses[item] = 0
            else:
                self._uses[item] -= 1
            self._stamp(item)
            self._queues[1].add(item)
        if first == 0:
            self._gone[item.hashes[0]] = None
            while len(self._gone) > self._slots:
                del self._gone[next(iter(self._gone))]
        parent = item.parent
        if parent is not None and self._main[item] and not self._main[parent]:
            self._main[parent] = True
            self._counts[0] -= 1
            self._counts[1] += 1
        return item

    def _stamp(self, item: Chunk) -> None:
        self._tick += 1
        item.used = self._tick
