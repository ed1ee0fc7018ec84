"""Reference counts of a block pool that a test keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class BlockHolds:
    """What a coordinator holds of the engine's blocks."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def hold(self, block_ids: Sequence[int]) -> None:
        self.counts.update(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        self.counts.subtract(block_ids)
        assert min(self.counts.values()) >= 0, "released more often than held"

    @property
    def held(self) -> set[int]:
        return set(+self.counts)
