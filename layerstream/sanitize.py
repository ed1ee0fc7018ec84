"""Finds races while an engine serves (option `sanitize`): every access of a step is followed, the model's included.

The model's kernels do not pass the device seam, so the scheduler half says with each step which blocks the step writes
and reads, and the hooks say when: a layer's KV is written before its gate and read behind it. What a layer without a
hook touches is told at the end of the step, behind the gates that are passed there: a hook that is relied upon and does
not run is the one fault that is not seen as a race.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from layerstream.streams.accesses import Ranges

if TYPE_CHECKING:
    import torch

    from layerstream.geometry import KVGeometry, LayerPages
    from layerstream.host_pool import HostPool
    from layerstream.jobs import ModelAccess
    from layerstream.streams.recording import RecordingDevice


class Sanitizer:
    """Tells a recording device what the model touches, layer by layer, each once a step."""

    def __init__(self, device: RecordingDevice, geometry: KVGeometry, storages: Sequence[torch.Tensor]) -> None:
        """
        Args:
            device: raises `RaceError` at the second of two accesses that nothing orders.
            geometry: the pages of the KV cache.
            storages: per layer, `uint8` over the layer's whole storage.
        """
        self._device = device
        self._layers = geometry.layers
        self._cache_groups = geometry.cache_groups or (0,) * len(geometry.layers)
        self._storages = tuple(storages)
        parts = [storage[layer.offset : layer.end] for layer, storage in zip(self._layers, self._storages, strict=True)]
        starts = sorted((part.data_ptr(), part.data_ptr() + part.nbytes) for part in parts)
        apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(starts))
        for layer, part in zip(self._layers, parts, strict=True):
            # Where layers lie between each other's pages, an address alone does not tell whose it is.
            device.label(part, f"KV of layer {layer.name}" if apart else "KV cache")
        self._access: tuple[ModelAccess, ...] | None = None
        self._written: set[int] = set()
        self._read: set[int] = set()

    def label_pool(self, pool: HostPool) -> None:
        """Name the pool's memory in messages."""
        for first in range(0, pool.pages, pool.pages_per_segment):
            for index, layer in enumerate(self._layers):
                self._device.label(pool.span(index, first, pool.pages_per_segment), f"host pool, layer {layer.name}")

    def begin_step(self, access: tuple[ModelAccess, ...] | None) -> None:
        """Take what the model of this step touches of each KV cache group; None if nobody knows."""
        self._access = access
        self._written.clear()
        self._read.clear()

    def wrote(self, layer: int) -> None:
        """The model has queued the step's writes to a layer.

        Raises:
            RaceError: something may still read or write the blocks.
        """
        if self._access is not None and layer not in self._written:
            self._written.add(layer)
            self._declare(layer, "the model's KV writes", writes=self._access[self._cache_groups[layer]].writes)

    def read(self, layer: int) -> None:
        """The model queues its reads of a layer from here on.

        Raises:
            RaceError: a load may still write the blocks.
        """
        self.wrote(layer)
        if self._access is not None and layer not in self._read:
            self._read.add(layer)
            self._declare(layer, "attention", reads=self._access[self._cache_groups[layer]].reads)

    def end_step(self) -> None:
        """The forward is queued: layers whose hooks did not run were touched in it.

        Raises:
            RaceError: see `wrote` and `read`.
        """
        for layer in range(len(self._layers)):
            self.read(layer)
        self._access = None

    def _declare(self, layer: int, what: str, *, reads: Sequence[int] = (), writes: Sequence[int] = ()) -> None:
        pages, base = self._layers[layer], self._storages[layer].data_ptr()
        self._device.declare(
            self._device.compute(),
            reads=_ranges(pages, base, reads),
            writes=_ranges(pages, base, writes),
            what=f"{what} of layer {pages.name}",
        )


def _ranges(pages: LayerPages, base: int, blocks: Sequence[int]) -> Ranges:
    """Address ranges of every run of some blocks: `int64[len(blocks) * runs, 2]`."""
    first = base + pages.offset + np.asarray(blocks, dtype=np.int64) * pages.page_stride
    starts = (first[:, None] + np.asarray(pages.run_offsets, dtype=np.int64)).ravel()
    return np.stack([starts, starts + pages.run_bytes], axis=1)
