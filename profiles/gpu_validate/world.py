"""A KV cache, a host pool, and the transfer paths between them, filled with bytes that can be told apart."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from layerstream.backends import open_device, open_path
from layerstream.geometry import KVGeometry, LayerPages
from layerstream.host_pool import HostPool
from layerstream.pipeline.base import Move, TransferPath
from layerstream.pipeline.graph_load import GraphLoad
from layerstream.pipeline.paged_cache import PagedCache, PageKernels
from layerstream.streams.base import Device, Event
from profiles.gpu_validate.bench import HANG_S, Bench, wait_for

POISON = 0xA5
STAGING_BYTES = 64 << 20
"""As `staging_mib` is by default."""
PIN_S = 60.0
CHUNK_BLOCKS = 16


class World:
    """Dense pages of one size, alike on every layer."""

    def __init__(
        self, device: Device, pool: HostPool, kernels: PageKernels, *, layers: int, blocks: int, page_bytes: int
    ) -> None:
        self.device, self.pool, self.kernels = device, pool, kernels
        self.layers, self.blocks, self.page_bytes = layers, blocks, page_bytes
        self.geometry = KVGeometry(
            layers=tuple(dense_layer(f"layer.{i}", blocks, page_bytes) for i in range(layers)),
            num_blocks=blocks,
            block_tokens=16,
        )
        self.storages = [device.empty(blocks * page_bytes) for _ in range(layers)]
        self.cache = PagedCache(self.geometry, self.storages)

    def pages(self, layer: int) -> torch.Tensor:
        """`uint8[blocks, page_bytes]`: a layer of the KV cache."""
        return self.storages[layer].view(self.blocks, self.page_bytes)

    def path(self, name: str, *, staging_bytes: int = STAGING_BYTES, max_ctas: int | None = None) -> TransferPath:
        """A path by its name."""
        return open_path(
            name,
            device=self.device,
            cache=self.cache,
            pool=self.pool,
            kernels=self.kernels,
            staging_bytes=staging_bytes,
            max_ctas=max_ctas,
        )

    def graph_load(self, sizes: Sequence[int], *, max_ctas: int | None = None) -> GraphLoad:
        """Loads as captured graphs."""
        return GraphLoad(
            device=self.device,
            cache=self.cache,
            pool=self.pool,
            kernels=self.kernels,
            sizes=sizes,
            max_ctas=max_ctas,
        )

    def move(self, count: int, *, first_page: int = 0, seed: int = 1) -> Move:
        """Random blocks of the KV cache, and consecutive pages of the pool."""
        ids = random.Random(seed).sample(range(self.blocks), count)
        return Move(ids, self.device.table(ids), self.pool.split(first_page, count))

    def queued(self) -> Event:
        """The compute stream's point now."""
        event = self.device.event()
        self.device.compute().record(event)
        return event

    def load(self, path: TransferPath, move: Move, after: Event) -> tuple[Event, Event]:
        """Queue a load of every layer; its begin and its end."""
        ends = []
        for layer in range(self.layers):
            begun, done = self.device.event(), self.device.event()
            path.load((layer,), move, after=after, begun=begun, done=done)
            ends.append((begun, done))
        return ends[0][0], ends[-1][1]

    def save(self, path: TransferPath, move: Move, after: Event) -> tuple[Event, Event]:
        """Queue a save of every layer; its begin and its end."""
        ends = []
        for layer in range(self.layers):
            begun, joined, done = (self.device.event() for _ in range(3))
            path.save((layer,), move, after=after, begun=begun, joined=joined, done=done)
            ends.append((begun, done))
        return ends[0][0], ends[-1][1]

    def seconds(self, ends: tuple[Event, Event]) -> float:
        """Device time between begin and end, which it waits for."""
        wait_for(ends[1].done)
        return max(self.device.elapsed(*ends), 1e-9)

    def fill_pool(self, pages: int, *, seed: int) -> None:
        """Random bytes in the first `pages` pages of every layer."""
        place = self.storages[0].device
        generator = torch.Generator(place).manual_seed(seed)
        for layer in range(self.layers):
            for first, count in self.pool.split(0, pages):
                self.pool.span(layer, first, count).copy_(noise(count * self.page_bytes, place, generator))

    def poison(self) -> None:
        """Fill the KV cache."""
        for storage in self.storages:
            storage.fill_(POISON)

    def pool_pages(self, layer: int, move: Move) -> torch.Tensor:
        """`uint8[count, page_bytes]` beside the KV cache: what the pool holds of a move."""
        spans = [self.pool.span(layer, first, count) for first, count in move.pool_runs]
        return torch.cat([span.to(self.storages[0].device) for span in spans]).view(move.count, self.page_bytes)

    def wrong_after_load(self, move: Move) -> list[str]:
        """Layers in which a load into a poisoned cache left other bytes than it should."""
        ids = move.blocks.long()
        others = torch.ones(self.blocks, dtype=torch.bool, device=ids.device)
        others[ids] = False
        wrong = []
        for layer in range(self.layers):
            if not torch.equal(self.pages(layer)[ids], self.pool_pages(layer, move)):
                wrong.append(f"layer {layer}: loaded bytes differ")
            if not bool((self.pages(layer)[others] == POISON).all()):
                wrong.append(f"layer {layer}: blocks that were not to be loaded changed")
        return wrong

    def wrong_after_save(self, move: Move) -> list[str]:
        """Layers of which the pool holds other bytes than the KV cache."""
        ids = move.blocks.long()
        return [
            f"layer {layer}: saved bytes differ"
            for layer in range(self.layers)
            if not torch.equal(self.pages(layer)[ids], self.pool_pages(layer, move))
        ]


