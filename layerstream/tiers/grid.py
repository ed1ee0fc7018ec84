"""How a prefix is cut into the objects that tiers keep.

Objects start at multiples of a chunk's blocks, counted from the start of the prefix, so that an engine which knows a
prefix knows the names of all its objects without asking anybody. Chunks of the host pool may start anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerstream.identity import object_key
from layerstream.jobs import TierObject


class ObjectGrid:
    """Names of objects of one engine.

    Args:
        namespace: `Namespace.digest()` of the engine.
        chunk_blocks: blocks of a whole object.
        block_hashes: what a block counts for in names, so that engines with blocks of other sizes name the same tokens
            alike.
    """

    def __init__(self, *, namespace: bytes, chunk_blocks: int, block_hashes: int = 1) -> None:
        self.namespace = namespace
        self.chunk_blocks = chunk_blocks
        self._block_hashes = block_hashes

    def whole(self, hashes: Sequence[bytes], blocks: int) -> list[TierObject]:
        """The whole objects in the first `blocks` blocks of a prefix, in order.

        Args:
            hashes: the engine's chained hashes of the prefix's blocks.
            blocks: at most `len(hashes)`.
        """
        objects: list[TierObject] = []
        self.extend(objects, hashes, blocks)
        return objects

    def extend(self, objects: list[TierObject], hashes: Sequence[bytes], blocks: int) -> None:
        """Append to a prefix's whole objects, from its first on, those up to `blocks` blocks."""
        size = self.chunk_blocks
        parent = objects[-1].key if objects else b""
        for start in range(len(objects) * size, blocks - size + 1, size):
            objects.append(self.object(hashes, start, size, parent=parent))
            parent = objects[-1].key

    def tails(self, hashes: Sequence[bytes], start: int, *, parent: bytes) -> list[TierObject]:
        """Every object shorter than a chunk that may start at block `start`, the longest first."""
        most = min(self.chunk_blocks - 1, len(hashes) - start)
        return [self.object(hashes, start, blocks, parent=parent) for blocks in range(most, 0, -1)]

    def object(self, hashes: Sequence[bytes], start: int, blocks: int, *, parent: bytes) -> TierObject:
        """The object of blocks `start .. start + blocks - 1`; `parent` is the key of the one before it."""
        last, times = hashes[start + blocks - 1], self._block_hashes
        key = object_key(self.namespace, last, start * times, blocks * times)
        return TierObject(key=key, parent=parent, start=start, blocks=blocks)
