"""Staged transfers: large copies between host and a small device ring, and a kernel between ring and KV cache.

The copy engine sees a few large contiguous ranges however small the pages are, and the kernel works at device-memory
speed. Loads and saves have a ring each, cut into pieces; a piece is used again only after the event of its last reader.
Copies into the load ring wait for nothing else: while an earlier step still computes, they run ahead as far as the ring
reaches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from layerstream.errors import ConfigError
from layerstream.pipeline.pool_addresses import PoolAddresses
from layerstream.streams.base import CopyBatch

if TYPE_CHECKING:
    import torch

    from layerstream.host_pool import HostPool
    from layerstream.pipeline.base import Move, Piece
    from layerstream.pipeline.paged_cache import PagedCache, PageKernels, Stretch
    from layerstream.streams.base import Device, Event, Stream

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


class _Part(NamedTuple):
    """What one piece of a ring carries: some blocks of some layers, layer after layer."""

    stretch: Stretch
    first: int
    """Index of its first layer in the stretch."""
    layers: int
    piece: Piece

    @property
    def nbytes(self) -> int:
        return self.layers * self.piece.pages * self.stretch.page_bytes


class StagedPath:
    """Moves pages through staging rings on four streams: copy and scatter for loads, gather and copy for saves."""

    name = "staged"

    def __init__(
        self,
        *,
        device: Device,
        cache: PagedCache,
        pool: HostPool,
        kernels: PageKernels,
        staging_bytes: int,
        max_ctas: int | None = None,
    ) -> None:
        """
        Args:
            device: where the KV cache lives.
            cache: the KV cache.
            pool: the host pool.
            kernels: the kernels of this device.
            staging_bytes: device memory for both rings together.
            max_ctas: most thread blocks a kernel may occupy; None leaves it to the kernel.

        Raises:
            ConfigError: `staging_bytes` cannot hold two pages a ring.
        """
        largest = max(layer.page_bytes for layer in cache.layers)
        ring_bytes = staging_bytes // 2
        self._piece_bytes = max(largest, min(PIECE_BYTES, ring_bytes // MIN_PIECES))
        if ring_bytes < MIN_PIECES * self._piece_bytes:
            needed = -(-2 * MIN_PIECES * largest // (1 << 20))
            raise ConfigError(
                f"staging_mib: {staging_bytes >> 20} MiB cannot stage pages of {largest} bytes; "
                f"set it to at least {needed}"
            )
        self._cache = cache
        self._pool = pool
        self._addresses = PoolAddresses(pool, tuple(layer.page_bytes for layer in cache.layers))
        # A batch of copies is by address, so the device must know the memory.
        self._batches = device.kind == "cpu" or pool.pinned
        self._kernels = kernels
        self._limits = {} if max_ctas is None else {"max_ctas": max_ctas}
        self._load_ring = _Ring(device, ring_bytes, self._piece_bytes)
        self._save_ring = _Ring(device, ring_bytes, self._piece_bytes)
        self._load_copy = device.stream("layerstream-load-copy", priority=PRIORITY_COPY)
        self._load_scatter = device.stream("layerstream-load-scatter", priority=PRIORITY_SCATTER)
        self._save_gather = device.stream("layerstream-save-gather", priority=PRIORITY_SAVE)
        self._save_copy = device.stream("layerstream-save-copy", priority=PRIORITY_SAVE)

    def load(self, layers: Sequence[int], move: Move, *, after: Event, begun: Event, done: Event) -> None:
        """See `TransferPath`. Copies into the ring do not wait for `after`: they write nothing the model reads."""
        copy, scatter = self._load_copy, self._load_scatter
        scatter.wait(after)
        copy.record(begun)
        try:
            for part in self._parts(layers, move):
                stage = self._load_ring.next()
                if stage.used:
                    copy.wait(stage.drained)
                self._copy(copy, part, stage.memory, to_host=False)
                copy.record(stage.filled)
                scatter.wait(stage.filled)
                stretch = part.stretch
                scatter.launch(
                    self._kernels.scatter_layers,
                    stretch.stack,
                    stretch.first + part.first,
                    part.layers,
                    stage.memory[: part.nbytes],
                    part.piece.blocks,
                    **self._limits,
                )
                scatter.record(stage.drained)
                stage.used = True
        finally:
            scatter.record(done)

    def save(
        self, layers: Sequence[int], move: Move, *, after: Event, begun: Event, joined: Event, done: Event
    ) -> None:
        """See `TransferPath`. A save larger than its ring is paced by the copies to the host."""
        gather, copy = self._save_gather, self._save_copy
        gather.wait(after)
        gather.record(begun)
        try:
            for part in self._parts(layers, move):
                stage = self._save_ring.next()
                if stage.used:
                    gather.wait(stage.drained)
                stretch = part.stretch
                gather.launch(
                    self._kernels.gather_layers,
                    stage.memory[: part.nbytes],
                    stretch.stack,
                    stretch.first + part.first,
                    part.layers,
                    part.piece.blocks,
                    **self._limits,
                )
                gather.record(stage.filled)
                copy.wait(stage.filled)
                self._copy(copy, part, stage.memory, to_host=True)
                copy.record(stage.drained)
                stage.used = True
        finally:
            gather.record(joined)
            copy.record(done)

    def _parts(self, layers: Sequence[int], move: Move) -> Iterator[_Part]:
        """Fill each piece: with all the blocks of as many layers as fit, or with a part of one layer's blocks."""
        for stretch in self._cache.stretches(layers):
            pages = self._piece_bytes // stretch.page_bytes
            at_once = max(1, pages // move.count)
            for first in range(0, len(stretch.layers), at_once):
                count = min(at_once, len(stretch.layers) - first)
                for piece in move.pieces(pages):
                    yield _Part(stretch, first, count, piece)

    def _copy(self, stream: Stream, part: _Part, memory: torch.Tensor, *, to_host: bool) -> None:
        """Queue the copies between a ring piece and the pool's runs of every layer in it."""
        size = part.stretch.page_bytes
        layers = part.stretch.layers[part.first : part.first + part.layers]
        runs = part.piece.pool_runs
        if self._batches and len(layers) * len(runs) > 1:
            firsts, counts = np.array(runs, dtype=np.int64).T
            nbytes = counts * size
            host = np.concatenate([self._addresses.pages(layer, firsts) for layer in layers]).astype(np.uint64)
            lengths = np.tile(nbytes, len(layers))
            staged = (memory.data_ptr() + np.cumsum(lengths) - lengths).astype(np.uint64)
            targets, sources = (host, staged) if to_host else (staged, host)
            stream.copy_batch(CopyBatch(targets, sources, lengths.astype(np.uint64)))
            return
        offset = 0
        for layer in layers:
            for page, count in runs:
                staged_run = memory[offset : offset + count * size]
                span = self._pool.span(layer, page, count)
                stream.copy(*((span, staged_run) if to_host else (staged_run, span)))
                offset += count * size
