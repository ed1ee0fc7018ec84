"""What is known of the files in a disk tier's folder, and which object was not used for longest. Bookkeeping alone."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from layerstream.tiers.disk.folder import SHARDS


@dataclass(slots=True)
class Entry:
    """The files of one object."""

    used_ns: int
    """When it was used last, in nanoseconds of Unix time."""
    sizes: dict[int, int] = field(default_factory=dict)
    """rank -> bytes."""
    parent: str = ""
    """Key of the prefix's object before it, where known."""
    queued_ns: int = 0
    """The time under which it waits to be the oldest."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return sum(self.sizes.values())


class DiskContents:
    """Objects by their keys, in hex digits."""

    def __init__(self) -> None:
        self._shards: dict[str, dict[str, Entry]] = {name: {} for name in SHARDS}
        self._files = dict.fromkeys(SHARDS, 0)
        self._queue: list[tuple[int, str]] = []
        self.gone: Callable[[str], None] | None = None
        """Told of each object that lost a file."""
        self.used_bytes = 0
        """Bytes of all files."""
        self.objects = 0
        """Objects, those that some ranks have not written included."""

    def get(self, key: str) -> Entry | None:
        """What is known of an object."""
        return self._shards[key[:2]].get(key)

    def has(self, key: str, rank: int) -> bool:
        """Whether one rank's file is known."""
        entry = self.get(key)
        return entry is not None and rank in entry.sizes

    def put(self, key: str, rank: int, size: int, used_ns: int) -> None:
        """There is a file of this many bytes, used then or later."""
        shard = key[:2]
        entry = self._shards[shard].get(key)
        if entry is None:
            entry = self._shards[shard][key] = Entry(used_ns)
            self.objects += 1
            self._push(key, entry)
        self._files[shard] += rank not in entry.sizes
        self.used_bytes += size - entry.sizes.get(rank, 0)
        entry.sizes[rank] = size
        entry.used_ns = max(entry.used_ns, used_ns)

    def drop(self, key: str, rank: int) -> None:
        """There is no such file."""
        shard = key[:2]
        entry = self._shards[shard].get(key)
        if entry is None or rank not in entry.sizes:
            return
        self.used_bytes -= entry.sizes.pop(rank)
        self._files[shard] -= 1
        if self.gone is not None:
            self.gone(key)
        if not entry.sizes:
            del self._shards[shard][key]
            self.objects -= 1

    def keep_only(self, shard: str, seen: set[tuple[str, int]]) -> None:
        """Of the files in one folder, drop those that are not among these known ones, (key, rank)."""
        if len(seen) < self._files[shard]:
            entries = self._shards[shard].items()
            for key, rank in [(key, rank) for key, entry in entries for rank in entry.sizes if (key, rank) not in seen]:
                self.drop(key, rank)

    def set_used(self, key: str, used_ns: int) -> None:
        """An object was used then, even if that is earlier than what is known."""
        if (entry := self.get(key)) is not None:
            entry.used_ns = used_ns
            if used_ns < entry.queued_ns:
                self._push(key, entry)

    def pop_oldest(self) -> str | None:
        """The object that was not used for longest, each of them once; None if there is none left."""
        while self._queue:
            queued_ns, key = heapq.heappop(self._queue)
            entry = self.get(key)
            if entry is None or entry.queued_ns != queued_ns:
                continue
            if entry.used_ns <= queued_ns:
                return key
            self._push(key, entry)
        return None

    def put_back(self, key: str) -> None:
        """An object that `pop_oldest` returned has its turn again."""
        if (entry := self.get(key)) is not None:
            self._push(key, entry)

    def _push(self, key: str, entry: Entry) -> None:
        entry.queued_ns = entry.used_ns
        heapq.heappush(self._queue, (entry.queued_ns, key))
        if len(self._queue) > 2 * self.objects + 1024:
            # Most of it is of objects that others removed.
            self._queue = [
                (queued_ns, key)
                for queued_ns, key in self._queue
                if (known := self.get(key)) is not None and known.queued_ns == queued_ns
            ]
            heapq.heapify(self._queue)
