"""One rank's objects in a real host pool, moved as the mover moves them: on as many threads, in parts as large."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from layerstream.errors import ObjectError
from layerstream.hooks.vllm.local_engine import quick_dtype
from layerstream.host_pool import HostPool
from layerstream.jobs import JobKind, TierJob, TierObject
from layerstream.segment_layout import SegmentLayout
from layerstream.tiers.base import Batch, IndexSite, Item, StoreSite
from layerstream.tiers.grid import ObjectGrid
from layerstream.tiers.mover import PART_BYTES, PART_OBJECTS
from layerstream.tiers.objects import Bytes, ObjectFormat, checksum
from layerstream.tiers.workspace import Workspace
from profiles.microbench.rig import BLOCK_TOKENS, FUSED_HEAD, KV_HEADS, LAYER_NAMES

CHUNK_BLOCKS = 2
"""256 tokens, the default of the option `chunk_tokens`."""
READ_THREADS, WRITE_THREADS = 2, 1
"""As many as a `TierMover` has unless told otherwise."""


class TierRig:
    """A pool full of random bytes, which are the pages of `count` objects of a whole chunk.

    Args:
        count: objects.
        page_bytes: of one page of each layer.
    """

    def __init__(self, count: int, *, page_bytes: int) -> None:
        sizes = (page_bytes,) * len(LAYER_NAMES)
        self.count = count
        self.format = ObjectFormat(
            layers=LAYER_NAMES, page_bytes=sizes, chunk_blocks=CHUNK_BLOCKS, block_tokens=BLOCK_TOKENS, rank=0
        )
        self.pool = HostPool(
            page_bytes=sizes,
            chunk_blocks=CHUNK_BLOCKS,
            budget_bytes=SegmentLayout(sizes, CHUNK_BLOCKS, count).nbytes,
        )
        self.workspace = Workspace(self.pool, self.format, threads=1, readers=1, items=count)
        self.namespace = os.urandom(32)
        self.object_bytes = self.format.nbytes(CHUNK_BLOCKS)
        random = np.random.default_rng(0)
        for region in self.pool.regions():
            region[:] = random.integers(1 << 64, size=region.nbytes // 8, dtype=np.uint64).view(np.uint8)
        self._sums = [[checksum(pieces) for pieces in item.layers] for item in self._items(self.names(count))]
        self._threads = {count: ThreadPoolExecutor(count) for count in {READ_THREADS, WRITE_THREADS}}

    @property
    def site(self) -> StoreSite:
        """For a tier's store."""
        return StoreSite(format=self.format, memory=(*self.pool.regions(), self.workspace.memory))

    @property
    def index_site(self) -> IndexSite:
        """For a tier's index."""
        return IndexSite(
            namespace=self.namespace,
            chunk_blocks=CHUNK_BLOCKS,
            block_bytes=(self.format.block_bytes,),
            header_bytes=(self.format.header_bytes,),
        )

    def names(self, count: int) -> list[TierObject]:
        """A prefix of so many objects that nobody has heard of."""
        blocks = count * CHUNK_BLOCKS
        hashes = [os.urandom(32) for _ in range(blocks)]
        return ObjectGrid(namespace=self.namespace, chunk_blocks=CHUNK_BLOCKS).whole(hashes, blocks)

    def job(self, names: Sequence[TierObject], kind: JobKind) -> TierJob:
        """What moves these objects between tier 0 and the first pages of the pool."""
        return TierJob(
            job_id=0,
            kind=kind,
            tier=0,
            namespace=self.namespace,
            chain=(),
            objects=tuple(names),
            pool_runs=((0, len(names) * CHUNK_BLOCKS),),
        )

    def sealed(self, names: Sequence[TierObject]) -> Batch:
        """These objects in the first pages of the pool, with headers."""
        items = self._items(names)
        for item, sums in zip(items, self._sums, strict=False):
            self.format.write_header(item.header, item.object, namespace=self.namespace, checksums=sums)
        return Batch(namespace=self.namespace, chain=(), items=items)

    def blank(self, names: Sequence[TierObject]) -> Batch:
        """Room for these objects in the same place, and zeros in it."""
        items = self._items(names)
        for piece in (piece for item in items for piece in item.buffers):
            piece[:] = 0
        return Batch(namespace=self.namespace, chain=(), items=items)

    def holds(self, batch: Batch) -> bool:
        """Whether every object of the batch is in its place, whole, by its checksums."""
        try:
            for item in batch.items:
                self.format.check(item.object, item.header, item.layers, namespace=self.namespace)
        except ObjectError:
            return False
        return True

    def move(self, work: Callable[[Batch], int], batch: Batch, *, threads: int) -> float:
        """Seconds in which so many threads move a batch part by part.

        Args:
            work: moves a part, and says how many of its objects it moved.
            batch: whole chunks.
            threads: one of `READ_THREADS` and `WRITE_THREADS`.
        """
        parts = self.parts(batch, threads=threads)
        begun = time.perf_counter()
        moved = sum(self._threads[threads].map(work, parts))
        seconds = time.perf_counter() - begun
        assert moved == len(batch.items), f"{moved} of {len(batch.items)} objects were moved"
        return seconds

    def parts(self, batch: Batch, *, threads: int) -> list[Batch]:
        """A batch as the mover hands it out."""
        most = min(PART_OBJECTS, -(-len(batch.items) // threads), max(1, PART_BYTES // self.object_bytes))
        keys = [item.object.key for item in batch.items]
        return [
            Batch(namespace=batch.namespace, chain=tuple(keys[:first]), items=batch.items[first : first + most])
            for first in range(0, len(keys), most)
        ]

    def close(self) -> None:
        """End the threads and give up the memory."""
        for threads in self._threads.values():
            threads.shutdown()
        self.workspace.close()
        self.pool.close()

    def _items(self, names: Sequence[TierObject]) -> tuple[Item, ...]:
        return self.workspace.batch(self.job(names, JobKind.PROMOTE), 0, len(names), thread=0).items


def engine_page_bytes() -> int:
    """Of one page of each of SmolLM2's layers, in the dtype that engines compute in on this machine."""
    return KV_HEADS * BLOCK_TOKENS * FUSED_HEAD * (2 if quick_dtype() == "bfloat16" else 4)


def joined(batch: Batch, memory: Bytes) -> list[Bytes]:
    """Put each object of a batch into `memory`, one after another, and return where: `uint8[n]` each."""
    whole: list[Bytes] = []
    offset = 0
    for item in batch.items:
        whole.append(memory[offset : offset + item.nbytes])
        np.concatenate(item.buffers, out=whole[-1])
        offset += item.nbytes
    return whole
