"""Zero-copy transfers: the page kernel reads and writes the host pool itself, with no ring between.

Every byte is moved once. Where KV cache and pool lie in the same memory, as on a CPU engine, a ring would only move
each of them twice, in competition with the model for memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from layerstream.geometry import KVGeometry
    from layerstream.host_pool import HostPool
    from layerstream.pipeline.base import Move
    from layerstream.streams.base import Device, Event

PRIORITY_LOAD = 1
PRIORITY_SAVE = -1
"""A load holds up the next layer; a save holds up nothing until the step ends."""


class ZeroCopyPath:
    """One kernel for each run of pool pages, on one stream for loads and one for saves."""

    name = "zero_copy"

    def __init__(
        self,
        *,
        device: Device,
        geometry: KVGeometry,
        storages: Sequence[torch.Tensor],
        pool: HostPool,
        gather: Callable[..., None],
        scatter: Callable[..., None],
    ) -> None:
        """
        Args:
            device: where the KV cache lives; its kernels must be able to address the pool's memory.
            geometry: the pages of the KV cache.
            storages: per layer, `uint8` over the whole storage that `geometry.layers[i]` describes.
            pool: the host pool.
            gather: `gather_pages` for this device (see `layerstream.kernels.gather`).
            scatter: `scatter_pages` for this device.
        """
        self._layers = geometry.layers
        self._storages = storages
        self._pool = pool
        self._gather = gather
        self._scatter = scatter
        self._load = device.stream("layerstream-load", priority=PRIORITY_LOAD)
        self._save = device.stream("layerstream-save", priority=PRIORITY_SAVE)

    def load_layer(self, layer: int, move: Move, *, after: Event, begun: Event, done: Event) -> None:
        """See `TransferPath`."""
        pages, storage = self._layers[layer], self._storages[layer]
        self._load.wait(after)
        self._load.record(begun)
        for blocks, page, count in move.runs:
            self._load.launch(self._scatter, storage, self._pool.span(layer, page, count), pages, blocks)
        self._load.record(done)

    def save_layer(self, layer: int, move: Move, *, after: Event, begun: Event, joined: Event, done: Event) -> None:
        """See `TransferPath`. The KV cache is read until the pool holds every byte, so `joined` and `done` coincide."""
        pages, storage = self._layers[layer], self._storages[layer]
        self._save.wait(after)
        self._save.record(begun)
        for blocks, page, count in move.runs:
            self._save.launch(self._gather, self._pool.span(layer, page, count), storage, pages, blocks)
        self._save.record(joined)
        self._save.record(done)
