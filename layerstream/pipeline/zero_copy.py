"""Zero-copy transfers: the page kernel reads and writes the host pool itself, with no ring between.

Every byte is moved once. Where KV cache and pool lie in the same memory, as on a CPU engine, a ring would only move
each of them twice, in competition with the model for memory bandwidth. On a GPU a few thread blocks read pinned memory
over the link; they hold their multiprocessors for as long as that takes, so a launch is kept short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from layerstream.kernels.operands import pages_per_launch

if TYPE_CHECKING:
    import torch

    from layerstream.host_pool import HostPool
    from layerstream.pipeline.base import Move
    from layerstream.pipeline.paged_cache import PagedCache, PageKernels
    from layerstream.streams.base import Device, Event

PRIORITY_LOAD = 1
PRIORITY_SAVE = -1
"""A load holds up the next layer; a save holds up nothing until the step ends."""


class ZeroCopyPath:
    """Kernels between KV cache and pool, on one stream for loads and one for saves."""

    name = "zero_copy"

    def __init__(
        self,
        *,
        device: Device,
        cache: PagedCache,
        pool: HostPool,
        kernels: PageKernels,
        max_ctas: int | None = None,
    ) -> None:
        """
        Args:
            device: where the KV cache lives; its kernels must be able to address the pool's memory.
            cache: the KV cache.
            pool: the host pool; pinned where the device is a GPU.
            kernels: the kernels of this device.
            max_ctas: most thread blocks a kernel may occupy; None leaves it to the kernel.
        """
        self._cache = cache
        self._pool = pool
        self._kernels = kernels
        self._options: dict[str, Any] = {} if max_ctas is None else {"max_ctas": max_ctas}
        self._sliced = device.kind == "cuda"
        if self._sliced:
            self._options["packed_on_host"] = True
        self._load = device.stream("layerstream-load", priority=PRIORITY_LOAD)
        self._save = device.stream("layerstream-save", priority=PRIORITY_SAVE)

    def load(self, layers: Sequence[int], move: Move, *, after: Event, begun: Event, done: Event) -> None:
        """See `TransferPath`."""
        self._load.wait(after)
        self._load.record(begun)
        try:
            for layer in layers:
                pages, storage = self._cache.layers[layer], self._cache.storages[layer]
                for blocks, span in self._runs(layer, move):
                    self._load.launch(self._kernels.scatter_pages, storage, span, pages, blocks, **self._options)
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
                pages, storage = self._cache.layers[layer], self._cache.storages[layer]
                for blocks, span in self._runs(layer, move):
                    self._save.launch(self._kernels.gather_pages, span, storage, pages, blocks, **self._options)
        finally:
            self._save.record(joined)
            self._save.record(done)

    def _runs(self, layer: int, move: Move) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The blocks of each run of pool pages, and the run's bytes of a layer."""
        limit = pages_per_launch(self._cache.layers[layer].page_bytes) if self._sliced else move.count
        for piece in move.pieces(limit):
            first = 0
            for page, count in piece.pool_runs:
                yield piece.blocks[first : first + count], self._pool.span(layer, page, count)
                first += count
