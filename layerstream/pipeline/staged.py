"""Staged transfers: large copies between host and a small device ring, and a kernel between ring and KV cache.

The copy engine sees a few large contiguous ranges however small the pages are, and the kernel works at device-memory
speed. Loads and saves have a ring each, cut into pieces; a piece is used again only after the event of its last reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerstream.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from layerstream.geometry import KVGeometry
    from layerstream.host_pool import HostPool
    from layerstream.pipeline.base import Move
    from layerstream.streams.base import Device, Event

PIECE_BYTES = 8 << 20
"""Largest piece: small copies of the engine that queue behind one wait about 0.15 ms at PCIe 5 rate."""
MIN_PIECES = 2
"""Pieces a ring needs so that copy and kernel can overlap."""

PRIORITY_SCATTER = 1
PRIORITY_COPY = 0
PRIORITY_SAVE = -1
"""A scatter holds up the next layer; a save holds up nothing until the step ends."""


@dataclass(slots=True)
class _RingPiece:
    memory: torch.Tensor
    filled: Event
    drained: Event
    used: bool = False


class _Ring:
    """Pieces of device memory, used in turn."""

    def __init__(self, device: Device, nbytes: int, piece_bytes: int) -> None:
        count = nbytes // piece_bytes
        memory = device.empty(count * piece_bytes)
        self._pieces = [
            _RingPiece(memory[i * piece_bytes : (i + 1) * piece_bytes], device.event(), device.event())
            for i in range(count)
        ]
        self._turn = 0

    def next(self) -> _RingPiece:
        piece = self._pieces[self._turn]
        self._turn = (self._turn + 1) % len(self._pieces)
        return piece


class StagedPath:
    """Moves pages through staging rings on four streams: copy and scatter for loads, gather and copy for saves."""

    name = "staged"

    def __init__(
        self,
        *,
        device: Device,
        geometry: KVGeometry,
        storages: Sequence[torch.Tensor],
        pool: HostPool,
        gather: Callable[..., None],
        scatter: Callable[..., None],
        staging_bytes: int,
    ) -> None:
        """
        Args:
            device: where the KV cache lives.
            geometry: its pages.
            storages: per layer, `uint8` over the whole storage that `geometry.layers[i]` describes.
            pool: the host pool.
            gather: `gather_pages` for this device (see `layerstream.kernels.gather`).
            scatter: `scatter_pages` for this device.
            staging_bytes: device memory for both rings together.

        Raises:
            ConfigError: `staging_bytes` cannot hold two pages a ring.
        """
        largest = max(layer.page_bytes for layer in geometry.layers)
        ring_bytes = staging_bytes // 2
        self._piece_bytes = max(largest, min(PIECE_BYTES, ring_bytes // MIN_PIECES))
        if ring_bytes < MIN_PIECES * self._piece_bytes:
            needed = -(-2 * MIN_PIECES * largest // (1 << 20))
            raise ConfigError(
                f"staging_mib: {staging_bytes >> 20} MiB cannot stage pages of {largest} bytes; "
                f"set it to at least {needed}"
            )
        self._layers = geometry.layers
        self._storages = storages
        self._pool = pool
        self._gather = gather
        self._scatter = scatter
        self._load_ring = _Ring(device, ring_bytes, self._piece_bytes)
        self._save_ring = _Ring(device, ring_bytes, self._piece_bytes)
        self._load_copy = device.stream("layerstream-load-copy", priority=PRIORITY_COPY)
        self._load_scatter = device.stream("layerstream-load-scatter", priority=PRIORITY_SCATTER)
        self._save_gather = device.stream("layerstream-save-gather", priority=PRIORITY_SAVE)
        self._save_copy = device.stream("layerstream-save-copy", priority=PRIORITY_SAVE)

    def load_layer(self, layer: int, move: Move, *, after: Event, begun: Event, done: Event) -> None:
        """See `TransferPath`. Copies into the ring do not wait for `after`: they write nothing the model reads."""
        pages = self._layers[layer]
        copy, scatter = self._load_copy, self._load_scatter
        scatter.wait(after)
        copy.record(begun)
        for piece in move.pieces(self._piece_bytes // pages.page_bytes):
            stage = self._load_ring.next()
            if stage.used:
                copy.wait(stage.drained)
            stage.used = True
            offset = 0
            for page, count in piece.pool_runs:
                nbytes = count * pages.page_bytes
                copy.copy(stage.memory[offset : offset + nbytes], self._pool.span(layer, page, count))
                offset += nbytes
            copy.record(stage.filled)
            scatter.wait(stage.filled)
            scatter.launch(self._scatter, self._storages[layer], stage.memory[:offset], pages, piece.blocks)
            scatter.record(stage.drained)
        scatter.record(done)

    def save_layer(self, layer: int, move: Move, *, after: Event, begun: Event, joined: Event, done: Event) -> None:
        """See `TransferPath`. A save larger than its ring is paced by the copies to the host."""
        pages = self._layers[layer]
        gather, copy = self._save_gather, self._save_copy
        gather.wait(after)
        gather.record(begun)
        for piece in move.pieces(self._piece_bytes // pages.page_bytes):
            stage = self._save_ring.next()
            if stage.used:
                gather.wait(stage.drained)
            stage.used = True
            nbytes = piece.pages * pages.page_bytes
            gather.launch(self._gather, stage.memory[:nbytes], self._storages[layer], pages, piece.blocks)
            gather.record(stage.filled)
            copy.wait(stage.filled)
            offset = 0
            for page, count in piece.pool_runs:
                size = count * pages.page_bytes
                copy.copy(self._pool.span(layer, page, count), stage.memory[offset : offset + size])
                offset += size
            copy.record(stage.drained)
        gather.record(joined)
        copy.record(done)
