"""Pages of one size on this machine's device, and a clock for what is queued on its streams.

The device is the GPU where there is one, else the CPU device, whose streams are threads.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from layerstream.backends import open_device, open_path
from layerstream.geometry import KVGeometry, LayerPages
from layerstream.host_pool import HostPool
from layerstream.pipeline.base import Move, TransferPath
from layerstream.pipeline.paged_cache import PagedCache
from layerstream.streams.base import CopyBatch, Event, Stream

LAYERS = 4
"""Moved by one transfer, a layer a submission."""
LAYER_BYTES = {"cuda": 64 << 20, "cpu": 8 << 20}
"""Bytes of a layer that one transfer moves: enough that starting up is no part of the rate."""
STAGING_BYTES = 64 << 20
HANG_S = 60.0


class DeviceRig:
    """KV cache and host pool with pages of `page_bytes`, every second block of the cache listed in random order."""

    def __init__(self, page_bytes: int) -> None:
        place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.device, pinner, self.kernels = open_device(place)
        self.page_bytes = page_bytes
        self.count = max(1, LAYER_BYTES[self.device.kind] // page_bytes)
        self.layer_bytes = self.count * page_bytes
        num_pages = 2 * self.count
        self.pages = tuple(
            LayerPages(
                name=f"layer.{layer}",
                num_pages=num_pages,
                offset=0,
                page_stride=page_bytes,
                run_offsets=(0,),
                run_bytes=page_bytes,
            )
            for layer in range(LAYERS)
        )
        self.storages = [self.device.empty(num_pages * page_bytes) for _ in range(LAYERS)]
        for storage in self.storages:
            storage.zero_()
        geometry = KVGeometry(layers=self.pages, num_blocks=num_pages, block_tokens=16)
        self.cache = PagedCache(geometry, self.storages)
        self.pool = HostPool(
            page_bytes=[page_bytes] * LAYERS,
            chunk_blocks=self.count,
            budget_bytes=LAYERS * (self.layer_bytes + 4096),
            pin=pinner,
        )
        source = np.random.default_rng(0)
        for layer in range(LAYERS):
            self.host(layer).copy_(torch.from_numpy(source.integers(0, 256, self.layer_bytes, dtype=np.uint8)))
        self.ids = random.Random(0).sample(range(num_pages), self.count)
        self.move = Move(self.ids, self.device.table(self.ids), self.pool.split(0, self.count))
        self.stream = self.device.stream("bench", priority=0)

    def host(self, layer: int) -> torch.Tensor:
        """The pool's pages of a layer: `uint8[layer_bytes]`."""
        return self.pool.span(layer, 0, self.count)

    def path(self, name: str) -> TransferPath:
        """One of the transfer paths."""
        return open_path(
            name,
            device=self.device,
            cache=self.cache,
            pool=self.pool,
            kernels=self.kernels,
            staging_bytes=STAGING_BYTES,
        )

    def wait(self, event: Event) -> None:
        """Wait until `event` is done."""
        deadline = time.monotonic() + HANG_S
        while not event.done():
            assert time.monotonic() < deadline, "a transfer hangs"
            time.sleep(50e-6)

    def timed(self, queue: Callable[[Stream], None]) -> float:
        """Seconds that what `queue` puts on one stream takes there."""
        begun, done = self.device.event(), self.device.event()
        self.stream.record(begun)
        queue(self.stream)
        self.stream.record(done)
        self.wait(done)
        return self.device.elapsed(begun, done)

    def transfer(self, path: TransferPath, direction: str) -> float:
        """Seconds from the first byte of a transfer over all layers to its last."""
        after = self.device.event()
        self.device.compute().record(after)
        begins: list[Event] = []
        for layer in range(LAYERS):
            begun, joined, done = (self.device.event() for _ in range(3))
            self.submit(path, direction, layer, after, (begun, joined, done))
            begins.append(begun)
        self.wait(done)
        return self.device.elapsed(begins[0], done)

    def submit(
        self, path: TransferPath, direction: str, layer: int, after: Event, events: tuple[Event, Event, Event]
    ) -> None:
        """Queue one layer; `events` are begun, joined and done."""
        begun, joined, done = events
        if direction == "load":
            path.load((layer,), self.move, after=after, begun=begun, done=done)
        else:
            path.save((layer,), self.move, after=after, begun=begun, joined=joined, done=done)

    def page(self, layer: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The KV cache's and the pool's memory of the `index`-th listed page."""
        first = self.ids[index] * self.page_bytes
        return self.storages[layer][first : first + self.page_bytes], self.pool.span(layer, index, 1)

    def plain_copies(self, stream: Stream, direction: str) -> None:
        """The roof: as many bytes in one copy a layer, dense on both sides."""
        for layer in range(LAYERS):
            dense, host = self.storages[layer][: self.layer_bytes], self.host(layer)
            stream.copy(*((dense, host) if direction == "load" else (host, dense)))

    def page_copies(self, stream: Stream, direction: str) -> None:
        """Every page by a call of its own."""
        for layer in range(LAYERS):
            for index in range(self.count):
                cached, pooled = self.page(layer, index)
                stream.copy(*((cached, pooled) if direction == "load" else (pooled, cached)))

    def batch_of(self, layer: int, direction: str) -> CopyBatch:
        """Every page of a layer as a row."""
        size = np.uint64(self.page_bytes)
        cached = np.array(self.ids, dtype=np.uint64) * size + np.uint64(self.storages[layer].data_ptr())
        pooled = np.arange(self.count, dtype=np.uint64) * size + np.uint64(self.host(layer).data_ptr())
        targets, sources = (cached, pooled) if direction == "load" else (pooled, cached)
        return CopyBatch(targets, sources, np.full(self.count, size))

    def rows(self, layer: int) -> torch.Tensor:
        """The KV cache as torch indexes it: `int64[pages, page_bytes / 8]`."""
        return self.storages[layer].view(torch.int64).view(-1, self.page_bytes // 8)

    def index(self) -> torch.Tensor:
        """The listed pages as torch wants them: `int64[count]` on the device, to be used on any stream."""
        index = self.move.blocks.to(torch.int64)
        self.finish()
        return index

    def differ(self) -> None:
        """Give the KV cache random bytes, other than the pool's."""
        source = torch.Generator().manual_seed(1)
        for storage in self.storages:
            storage.copy_(torch.randint(0, 256, storage.shape, dtype=torch.uint8, generator=source))
        self.finish()

    def finish(self) -> None:
        """Wait for all work of the compute stream."""
        event = self.device.event()
        self.device.compute().record(event)
        self.wait(event)

    def is_exact(self) -> bool:
        """Whether every listed page of every layer holds the same bytes in the KV cache and in the pool."""
        index = self.index()
        return all(
            torch.equal(self.rows(layer)[index].cpu().view(-1), self.host(layer).view(torch.int64))
            for layer in range(LAYERS)
        )

    def close(self) -> None:
        """Free everything."""
        assert self.device.close(HANG_S)
        self.pool.close()


def facts(rig: DeviceRig, nbytes: int, pairs: list[tuple[float, float]]) -> str:
    """Rates of both sides of (roof, measured) pairs, for a row's note."""
    roof, ours = (float(np.median(side)) for side in zip(*pairs, strict=True))
    memory = "" if rig.device.kind == "cpu" else ", host memory pinned" if rig.pool.pinned else ", host memory pageable"
    return (
        f"{nbytes / 1e6:.0f} MB in {rig.count} scattered pages a layer{memory}; {nbytes / ours / 1e9:.2f} GB/s against "
        f"{nbytes / roof / 1e9:.2f} GB/s of plain copies in the same run (medians)"
    )


def size_name(page_bytes: int) -> str:
    """A page's size in rows' names."""
    return f"{page_bytes >> 10} KiB pages"


def on_gpu(target: Any) -> Any | None:
    """A target that was set for GPUs, where there is one."""
    return target if torch.cuda.is_available() else None
