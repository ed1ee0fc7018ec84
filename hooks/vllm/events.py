"""vLLM's cache events for what is beneath its own cache: routers that know where a prefix lies send requests there.

An event says of blocks what vLLM's own events say of them. The scheduler half's index knows blocks by their hashes
alone, so a block is described while a request that has it is alive, and the description is kept as long as the block
is in the index.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class _Block(NamedTuple):
    """What an event says of a block."""

    said: Any
    """vLLM's hash: where a request has a LoRA adapter, ours is another one."""
    parent: Any
    """vLLM's hash of the block before it; None for a prompt's first."""
    tokens: array[int]
    lora: tuple[int, str] | None
    extra_keys: tuple[Any, ...] | None


class _Seen:
    """How much of a request's blocks is described."""

    __slots__ = ("blocks", "hashes", "image")

    def __init__(self, hashes: Sequence[bytes]) -> None:
        self.hashes = hashes
        self.blocks = 0
        self.image = 0
        """The request's first image, or other input, that may lie in the next block."""


class KVEvents:
    """Listens to index and tiers, and makes events of what they tell.

    Args:
        cache: vLLM's KV cache.
        groups: the KV cache groups that are streamed; with one, events name it, and with several none, since a copy
            holds the KV of all of them.
        block_tokens: tokens of a block.
        media: name of a tier -> where its bytes are.
    """

    def __init__(
        self, cache: KVCacheConfig, groups: Sequence[int], *, block_tokens: int, media: Mapping[str, str]
    ) -> None:
        self._group: int | None = None
        self._kind: str | None = None
        self._window: int | None = None
        if len(groups) == 1:
            self._group, spec = groups[0], cache.kv_cache_groups[groups[0]].kv_cache_spec
            self._kind, self._window = get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)
        self._block_tokens = block_tokens
        self._media = dict(media)
        self._events: list[KVCacheEvent] = []
        self._blocks: dict[bytes, _Block] = {}
        self._holders: Counter[bytes] = Counter()
        """Block -> requests that have it, and one more if it is in the index. While there are any it is described."""
        self._requests: dict[str, _Seen] = {}
        self._objects: dict[tuple[str, bytes], tuple[Any, ...]] = {}
        """Tier and key of an object that it has -> vLLM's hashes of its blocks."""
        self._copies: Counter[tuple[str, Any]] = Counter()
        """Tier and vLLM's hash of a block -> objects of the tier with this block."""
        self._tiers_left = False

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call, in their order."""
        events, self._events = self._events, []
        return events

    def seen(self, request: Request, hashes: Sequence[bytes]) -> None:
        """The index may be told next of any of these blocks of a request. The list may only grow."""
        seen = self._requests.get(request.request_id)
        if seen is None or seen.hashes is not hashes:
            self.forget(request.request_id)
            seen = self._requests[request.request_id] = _Seen(hashes)
        if seen.blocks == len(hashes):
            return
        theirs, size, adapter = request.block_hashes, self._block_tokens, request.lora_request
        lora = None if adapter is None else (adapter.adapter_id, adapter.name)
        for block in range(seen.blocks, len(hashes)):
            start = block * size
            keys, seen.image = generate_block_hash_extra_keys(request, start, start + size, seen.image)
            self._holders[hashes[block]] += 1
            if hashes[block] not in self._blocks:
                self._blocks[hashes[block]] = _Block(
                    said=maybe_convert_block_hash(theirs[block]),
                    parent=maybe_convert_block_hash(theirs[block - 1]) if block else None,
                    tokens=array("q", request.all_token_ids[start : start + size]),
                    lora=lora,
                    extra_keys=keys,
                )
        seen.blocks = len(hashes)

    def forget(self, request_id: str) -> None:
        """A request, known or not, has ended."""
        seen = self._requests.pop(request_id, None)
        if seen is not None:
            self._release(seen.hashes[: seen.blocks])

    # What the index tells

    def reserved(self, hashes: Sequence[bytes]) -> None:
        for each in hashes:
            self._holders[each] += 1

    def published(self, hashes: Sequence[bytes]) -> None:
        self._stored([self._blocks[each] for each in hashes], MEDIUM_CPU)

    def dropped(self, hashes: Sequence[bytes], published: int) -> None:
        self._removed([self._blocks[each].said for each in hashes[:published]], MEDIUM_CPU)
        self._release(hashes)

    # What tiers tell

    def stored(self, tier: str, key: bytes, hashes: Sequence[bytes]) -> None:
        blocks = [self._blocks[each] for each in hashes if each in self._blocks]
        if self._tiers_left or (tier, key) in self._objects or len(blocks) < len(hashes):
            # A tier may still get what the index has forgotten meanwhile: nobody can describe that.
            return
        self._objects[tier, key] = tuple(block.said for block in blocks)
        fresh: list[_Block] = []
        for block in blocks:
            self._copies[tier, block.said] += 1
            if self._copies[tier, block.said] == 1:
                fresh.append(block)
        self._stored(fresh, self._media[tier], tier)

    def removed(self, tier: str, key: bytes) -> None:
        lost: list[Any] = []
        for said in self._objects.pop((tier, key), ()):
            self._copies[tier, said] -= 1
            if not self._copies[tier, said]:
                del self._copies[tier, said]
                lost.append(said)
        self._removed(lost, self._media[tier], tier)

    def leave_tiers(self) -> None:
        """Tiers are not used any more, whatever they hold."""
        self._tiers_left = True
        for tier, key in [*self._objects]:
            self.removed(tier, key)

    def _release(self, hashes: Iterable[bytes]) -> None:
        for each in hashes:
            self._holders[each] -= 1
            if not self._holders[each]:
                del self._holders[each], self._blocks[each]

    def _stored(self, blocks: Sequence[_Block], medium: str, tier: str | None = None) -> None:
        """Blocks of one prefix, in its order, of which some in the middle may be left out."""
        run: list[_Block] = []
        for block in blocks:
            if run and block.parent != run[-1].said:
                self._store_run(run, medium, tier)
                run = []
            run.append(block)
        if run:
            self._store_run(run, medium, tier)

    def _store_run(self, run: Sequence[_Block], medium: str, tier: str | None) -> None:
        lora_id, lora_name = run[0].lora or (None, None)
        self._events.append(
            BlockStored(
                block_hashes=[block.said for block in run],
                parent_block_hash=run[0].parent,
                token_ids=[token for block in run for token in block.tokens],
                block_size=self._block_tokens,
                lora_id=lora_id,
                medium=medium,
                lora_name=lora_name,
                extra_keys=to_event_extra_keys([block.extra_keys for block in run]),
                group_idx=self._group,
                kv_cache_spec_kind=self._kind,
                kv_cache_spec_sliding_window=self._window,
                ownership=tier,
            )
        )

    def _removed(self, hashes: list[Any], medium: str, tier: str | None = None) -> None:
        if hashes:
            self._events.append(BlockRemoved(block_hashes=hashes, medium=medium, group_idx=self._group, ownership=tier))