def noise(nbytes: int, place: torch.device, generator: torch.Generator) -> torch.Tensor:
    """`uint8[nbytes]` of random bytes."""
    words = -(-nbytes // 8)
    drawn = torch.randint(-(2**63), 2**63 - 1, (words,), dtype=torch.int64, device=place, generator=generator)
    return drawn.view(torch.uint8)[:nbytes]


def dense_layer(name: str, blocks: int, page_bytes: int) -> LayerPages:
    """Pages one behind another."""
    return LayerPages(
        name=name, num_pages=blocks, offset=0, page_stride=page_bytes, run_offsets=(0,), run_bytes=page_bytes
    )


@contextmanager
def world(
    bench: Bench,
    *,
    layers: int,
    blocks: int,
    page_bytes: int,
    pool_pages: int,
    device: Device | None = None,
) -> Iterator[World]:
    """A world, taken down at the end.

    Args:
        bench: where.
        layers: of the model.
        blocks: of the KV cache.
        page_bytes: bytes of one block of one layer.
        pool_pages: least blocks that the pool can hold; all of them are usable at once.
        device: instead of the one that belongs to the place.
    """
    found, pinner, kernels = open_device(bench.place)
    device = found if device is None else device
    slot = layers * (CHUNK_BLOCKS * page_bytes + 4096)
    pool = HostPool(
        page_bytes=[page_bytes] * layers,
        chunk_blocks=CHUNK_BLOCKS,
        # Segments lose what is no whole slot.
        budget_bytes=(-(-pool_pages // CHUNK_BLOCKS) + 1) * slot * 17 // 16,
        pin=pinner,
    )
    try:
        pool.start_pinning()
        if pool.pinned:
            wait_for(lambda: pool.final, PIN_S)
        if pool.ready_slots * CHUNK_BLOCKS < pool_pages:
            raise RuntimeError(f"{pool.ready_slots} slots of the host pool can be used; the log says why")
        yield World(device, pool, kernels, layers=layers, blocks=blocks, page_bytes=page_bytes)
    finally:
        bench.finish()
        device.close(HANG_S)
        if device is not found:
            found.close(HANG_S)
        pool.close()
