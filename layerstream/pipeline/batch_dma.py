"""Batch copies: the copy engine reads and writes the pages themselves, described by one list of copies a layer.

No kernel runs and no ring is needed. It pays for large pages only: a copy engine needs about 0.65 us a row, and rows
below 28 KiB fall to a fraction of the link's rate on an H100 (https://github.com/vllm-project/vllm/pull/42212).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from layerstream.pipeline.pool_addresses import PoolAddresses
from layerstream.streams.base import CopyBatch

if TYPE_CHECKING:
    import numpy.typing as npt

    from layerstream.host_pool import HostPool
    from layerstream.pipeline.base import Move
    from layerstream.pipeline.paged_cache import PagedCache
    from layerstream.streams.base import Device, Event

PRIORITY_LOAD = 1
PRIORITY_SAVE = -1
"""A load holds up the next layer; a save holds up nothing until the step ends."""


class _Rows(NamedTuple):
    """Copies of one layer, `uint64[rows]` each: addresses on both sides, and lengths."""

    cached: npt.NDArray[np.uint64]
    pooled: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint64]


class BatchDmaPath:
    """One batch of copies for each layer, on one stream for loads and one for saves."""

    name = "batch_dma"

    def __init__(self, *, device: Device, cache: PagedCache, pool: HostPool) -> None:
        """
        Args:
            device: where the KV cache lives.
            cache: the KV cache.
            pool: the host pool; pinned where the device is a GPU.
        """
        self._cache = cache
        self._addresses = PoolAddresses(pool, tuple(layer.page_bytes for layer in cache.layers))
        self._load = device.stream("layerstream-load-dma", priority=PRIORITY_LOAD)
        self._save = device.stream("layerstream-save-dma", priority=PRIORITY_SAVE)

    def load(self, layers: Sequence[int], move: Move, *, after: Event, begun: Event, done: Event) -> None:
        """See `TransferPath`."""
        self._load.wait(after)
        self._load.record(begun)
        try:
            for layer in layers:
                rows = self._rows(layer, move)
                self._load.copy_batch(CopyBatch(rows.cached, rows.pooled, rows.nbytes))
        finally:
            self._load.record(done)

    def save(
        self, layers: Sequence[int], move: Move, *, after: Event, begun: Event, joined: Event, done: Event
    ) -> None:
        """See `TransferPath`. The KV cache is read until the pool holds every byte, so `joined` and `done` coincide."""
        self._save.wait(after)
        self._save.record(begun)
        try:
            for layer in layers:
                rows = self._rows(layer, move)
                self._save.copy_batch(CopyBatch(rows.pooled, rows.cached, rows.nbytes))
        finally:
            self._save.record(joined)
            self._save.record(done)

    def _rows(self, layer: int, move: Move) -> _Rows:
        """The rows of one layer: those of any alike layer, moved to where this one lies."""
        pages = self._cache.layers[layer]
        layout = (pages.page_stride, pages.run_offsets, pages.run_bytes)
        rows = move.memo.get(layout)
        if rows is None:
            rows = move.memo[layout] = self._relative_rows(layer, move)
        cached = np.uint64(self._cache.storages[layer].data_ptr() + pages.offset)
        pooled = np.uint64(self._addresses.layer_distances[layer])
        return _Rows(rows.cached + cached, rows.pooled + pooled, rows.nbytes)

    def _relative_rows(self, layer: int, move: Move) -> _Rows:
        """Rows relative to the layer's page 0 and to its distance in the pool; runs that follow each other on both
        sides are joined."""
        pages = self._cache.layers[layer]
        cached = (move.block_ids[:, None] * pages.page_stride + np.array(pages.run_offsets)).ravel()
        pool_pages = move.pool_pages()
        first = self._addresses.pages(layer, pool_pages) - self._addresses.layer_distances[layer]
        pooled = (first[:, None] + np.arange(len(pages.run_offsets)) * pages.run_bytes).ravel()
        # Segments are registered apart, and a copy must not span two registrations, though they may lie side by side.
        segments = np.repeat(self._addresses.segments(pool_pages), len(pages.run_offsets))
        joins = (np.diff(cached) == pages.run_bytes) & (np.diff(pooled) == pages.run_bytes) & (np.diff(segments) == 0)
        starts = np.concatenate(([0], np.flatnonzero(~joins) + 1))
        runs = np.diff(np.append(starts, cached.size))
        return _Rows(*(part.astype(np.uint64) for part in (cached[starts], pooled[starts], runs * pages.run_bytes)))
