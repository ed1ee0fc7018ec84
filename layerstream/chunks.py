"""Chunks of the host pool, and finding the one that holds a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple


class Chunk:
    """One slot and the blocks in it. Compared by identity; only the index changes it."""

    __slots__ = (
        "at", "brought", "children", "closed", "hashes", "landed", "live", "parent", "pins", "place", "probation",
        "ready", "slot", "tenant", "used", "writers",
    )  # fmt: skip

    def __init__(self, slot: int, hashes: list[bytes], parent: Chunk | None, at: int, tenant: str | None) -> None:
        self.slot = slot
        self.hashes = hashes
        """Hashes of its blocks, those still being written included."""
        self.ready = 0
        """Number of leading blocks that are published."""
        self.landed: dict[int, int] | None = None
        """start -> stop of blocks that are complete, but behind blocks that are not."""
        self.brought: dict[int, str] | None = None
        """Position of a block that no load has read since it was brought from a tier -> name of the tier."""
        self.pins = 0
        """Loads that read the slot."""
        self.writers = 0
        """Saves that may write to the slot."""
        self.live = True
        """Whether it is in the index. If not, it only keeps its slot until pins and writers are gone."""
        self.closed = False
        """Whether blocks were cut off its end: a late save may still write there, so it must not grow again."""
        self.parent = parent
        self.at = at
        """Number of the parent's blocks that come before this chunk."""
        self.tenant = tenant
        """Whose reservation made it; None: of requests without a cache salt."""
        self.children: list[Chunk] = []
        self.place = 0
        """Position among the parent's children."""
        self.used = 0
        self.probation = False


class Span(NamedTuple):
    """Blocks `lo .. hi - 1` of a chunk."""

    chunk: Chunk
    lo: int
    hi: int


class Lookup:
    """Finds the chunk that holds a block.

    Args:
        heads: hash of a chunk's first block -> chunk, as the index keeps it; other blocks are compared inside it.
        chunk_blocks: most blocks in one chunk.
    """

    def __init__(self, heads: Mapping[bytes, Chunk], chunk_blocks: int) -> None:
        self._heads = heads
        self._chunk_blocks = chunk_blocks

    def owner(self, hashes: Sequence[bytes], block: int) -> tuple[Chunk, int] | None:
        """The chunk that holds a block, and the block's position in it.

        A block is in one chunk at most, and the head of that chunk is the nearest head before it.
        """
        for first in range(block, max(block - self._chunk_blocks, -1), -1):
            chunk = self._heads.get(hashes[first])
            if chunk is not None:
                position = block - first
                inside = position < len(chunk.hashes) and chunk.hashes[position] == hashes[block]
                return (chunk, position) if inside else None
        return None

    def reach(self, hashes: Sequence[bytes], low: int, high: int, *, published: bool) -> int:
        """The first block of `low .. high - 1` that is not indexed, or not published; `high` if there is none.

        Both sets hold a head of every prompt and nothing else, so this is a binary search: with each probe a walk back
        to the head of a chunk, it stays far below a walk over the chunks of a long prompt, most of which are not in
        any CPU cache.
        """
        while low < high:
            # The first probe asks for the first block: most prompts that miss share nothing at all.
            middle = (low + high) // 2 if low else 0
            found = self.owner(hashes, middle)
            if found is None:
                high = middle
                continue
            chunk, position = found
            count = (chunk.ready if published else len(chunk.hashes)) - position
            if count <= 0:
                high = middle
            else:
                low = middle + _common(chunk.hashes, position, min(count, high - middle), hashes, middle)
        return low

    def spans(self, hashes: Sequence[bytes], start: int, stop: int) -> Iterator[Span]:
        """Indexed blocks from `start` on, published or not, up to `stop` or the first that is not indexed."""
        at = start
        found = self.owner(hashes, at) if at < stop else None
        while found is not None:
            chunk, lo = found
            count = _common(chunk.hashes, lo, min(len(chunk.hashes) - lo, stop - at), hashes, at)
            yield Span(chunk, lo, lo + count)
            at += count
            after = self._heads.get(hashes[at]) if at < stop else None
            found = None if after is None else (after, 0)


def _common(mine: Sequence[bytes], lo: int, count: int, theirs: Sequence[bytes], at: int) -> int:
    """How many of `mine[lo:]` equal `theirs[at:]`, at most `count`. Chained: the last one equal means all equal."""
    if count > 0 and mine[lo + count - 1] == theirs[at + count - 1]:
        return count
    same = 0
    while same < count and mine[lo + same] == theirs[at + same]:
        same += 1
    return same
