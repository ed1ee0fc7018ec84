"""The worker halves of an engine whose KV is known to the byte, over tiers that keep portable objects."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from layerstream.canonical import ChunkForm, RowForm
from layerstream.head_groups import HeadGroups, LayerHeads
from layerstream.host_pool import HostPool
from layerstream.jobs import JobKind, Report, TierJob, TierObject
from layerstream.kernels.relayout_reference import pages_to_canonical
from layerstream.metrics import TierTraffic
from layerstream.portions import Portion, rank_heads
from layerstream.tiers.base import Tier
from layerstream.tiers.grid import ObjectGrid
from layerstream.tiers.mover import TierMover
from layerstream.tiers.objects import Bytes, ObjectFormat
from tests.kernels.pages import poisoned
from tests.kernels.rows import Cache, Layout, content
from tests.rigs.tier_faults import wait_until
from tests.rigs.tier_items import NAMESPACE

CHUNK_TOKENS = 64
HASH_TOKENS = 16
TOKENS = 3 * CHUNK_TOKENS
ROWS = (
    RowForm(item_bytes=2, key_bytes=32, value_bytes=32),
    RowForm(item_bytes=1, key_bytes=24, value_bytes=24),
    RowForm(item_bytes=2, key_bytes=144, value_bytes=0),
)


class Model:
    """KV of one prefix: for each layer `uint8[heads, tokens, row]`."""

    def __init__(self, heads: Sequence[int] = (4, 4), *, rows: Sequence[RowForm] = ROWS) -> None:
        self.rows = tuple(rows[: len(heads)])
        self.kv = [content(each, TOKENS, row) for each, row in zip(heads, rows, strict=False)]

    @property
    def groups(self) -> int:
        return math.gcd(*(kv.shape[0] for kv in self.kv))

    def canonical(self, layer: int, group: int, start: int, stop: int) -> Bytes:
        """What an object of these tokens holds of a layer."""
        heads = self.kv[layer].shape[0] // self.groups
        return self.kv[layer][group * heads : (group + 1) * heads, start:stop].flatten().numpy()


class PortableEngine:
    """One engine: its ranks have a pool and a mover each. Pages hold poison until something moves there."""

    def __init__(
        self, model: Model, layout: Layout, *, tiers: Sequence[Tier], block_tokens: int = 16, tp_size: int = 1
    ) -> None:
        self.model, self.layout, self.block_tokens, self.tp_size = model, layout, block_tokens, tp_size
        self.chunk_blocks = CHUNK_TOKENS // block_tokens
        self.grid = ObjectGrid(
            namespace=NAMESPACE, chunk_blocks=self.chunk_blocks, block_hashes=block_tokens // HASH_TOKENS
        )
        names = [hashlib.blake2b(b"%d" % number, digest_size=32).digest() for number in range(TOKENS // HASH_TOKENS)]
        self.hashes = names[block_tokens // HASH_TOKENS - 1 :: block_tokens // HASH_TOKENS]
        self.caches = [
            [
                Cache(layout, self._heads(kv, rank), row, block_tokens)
                for kv, row in zip(model.kv, model.rows, strict=True)
            ]
            for rank in range(tp_size)
        ]
        self.heads = [self._groups(rank) for rank in range(tp_size)]
        self.pools = [self._pool(caches) for caches in self.caches]
        self.movers = [
            TierMover(
                [(str(number), tier.open_store) for number, tier in enumerate(tiers)],
                pool=pool,
                format=ObjectFormat(
                    layers=[layer.form.name for layer in heads.layers],
                    page_bytes=[layer.form.page_bytes for layer in heads.layers],
                    chunk_blocks=self.chunk_blocks,
                    block_tokens=block_tokens,
                    rank=0,
                ),
                heads=heads,
            )
            for pool, heads in zip(self.pools, self.heads, strict=True)
        ]
        self.traffic = TierTraffic()
        self._numbers = itertools.count(1)

    def _heads(self, kv: torch.Tensor, rank: int) -> torch.Tensor:
        first, heads = rank_heads(kv.shape[0], tp_rank=rank, tp_size=self.tp_size)
        return kv[first : first + heads]

    def _groups(self, rank: int) -> HeadGroups:
        layers = tuple(
            LayerHeads(
                form=replace(cache.form, name=f"layer {number}"),
                first=rank_heads(kv.shape[0], tp_rank=rank, tp_size=self.tp_size)[0],
                total=kv.shape[0],
            )
            for number, (cache, kv) in enumerate(zip(self.caches[rank], self.model.kv, strict=True))
        )
        groups = HeadGroups(layers=layers)
        return replace(groups, writes=rank % (self.tp_size * groups.held // groups.count) == 0)

    def _pool(self, caches: Sequence[Cache]) -> HostPool:
        sizes = [cache.form.page_bytes for cache in caches]
        segment = sum(-(-self.chunk_blocks * 2 * size // 4096) * 4096 for size in sizes)
        pool = HostPool(
            page_bytes=sizes,
            chunk_blocks=self.chunk_blocks,
            budget_bytes=4 * segment,
            segment_bytes=segment,
            touch_threads=1,
        )
        for region in pool.regions():
            region[:] = poisoned(region.nbytes).numpy()
        return pool

    def objects(self, tokens: int = TOKENS) -> list[TierObject]:
        """Those of so many leading tokens, of which the last may be short."""
        blocks = tokens // self.block_tokens
        whole = self.grid.whole(self.hashes, blocks)
        if rest := blocks - len(whole) * self.chunk_blocks:
            parent = whole[-1].key if whole else b""
            whole.append(self.grid.object(self.hashes, blocks - rest, rest, parent=parent))
        return whole

    def runs(self, blocks: int) -> list[tuple[int, int]]:
        """Pages of the pool for so many blocks, out of order and across segments."""
        pages = self.pools[0].pages
        return [((page * 5 + 1) % pages, 1) for page in range(blocks)] if pages % 5 else [(1, blocks)]

    def put(self, runs: Sequence[tuple[int, int]]) -> None:
        """What saves would have put there."""
        for caches, pool in zip(self.caches, self.pools, strict=True):
            for block, page in enumerate(_pages(runs)):
                for layer, cache in enumerate(caches):
                    size = cache.form.page_bytes
                    pool.span(layer, page, 1)[:] = cache.pages[block * size : (block + 1) * size]

    def run(
        self, kind: JobKind, objects: Sequence[TierObject], runs: Sequence[tuple[int, int]], *, skip: int = 0
    ) -> list[int]:
        """Objects that each rank moved."""
        job = TierJob(
            job_id=next(self._numbers),
            kind=kind,
            tier=0,
            namespace=NAMESPACE,
            chain=(),
            objects=tuple(objects),
            skip=skip,
            pool_runs=tuple(runs),
        )
        moved = []
        for mover in self.movers:
            mover.submit([job])
            report = Report()
            wait_until(lambda mover=mover, report=report: mover.poll(report))  # type: ignore[misc]
            self.traffic = self.traffic.merge(report.tiers[0])
            moved.append(report.moved[job.job_id][1])
        return moved

    def write(self, tokens: int = TOKENS) -> list[int]:
        runs = self.runs(tokens // self.block_tokens)
        self.put(runs)
        return self.run(JobKind.DEMOTE, self.objects(tokens), runs)

    def read(self, tokens: int = TOKENS, *, skip: int = 0) -> list[int]:
        runs = self.runs(tokens // self.block_tokens - skip)
        return self.run(JobKind.PROMOTE, self.objects(tokens), runs, skip=skip)

    def holds(self, first: int, last: int, *, at: int = 0) -> bool:
        """Whether pages from place `at` of the runs on are blocks `first .. last - 1`, and all others untouched."""
        pages = _pages(self.runs(at + last - first))[at:]
        for caches, pool in zip(self.caches, self.pools, strict=True):
            for layer, cache in enumerate(caches):
                size = cache.form.page_bytes
                for block, page in zip(range(first, last), pages, strict=True):
                    if not torch.equal(pool.span(layer, page, 1), cache.pages[block * size : (block + 1) * size]):
                        return False
                for page in set(range(pool.pages)) - set(pages):
                    if not torch.equal(pool.span(layer, page, 1), poisoned(size)):
                        return False
        return True

    def twin(self, rank: int, layer: int, place: int, start: int, stop: int) -> Bytes:
        """What the torch twin makes of a rank's pages for the object of its group at `place`."""
        cache, heads = self.caches[rank][layer], self.heads[rank].heads[layer]
        chunk = ChunkForm(row=cache.row, heads=heads, tokens=stop - start)
        out = poisoned(chunk.nbytes)
        portion = Portion(heads=heads, tokens=stop - start, page_head=place * heads, page_token=start)
        pages_to_canonical(out, cache.pages, cache.form, chunk, portion)
        return np.asarray(out.numpy())

    def close(self) -> None:
        for mover, pool in zip(self.movers, self.pools, strict=True):
            assert mover.close(5.0)
            pool.close()


def _pages(runs: Sequence[tuple[int, int]]) -> list[int]:
    return [page for first, count in runs for page in range(first, first + count)]
