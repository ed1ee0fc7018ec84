"""A tier in this process's memory, which keeps account of what it was asked and what it is owed."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from layerstream.errors import ConfigError, TierError
from layerstream.jobs import TierObject
from layerstream.tiers.base import Batch, Found, IndexSite, StoreSite, Tier, TierIndex, TierStore, Usage
from layerstream.tiers.objects import Bytes
from layerstream.tiers.registry import Admission, TierSpec


class MemoryTier(Tier):
    """Keeps up to `capacity_bytes`, the longest unused going first, and gives out a ticket for each lookup that finds
    something. One object is one shelf, shared by all that open it."""

    kind: ClassVar[str] = "memory"
    medium: ClassVar[str] = "MEMORY"

    def __init__(self, *, capacity_bytes: int | None = None, tails: bool = True) -> None:
        self.tails = tails  # type: ignore[misc] # a test's choice, where a real tier has one answer
        self.capacity_bytes = capacity_bytes
        self.lock = threading.Lock()
        self.kept: dict[bytes, dict[int, Bytes]] = {}
        """Key -> rank -> bytes, the longest unused key first."""
        self.reserved: dict[bytes, int] = {}
        """Key -> bytes that are promised room."""
        self.tickets: set[str] = set()
        self.overpaid = 0
        """How often something was handed back that was not owed."""
        self.calls: Counter[str] = Counter()
        self.closed: Counter[str] = Counter()
        self.alive = True
        self._numbers = itertools.count(1)

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        if unknown := sorted(set(options) - {"capacity_bytes", "tails"}):
            raise ConfigError(f"option {unknown[0]!r} is unknown. Allowed: capacity_bytes, tails")
        return cls(**options)

    def open_index(self, site: IndexSite) -> MemoryIndex:
        return MemoryIndex(self, site)

    def open_store(self, site: StoreSite) -> MemoryStore:
        return MemoryStore(self, site)

    def spec(self, *, name: str = "memory", write: bool = True, admission: Admission = "all") -> TierSpec:
        return TierSpec(tier=self, name=name, write=write, admission=admission)

    @property
    def used_bytes(self) -> int:
        return sum(data.nbytes for ranks in self.kept.values() for data in ranks.values())

    @property
    def owed(self) -> int:
        """Tickets and reservations that were given out and not handed back."""
        return len(self.tickets) + len(self.reserved)

    def ticket(self) -> str:
        ticket = f"ticket-{next(self._numbers)}"
        self.tickets.add(ticket)
        return ticket

    def ask(self, what: str) -> None:
        self.calls[what] += 1
        if not self.alive:
            raise TierError(f"the tier is dead and cannot {what}")


class MemoryIndex(TierIndex):
    def __init__(self, tier: MemoryTier, site: IndexSite) -> None:
        self._tier, self._site = tier, site

    def find(self, chain: Sequence[TierObject], tails: Sequence[TierObject] = ()) -> Found:
        self._tier.ask("find")
        with self._tier.lock:
            present = tuple(self._is_there(each) for each in (*chain, *tails))
            for each in reversed((*chain, *tails)):
                if each.key in self._tier.kept:
                    self._tier.kept[each.key] = self._tier.kept.pop(each.key)
            return Found(present=present, ticket=self._tier.ticket() if any(present) else "")

    def release(self, ticket: str) -> None:
        self._tier.ask("release")
        with self._tier.lock:
            self._tier.overpaid += ticket not in self._tier.tickets
            self._tier.tickets.discard(ticket)

    def reserve(self, objects: Sequence[TierObject]) -> tuple[bool, ...]:
        self._tier.ask("reserve")
        with self._tier.lock:
            return tuple(self._make_room(each) for each in objects)

    def settle(self, objects: Sequence[TierObject], *, written: bool) -> None:
        self._tier.ask("settle")
        with self._tier.lock:
            for each in objects:
                self._tier.overpaid += self._tier.reserved.pop(each.key, None) is None

    def remove(self, objects: Sequence[TierObject]) -> None:
        self._tier.ask("remove")
        with self._tier.lock:
            for each in objects:
                self._tier.kept.pop(each.key, None)

    def probe(self) -> None:
        self._tier.ask("probe")

    def usage(self) -> Usage:
        self._tier.ask("usage")
        with self._tier.lock:
            return Usage(
                used_bytes=self._tier.used_bytes,
                capacity_bytes=self._tier.capacity_bytes,
                objects=len(self._tier.kept),
            )

    def close(self) -> None:
        self._tier.closed["index"] += 1

    def _is_there(self, each: TierObject) -> bool:
        return len(self._tier.kept.get(each.key, ())) == self._site.ranks

    def _make_room(self, each: TierObject) -> bool:
        tier, size = self._tier, self._site.nbytes(each.blocks)
        if self._is_there(each) or each.key in tier.reserved:
            return False
        if tier.capacity_bytes is not None:
            room = tier.capacity_bytes - sum(tier.reserved.values()) - size
            if room < 0:
                return False
            for key in list(tier.kept):
                if tier.used_bytes <= room:
                    break
                del tier.kept[key]
        tier.reserved[each.key] = size
        return True


class MemoryStore(TierStore):
    def __init__(self, tier: MemoryTier, site: StoreSite) -> None:
        self._tier, self._rank, self._closed = tier, site.format.rank, False

    def read(self, batch: Batch) -> int:
        self._tier.ask("read")
        for count, item in enumerate(batch.items):
            if self._closed:
                raise TierError("the store is closed")
            with self._tier.lock:
                data = self._tier.kept.get(item.object.key, {}).get(self._rank)
            if data is None or data.nbytes != item.nbytes:
                return count
            done = 0
            for piece in item.buffers:
                piece[:] = data[done : done + piece.nbytes]
                done += piece.nbytes
        return len(batch.items)

    def write(self, batch: Batch) -> int:
        self._tier.ask("write")
        for item in batch.items:
            with self._tier.lock:
                ranks = self._tier.kept.get(item.object.key, {})
            if self._rank in ranks:
                continue
            data = np.concatenate(item.buffers)
            with self._tier.lock:
                self._tier.kept.setdefault(item.object.key, {}).setdefault(self._rank, data)
        return len(batch.items)

    def remove(self, batch: Batch) -> None:
        self._tier.ask("remove")
        with self._tier.lock:
            for item in batch.items:
                ranks = self._tier.kept.get(item.object.key, {})
                ranks.pop(self._rank, None)
                if not ranks:
                    self._tier.kept.pop(item.object.key, None)

    def close(self) -> None:
        self._closed = True
        self._tier.closed["store"] += 1
