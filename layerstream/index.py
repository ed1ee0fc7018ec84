"""What the host pool holds: a forest of chunks, each up to k consecutive blocks of one prefix.

Keys are the engine's chained block hashes, so an equal hash means an equal prefix up to and including that block. Only
a chunk's first hash is looked up; the rest is compared inside the chunk. Block i of a chunk lives at pool page
`slot * k + i`.

Two rules shape everything. A block is indexed only while every block before it is, and published only after every block
before it: what the index knows of a prompt is always a head of it, and only chunks that nothing hangs behind are
evicted. And a slot is handed on only when no transfer can touch it any more, whatever has become of its chunk: until
then it counts for the tenant that it was taken for, where tenants have shares (`tenants.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from layerstream.chunks import Chunk, Lookup, Span
from layerstream.ghosts import Ghosts
from layerstream.metrics import HOST, add_count
from layerstream.policies import LRU, EvictionPolicy
from layerstream.slots import SlotAllocator
from layerstream.tenants import Tenants

__all__ = ["Chunk", "IndexListener", "PrefixIndex", "Span", "joined_runs"]


class IndexListener(Protocol):
    """Is told what the index comes to hold, and what it loses, block by block."""

    def reserved(self, hashes: Sequence[bytes]) -> None:
        """These blocks are indexed, and being written."""

    def published(self, hashes: Sequence[bytes]) -> None:
        """These blocks, consecutive ones of a prefix, are hits."""

    def dropped(self, hashes: Sequence[bytes], published: int) -> None:
        """These blocks are not indexed any more; the first `published` of them were hits."""


class PrefixIndex:
    """The one owner of which block is where, who uses it, and what goes when room is needed.

    Args:
        slots: slots of the host pool that may be used, each of `chunk_blocks` pages; `grow` adds more.
        chunk_blocks: most blocks in one chunk.
        policy: chooses what to evict; LRU by default.
        tenant_share: part of the slots, above 0 and at most 1, that chunks of one tenant may occupy; None: all of them.

    Raises:
        ValueError: `tenant_share` is out of range.
    """

    def __init__(
        self,
        *,
        slots: int,
        chunk_blocks: int,
        policy: EvictionPolicy[Chunk] | None = None,
        tenant_share: float | None = None,
    ) -> None:
        self.chunk_blocks = chunk_blocks
        self.evicted = 0
        """Chunks evicted so far."""
        self.pinned = 0
        """Chunks that loads read at this moment, or that somebody keeps for a load."""
        self.returned: dict[str, int] = {}
        """One of `layerstream.ghosts.SIZES` -> evicted chunks so far that came back and that such a pool would have."""
        self.listener: IndexListener | None = None
        self._ghosts = Ghosts()
        self._heads: dict[bytes, Chunk] = {}
        self._lookup = Lookup(self._heads, chunk_blocks)
        self._slots = SlotAllocator(slots)
        self._policy: EvictionPolicy[Chunk] = LRU() if policy is None else policy
        self._tenants: Tenants[Chunk] | None = None
        if tenant_share is not None:
            self._policy = self._tenants = Tenants(self._policy, tenant_share)
        self._policy.resize(slots)

    @property
    def slots(self) -> int:
        """Slots of the host pool that may be used."""
        return self._slots.slots

    @property
    def chunks(self) -> int:
        """Chunks in the index."""
        return len(self._heads)

    @property
    def used(self) -> int:
        """Slots that hold chunks, or wait for a transfer to end."""
        return self._slots.slots - self._slots.free

    @property
    def tenant_slots(self) -> int:
        """Slots that chunks of one tenant may occupy at most."""
        return self.slots if self._tenants is None else self._tenants.limit(self.slots)

    def grow(self, slots: int) -> None:
        """The host pool has `slots` slots, no fewer than before: those that are new are free, and shares grow too."""
        self._slots.grow(slots)
        self._policy.resize(slots)

    def match(self, hashes: Sequence[bytes], stop: int) -> int:
        """Number of leading blocks that are published, at most `stop`. Changes nothing, not even recency."""
        return self._lookup.reach(hashes, 0, min(stop, len(hashes)), published=True)

    def known(self, hashes: Sequence[bytes], start: int, stop: int) -> int:
        """The first block from `start` on that is not indexed, at most `stop`. Blocks being written are indexed."""
        return self._lookup.reach(hashes, start, stop, published=False)

    def locate(self, hashes: Sequence[bytes], start: int, stop: int) -> list[Span] | None:
        """Where the published blocks `start .. stop - 1` are, in order; None if any of them is not published."""
        spans = list(self._lookup.spans(hashes, start, stop))
        whole = sum(hi - lo for _, lo, hi in spans) == stop - start
        return spans if whole and all(hi <= chunk.ready for chunk, _, hi in spans) else None

    def runs(self, spans: Iterable[Span]) -> tuple[tuple[int, int], ...]:
        """(first pool page, count) of the spans' pages in order, neighbours joined."""
        return joined_runs((chunk.slot * self.chunk_blocks + lo, hi - lo) for chunk, lo, hi in spans)

    def touch(self, hashes: Sequence[bytes], stop: int) -> None:
        """A prompt was asked for, and its blocks `0 .. stop - 1` are used, as far as they are published.

        It is enough to stamp the last chunk: those before it cannot go earlier, and go right after it if need be.
        """
        self._policy.see(hashes)
        matched = self.match(hashes, stop)
        if matched and (found := self._lookup.owner(hashes, matched - 1)) is not None:
            self._policy.touch(found[0])

    def pin(self, spans: Iterable[Span]) -> None:
        """A load reads these blocks: their chunks stay until as many `unpin` have come."""
        for chunk, _, _ in spans:
            self.pinned += not chunk.pins
            chunk.pins += 1
            self._settle(chunk)

    def unpin(self, spans: Iterable[Span]) -> None:
        """A load that pinned these blocks has ended."""
        for chunk, _, _ in spans:
            assert chunk.pins > 0, f"slot {chunk.slot} was unpinned more often than pinned"
            chunk.pins -= 1
            self.pinned -= not chunk.pins
            self._settle(chunk)

    def take_sources(self, spans: Iterable[Span]) -> dict[str, int]:
        """Where these published blocks, which a load is about to read, came from -> how many of them.

        A block that was brought from a tier counts for it at its first load, and for the host pool at every later one.
        """
        sources: dict[str, int] = {}
        for chunk, lo, hi in spans:
            left = hi - lo
            if (brought := chunk.brought) is not None:
                for block in brought.keys() & range(lo, hi):
                    add_count(sources, brought.pop(block))
                    left -= 1
                chunk.brought = brought or None
            if left:
                add_count(sources, HOST, left)
        return sources

    def reserve(
        self, hashes: Sequence[bytes], start: int, stop: int, *, tenant: str | None = None
    ) -> list[Span] | None:
        """Make room for blocks `start .. stop - 1`, none of which is indexed, and index them as being written.

        The chunk that ends before `start` grows in place if it can, whosever it is; the rest goes to chunks of its own,
        which are the tenant's. Each span must end in exactly one `publish` or `retire`.

        A tenant that would exceed its share makes room among its own chunks first. Within its share it gets whatever
        nobody uses at this moment, in the policy's order.

        Args:
            hashes: the prompt's block hashes.
            start: first block to reserve.
            stop: the block after the last one.
            tenant: whom new chunks count for; None, the requests without a cache salt, are a tenant too.

        Returns:
            The spans in order. None, and nothing changed, if the pool or the tenant's share has no room that can be
            evicted, or if block `start - 1` is not indexed: what follows it could never be found.
        """
        before = None
        if start and (before := self._lookup.owner(hashes, start - 1)) is None:
            return None
        parent, at = (None, 0) if before is None else (before[0], before[1] + 1)
        grown = 0
        if parent is not None and at == len(parent.hashes) and not parent.closed:
            grown = min(self.chunk_blocks - at, stop - start)
        slots = self._room(-(-(stop - start - grown) // self.chunk_blocks), tenant, keep=parent)
        if slots is None:
            return None
        spans: list[Span] = []
        if parent is not None and grown:
            parent.hashes.extend(hashes[start : start + grown])
            if self.listener is not None:
                self.listener.reserved(hashes[start : start + grown])
            spans.append(Span(parent, at, at + grown))
            at += grown
        firsts = range(start + grown, stop, self.chunk_blocks)
        for slot, first in zip(slots, firsts, strict=True):
            chunk = self._insert(slot, list(hashes[first : min(first + self.chunk_blocks, stop)]), parent, at, tenant)
            parent, at = chunk, len(chunk.hashes)
            spans.append(Span(chunk, 0, at))
        for chunk, _, _ in spans:
            chunk.writers += 1
            self._settle(chunk)
        if spans:
            self._policy.fill(spans[-1].chunk)
        return spans

    def publish(self, spans: Iterable[Span], *, source: str | None = None) -> int:
        """Every rank's bytes of these reserved spans are in place. They are hits once those before them are too.

        Args:
            spans: as `reserve` gave them.
            source: name of the tier that they came from; None if the engine computed them.

        Returns:
            Blocks that count; less than all if some were abandoned or forgotten meanwhile.
        """
        blocks = 0
        for chunk, lo, hi in spans:
            if hi <= len(chunk.hashes):
                blocks += hi - lo
                chunk.landed = {**(chunk.landed or {}), lo: hi}
                if source is not None:
                    chunk.brought = {**(chunk.brought or {}), **dict.fromkeys(range(lo, hi), source)}
                self._advance(chunk)
            self._end_write(chunk)
        return blocks

    def abandon(self, spans: Iterable[Span]) -> None:
        """These reserved spans are never to be published: they, and all that hangs behind them, leave the index.

        Their writers may still write: `retire`, or `publish`, which then publishes nothing, says when they stopped.
        """
        for chunk, lo, _ in spans:
            if chunk.live:
                self._cut(chunk, lo)

    def retire(self, spans: Iterable[Span]) -> None:
        """The writers of these abandoned spans have stopped."""
        for chunk, _, _ in spans:
            self._end_write(chunk)

    def clear(self) -> None:
        """Forget every block. What is being written is never published; slots in use stay until their users end."""
        idle: list[Chunk] = []
        self._ghosts.clear()
        for chunk in self._heads.values():
            if self.listener is not None:
                self.listener.dropped(chunk.hashes, chunk.ready)
            self._policy.discard(chunk)
            chunk.live = False
            chunk.hashes = []
            chunk.parent = None
            chunk.children = []
            if not (chunk.pins or chunk.writers):
                idle.append(chunk)
        self._heads.clear()
        self._slots.give(chunk.slot for chunk in idle)
        if self._tenants is not None:
            for chunk in idle:
                self._tenants.give(chunk.tenant)

    def _insert(self, slot: int, hashes: list[bytes], parent: Chunk | None, at: int, tenant: str | None) -> Chunk:
        assert hashes[0] not in self._heads, "a block that is indexed was reserved again"
        chunk = Chunk(slot, hashes, parent, at, tenant)
        self._heads[hashes[0]] = chunk
        if self.listener is not None:
            self.listener.reserved(hashes)
        if (size := self._ghosts.returned(hashes[0], self.slots)) is not None:
            add_count(self.returned, size)
        self._policy.enter(chunk, None if parent is None or parent.children else parent)
        if parent is not None:
            chunk.place = len(parent.children)
            parent.children.append(chunk)
            self._settle(parent)
        return chunk

    def _room(self, count: int, tenant: str | None, *, keep: Chunk | None) -> list[int] | None:
        """Take `count` slots for a tenant, evicting what it takes but never `keep`; None, and nothing changed, if that
        is not enough."""
        own = 0
        if self._tenants is not None:
            limit = self.tenant_slots
            if count > limit:
                return None
            own = max(0, self._tenants.held(tenant) + count - limit)
        if keep is not None:
            keep.pins += 1
            self._settle(keep)
        victims = self._victims(max(own, count - self._slots.free), own, tenant)
        for chunk in victims or ():
            self._ghosts.evicted(chunk.hashes[0], self.slots)
            self._drop(chunk)
            self.evicted += 1
        if keep is not None:
            keep.pins -= 1
            self._settle(keep)
        if victims is None:
            return None
        if self._tenants is not None:
            self._tenants.take(tenant, count)
        return self._slots.take(count)

    def _victims(self, count: int, own: int, tenant: str | None) -> list[Chunk] | None:
        """Take `count` chunks out of the policy, each before its parent, the first `own` of them the tenant's. None if
        there are fewer: the policy is as it was."""
        victims: list[Chunk] = []
        left: dict[Chunk, int] = {}
        while len(victims) < count:
            if self._tenants is not None and len(victims) < own:
                chunk = self._tenants.pop_of(tenant)
            else:
                chunk = self._policy.pop()
            if chunk is None:
                for victim in victims:
                    self._settle(victim)
                    if victim.parent is not None:
                        self._settle(victim.parent)
                return None
            victims.append(chunk)
            parent = chunk.parent
            if parent is not None:
                left[parent] = left.get(parent, len(parent.children)) - 1
                if not left[parent] and not parent.pins and not parent.writers:
                    self._policy.add(parent)
        return victims

    def _cut(self, chunk: Chunk, length: int) -> None:
        """Forget a chunk's blocks from `length` on, and every chunk that hangs behind one of them."""
        behind = [child for child in chunk.children if child.at > length]
        for child in behind:
            behind.extend(child.children)
        for child in reversed(behind):
            self._drop(child)
        if length == 0:
            self._drop(chunk)
            return
        if self.listener is not None:
            self.listener.dropped(chunk.hashes[length:], max(0, chunk.ready - length))
        del chunk.hashes[length:]
        chunk.closed = True

    def _drop(self, chunk: Chunk) -> None:
        """Take a chunk without children out of the index; its slot is free once nobody uses it."""
        del self._heads[chunk.hashes[0]]
        if self.listener is not None:
            self.listener.dropped(chunk.hashes, chunk.ready)
        parent, chunk.parent = chunk.parent, None
        if parent is not None:
            last = parent.children.pop()
            if last is not chunk:
                parent.children[chunk.place] = last
                last.place = chunk.place
            self._settle(parent)
        chunk.live = False
        chunk.hashes = []
        self._policy.discard(chunk)
        self._settle(chunk)

    def _advance(self, first: Chunk) -> None:
        """Publish what has landed in a chunk, then in those behind it, as far as everything before it is published."""
        queue = [first]
        for chunk in queue:
            if not chunk.landed or (chunk.parent is not None and chunk.parent.ready < chunk.at):
                continue
            before = chunk.ready
            while (ready := chunk.landed.pop(chunk.ready, None)) is not None:
                chunk.ready = ready
            if self.listener is not None and chunk.ready > before:
                self.listener.published(chunk.hashes[before : chunk.ready])
            chunk.landed = chunk.landed or None
            queue.extend(chunk.children)

    def _end_write(self, chunk: Chunk) -> None:
        assert chunk.writers > 0, f"slot {chunk.slot} had more writes ended than begun"
        chunk.writers -= 1
        self._settle(chunk)

    def _settle(self, chunk: Chunk) -> None:
        """After a change: hand on a dead chunk's slot, or tell the policy whether a live chunk may go."""
        busy = chunk.pins or chunk.writers
        if not chunk.live:
            if not busy:
                self._slots.give((chunk.slot,))
                if self._tenants is not None:
                    self._tenants.give(chunk.tenant)
        elif busy or chunk.children:
            self._policy.discard(chunk)
        else:
            self._policy.add(chunk)


def joined_runs(runs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """(first, count) of runs in their order, neighbours joined."""
    joined: list[tuple[int, int]] = []
    for page, pages in runs:
        first, count = joined[-1] if joined else (page, 0)
        if joined and first + count == page:
            joined[-1] = (first, count + pages)
        else:
            joined.append((page, pages))
    return tuple(joined)
