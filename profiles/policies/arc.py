from __future__ import annotations

from collections.abc import Hashable, Sequence

from layerstream.chunks import Chunk
from layerstream.policies import EvictionPolicy, UseOrder


class ARC(EvictionPolicy[Chunk]):
    """Adaptive replacement cache (Megiddo and Modha, FAST 2003), over chunks that nothing hangs behind.

    Chunks used once and chunks used more often have an order of use each, and so have the names of what was evicted
    from either. A chunk that comes back and whose name is still known moves the target for the first list, up if it
    was evicted from there, else down. A chunk's name is the hash of its first block.

    As only the last chunk of what a request uses is touched, its prefix joins the list of what is used more often when
    the chunk behind it goes.
    """

    def __init__(self) -> None:
        self._slots = 0
        self._target = 0.0
        self._tick = 0
        self._often: dict[Chunk, bool] = {}
        """All chunks there are -> whether they were used more than once."""
        self._counts = [0, 0]
        self._orders: tuple[UseOrder[Chunk], UseOrder[Chunk]] = (UseOrder(), UseOrder())
        self._gone: tuple[dict[bytes, None], dict[bytes, None]] = ({}, {})
        """Names of what was evicted while used once, and while used more often, the longest ago first."""

    def resize(self, slots: int) -> None:
        self._slots = slots

    def see(self, hashes: Sequence[Hashable]) -> None:
        pass

    def enter(self, item: Chunk, continues: Chunk | None) -> None:
        name = item.hashes[0]
        once, often = self._gone
        known = name in once or name in often
        if name in once:
            self._target = min(self._slots, self._target + max(1.0, len(often) / max(len(once), 1)))
            del once[name]
        elif name in often:
            self._target = max(0.0, self._target - max(1.0, len(once) / max(len(often), 1)))
            del often[name]
        self._often[item] = known
        self._counts[known] += 1

    def fill(self, item: Chunk) -> None:
        self._stamp(item)

    def touch(self, item: Chunk) -> None:
        if not self._often[item]:
            here = item in self._orders[0]._current
            self._orders[0].discard(item)
            self._often[item] = True
            self._counts[0] -= 1
            self._counts[1] += 1
            if here:
                self._orders[1].add(item)
        self._stamp(item)

    def add(self, item: Chunk) -> None:
        self._orders[self._often[item]].add(item)

    def discard(self, item: Chunk) -> None:
        for order in self._orders:
            order.discard(item)
        if not item.live and item in self._often:
            self._counts[self._often.pop(item)] -= 1

    def pop(self) -> Chunk | None:
        first = 0 if self._counts[0] > self._target else 1
        for which in (first, 1 - first):
            item = self._orders[which].pop()
            if item is None:
                continue
            gone = self._gone[which]
            gone[item.hashes[0]] = None
            # As many names as there are slots, over both lists of each kind.
            most = self._slots - self._counts[0] if which == 0 else 2 * self._slots - sum(self._counts)
            while len(gone) > max(most, 1):
                del gone[next(iter(gone))]
            parent = item.parent
            if which and parent is not None and not self._often[parent]:
                self._often[parent] = True
                self._counts[0] -= 1
                self._counts[1] += 1
            if parent is not None:
                parent.used = max(parent.used, item.used)
            return item
        return None

    def _stamp(self, item: Chunk) -> None:
        self._tick += 1
        item.used = self._tick
        self._orders[self._often[item]].renew(item)
