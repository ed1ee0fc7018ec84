"""Believes what an index tells its listener, and that nothing is told twice."""

from __future__ import annotations

from collections.abc import Sequence

from layerstream.index import PrefixIndex


class Believer:
    """Knows which blocks are indexed, and which of them are hits, from what it was told alone."""

    def __init__(self) -> None:
        self.indexed: set[bytes] = set()
        self.hits: set[bytes] = set()

    def reserved(self, hashes: Sequence[bytes]) -> None:
        assert not self.indexed & set(hashes), "reserved twice"
        self.indexed |= set(hashes)

    def published(self, hashes: Sequence[bytes]) -> None:
        assert set(hashes) <= self.indexed - self.hits, "published twice, or without being reserved"
        self.hits |= set(hashes)

    def dropped(self, hashes: Sequence[bytes], published: int) -> None:
        assert set(hashes[:published]) <= self.hits and not self.hits & set(hashes[published:])
        assert set(hashes) <= self.indexed
        self.indexed -= set(hashes)
        self.hits -= set(hashes)

    def check(self, index: PrefixIndex) -> None:
        """
        Raises:
            AssertionError: the index holds something else, or counts pins wrong.
        """
        chunks = index._heads.values()
        assert self.indexed == {each for chunk in chunks for each in chunk.hashes}
        assert self.hits == {each for chunk in chunks for each in chunk.hashes[: chunk.ready]}
        # Chunks that were cut out of the index may be pinned too.
        assert index.pinned >= sum(chunk.pins > 0 for chunk in chunks)
