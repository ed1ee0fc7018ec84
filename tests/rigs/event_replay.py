"""What a router that hears all events believes: which blocks lie in which medium."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from layerstream.coordinator import Coordinator


class Replay:
    """Believes what events say, and that none of them is said in vain."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, str | None], set[Any]] = {}
        """(medium, tier) -> hashes of the blocks there."""

    def hear(self, events: Iterable[Any]) -> None:
        """
        Raises:
            AssertionError: a block is stored where it is, or removed from where it is not.
        """
        for event in events:
            there = self.blocks.setdefault((event.medium, event.ownership), set())
            said = set(event.block_hashes)
            assert len(said) == len(event.block_hashes)
            if isinstance(event, BlockStored):
                assert not there & said, "stored twice"
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                there |= said
            else:
                assert isinstance(event, BlockRemoved)
                assert said <= there, "removed from where it is not"
                there -= said

    def at(self, medium: str, tier: str | None = None) -> set[Any]:
        """Hashes of the blocks there."""
        return self.blocks.get((medium, tier), set())


def pool_content(coordinator: Coordinator) -> set[Any]:
    """Hashes of all blocks that are hits, as events of requests without adapters say them."""
    index = coordinator._index
    assert index is not None
    hits = {each for chunk in index._heads.values() for each in chunk.hashes[: chunk.ready]}
    return {maybe_convert_block_hash(BlockHash(each)) for each in hits}
