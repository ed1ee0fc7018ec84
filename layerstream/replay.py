"""What a host pool would have hit, had it served a trace: the index's rules without transfers.

Requests come one after the other. Each first hits the longest prefix that the pool holds, then all of its whole blocks
are in the pool, or as many as fit beside that prefix. What a real engine saves while decoding is in no trace, and
a request that returns with it counts it as new.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from layerstream.chunks import Chunk
from layerstream.index import PrefixIndex
from layerstream.policies import EvictionPolicy
from layerstream.request_trace import RequestTrace

_REPORT_EVERY = 256


class Pool(Protocol):
    """A host pool that is asked for prompts."""

    def serve(self, blocks: list[int], limit: int) -> int:
        """Blocks of the prompt that are hit, at most `limit`; then all of it is in the pool, as far as it fits."""


class Block:
    """A block in a `BlockPool`; a chunk of its own."""

    __slots__ = ("behind", "number", "parent", "probation", "used")

    def __init__(self, number: int, parent: Block | None) -> None:
        self.number = number
        self.parent = parent
        self.behind = 0
        """Blocks that hang directly behind it."""
        self.used = 0
        self.probation = False


class BlockPool:
    """What `IndexPool` does with one block in a chunk, several times as fast.

    Of a prompt that came in whole only the last block has a stamp; those before it go right after it, which takes no
    policy.

    Args:
        slots: blocks that the pool holds.
        policy: one that takes what has the oldest stamp (`used`) first, and stamps above 0.
    """

    def __init__(self, slots: int, policy: EvictionPolicy[Block]) -> None:
        self._slots = slots
        self._policy = policy
        self._held: dict[int, Block] = {}
        self._next: Block | None = None
        """The block without a stamp that nothing hangs behind, if there is one: it goes first. Not in the policy."""
        policy.resize(slots)

    def serve(self, blocks: list[int], limit: int) -> int:
        held = self._held
        self._policy.see(blocks)
        # What is held of a prompt is a head of it; most prompts that miss share nothing at all.
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high) // 2 if low else 0
            if blocks[middle] in held:
                low = middle + 1
            else:
                high = middle
        hit = min(low, limit)
        if hit:
            block = held[blocks[hit - 1]]
            self._policy.touch(block)
            if block is self._next:
                self._policy.add(block)
                self._next = None
        if low < len(blocks):
            self._save(blocks, low)
        return hit

    def _save(self, blocks: list[int], start: int) -> None:
        """Bring blocks `start ..` in, as far as there is room beside the blocks before them."""
        policy, held = self._policy, self._held
        parent = held[blocks[start - 1]] if start else None
        count, most = len(blocks) - start, self._slots - start
        while count > max(most, 1):
            count //= 2
        if parent is not None and parent is not self._next:
            policy.discard(parent)
        if count > most:
            if parent is not None and parent is not self._next and not parent.behind:
                policy.add(parent)
            return
        if parent is self._next:
            self._next = None
        self._evict(len(held) + count - self._slots, parent)
        for number in blocks[start : start + count]:
            block = Block(number, parent)
            policy.enter(block, None if parent is None or parent.behind else parent)
            if parent is not None:
                parent.behind += 1
            held[number] = parent = block
        assert parent is not None
        policy.fill(parent)
        policy.add(parent)

    def _evict(self, count: int, keep: Block | None) -> None:
        policy, held = self._policy, self._held
        while count > 0:
            block, self._next = self._next or policy.pop(), None
            assert block is not None, "a pool has room beside any one prompt that it holds"
            while True:
                del held[block.number]
                count -= 1
                parent = block.parent
                if parent is None:
                    break
                parent.behind -= 1
                if parent.behind or parent is keep:
                    break
                if parent.used:
                    policy.add(parent)
                    break
                if not count:
                    self._next = parent
                    break
                block = parent


class IndexPool:
    """The product's own index.

    Args:
        slots: chunks that the pool holds.
        chunk_blocks: most blocks in one chunk.
        policy: chooses what to evict.
    """

    def __init__(self, slots: int, chunk_blocks: int, policy: EvictionPolicy[Chunk]) -> None:
        self._index = PrefixIndex(slots=slots, chunk_blocks=chunk_blocks, policy=policy)

    def serve(self, blocks: list[int], limit: int) -> int:
        index, hashes, stop = self._index, [block.to_bytes(4, "big") for block in blocks], len(blocks)
        hit = index.match(hashes, limit)
        index.touch(hashes, hit)
        start = index.known(hashes, hit, stop)
        spans = index.reserve(hashes, start, stop) if start < stop else []
        # A head of the prompt is worth having where all of it does not fit, as in `Coordinator.observe`.
        while spans is None and stop - start > index.chunk_blocks:
            stop = start + (stop - start) // 2
            spans = index.reserve(hashes, start, stop)
        index.publish(spans or ())
        return hit


class BestPool:
    """Belady's rule with the future known: what is asked for again last goes first, or does not even come in.

    A block is never asked for without those before it, so the block behind is asked for no sooner: with the deeper of
    two first, the rule takes nothing that another block hangs behind, and what is held of a prompt is always a head. So
    no policy hits more blocks. Prefill saved is another measure, by which deep blocks count more: there it is no bound.

    Args:
        slots: blocks that the pool holds.
        soon: `next_uses` of the trace that is going to be served.
    """

    def __init__(self, slots: int, soon: npt.NDArray[np.int32]) -> None:
        self._slots = slots
        self._next = soon
        self._at = 0
        self._held: dict[int, int] = {}
        """Block -> request that asks for it next."""
        self._heap: list[tuple[int, int, int]] = []
        """(request that asks next, depth, block), negative so that the last comes first."""

    def serve(self, blocks: list[int], limit: int) -> int:
        held, heap = self._held, self._heap
        soon = self._next[self._at : self._at + len(blocks)].tolist()
        self._at += len(blocks)
        hit = 0
        while hit < min(limit, len(blocks)) and blocks[hit] in held:
            hit += 1
        for depth, (block, request) in enumerate(zip(blocks, soon, strict=True)):
            if request < 0:
                # Asked for here for the last time, and so are all behind it.
                for last in blocks[depth:]:
                    held.pop(last, None)
                break
            held[block] = request
            heapq.heappush(heap, (-request, -depth, block))
        while len(held) > self._slots:
            request, _, block = heapq.heappop(heap)
            if held.get(block) == -request:
                del held[block]
        if len(heap) > 4 * len(held) + 1024:
            self._heap = [entry for entry in heap if held.get(entry[2]) == -entry[0]]
            heapq.heapify(self._heap)
        return hit


def replay(trace: RequestTrace, pool: Pool, progress: Callable[[int], None] | None = None) -> npt.NDArray[np.int64]:
    """Serve a trace.

    Args:
        trace: the requests.
        pool: an empty pool.
        progress: told of requests that were served, some at a time.

    Returns:
        [requests]: blocks that each request hit.
    """
    hits = np.zeros(len(trace), np.int64)
    for number, (blocks, limit) in enumerate(trace.prompts()):
        hits[number] = pool.serve(blocks, limit)
        if progress is not None and number % _REPORT_EVERY == _REPORT_EVERY - 1:
            progress(_REPORT_EVERY)
    if progress is not None:
        progress(len(trace) % _REPORT_EVERY)
    return hits


def next_uses(trace: RequestTrace) -> npt.NDArray[np.int32]:
    """[blocks]: for each block of each prompt the request that is the next that can hit it; -1 if none does."""
    sizes = np.diff(trace.starts)
    request = np.repeat(np.arange(len(trace), dtype=np.int32), sizes)
    # The block of a prompt's last token is computed in any case: being asked for there is no use.
    counts = np.ones(len(trace.blocks), bool)
    counts[trace.starts[1:][sizes > trace.limits] - 1] = False
    order = np.argsort(trace.blocks, kind="stable")
    same = trace.blocks[order[:-1]] == trace.blocks[order[1:]]
    after = np.full(len(order), -1, np.int64)
    after[order[:-1]] = np.where(same, order[1:], -1)
    # A use that does not count is passed over, to the one after it.
    found = after.copy()
    idle = np.flatnonzero((found >= 0) & ~counts[found])
    while len(idle):
        found[idle] = after[found[idle]]
        idle = idle[(found[idle] >= 0) & ~counts[found[idle]]]
    return np.where(found >= 0, request[found], -1).astype(np.int32)
