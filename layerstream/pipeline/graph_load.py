"""A whole load submitted as one captured graph: one upload and one launch, however many layers.

The graph holds a zero-copy launch for each layer, followed by the record of that layer's event. What differs between
loads (how many blocks, which blocks, where in the pool) is read from tables in device memory, so one graph serves every
load up to its size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from layerstream.errors import ConfigError
from layerstream.kernels.operands import pages_per_launch
from layerstream.pipeline.pool_addresses import PoolAddresses

if TYPE_CHECKING:
    import numpy.typing as npt

    from layerstream.host_pool import HostPool
    from layerstream.pipeline.base import Move
    from layerstream.pipeline.paged_cache import PagedCache, PageKernels
    from layerstream.streams.base import Device, Event, Graph

SIZES = (64, 512, 4096)
"""Blocks that the graphs take; a load uses the smallest that holds it."""
PRIORITY = 1
"""A load holds up the next layer."""


@dataclass(frozen=True, slots=True)
class _Captured:
    """One graph and its tables."""

    graph: Graph
    memory: torch.Tensor
    """`uint8`: the tables, one behind another as they are uploaded."""


class GraphLoad:
    """Captured loads of several sizes, on one stream."""

    name = "graph"

    def __init__(
        self,
        *,
        device: Device,
        cache: PagedCache,
        pool: HostPool,
        kernels: PageKernels,
        sizes: Sequence[int] = SIZES,
        max_ctas: int | None = None,
    ) -> None:
        """Compile the kernels, which a capture cannot, and capture the graphs.

        Args:
            device: where the KV cache lives; its kernels must be able to address the pool's memory.
            cache: the KV cache; all layers have pages of one size.
            pool: the host pool; pinned where the device is a GPU.
            kernels: the kernels of this device.
            sizes: blocks that the graphs take, ascending.
            max_ctas: most thread blocks a kernel may occupy; None leaves it to the kernel.

        Raises:
            ConfigError: pages differ in size.
            TransferError: the device cannot capture this.
        """
        page_bytes = {layer.page_bytes for layer in cache.layers}
        if len(page_bytes) > 1:
            raise ConfigError(
                f"graph_loads: pages of this model are of {len(page_bytes)} sizes ({sorted(page_bytes)} bytes) and all "
                "must be equal; set graph_loads to false"
            )
        self._slice = pages_per_launch(page_bytes.pop())
        self._device = device
        self._pool = pool
        self._kernels = kernels
        self._options: dict[str, Any] = {} if max_ctas is None else {"max_ctas": max_ctas}
        if device.kind == "cuda":
            self._options["packed_on_host"] = True
        self._addresses = PoolAddresses(pool, tuple(layer.page_bytes for layer in cache.layers))
        self._stream = device.stream("layerstream-graph-load", priority=PRIORITY)
        self.layer_done = tuple(device.event(in_graph=True) for _ in cache.layers)
        """Per layer: the latest submitted load has written it."""
        self._cache = cache
        self._places = [
            self._int64_table(self._addresses.layer_distances[first : first + len(stack)])
            for stack, first in zip(cache.stacks, _firsts(cache), strict=True)
        ]
        self._sizes = tuple(sizes)
        self._captured = [self._capture(blocks) for blocks in sizes]

    def takes(self, blocks: int) -> bool:
        """Whether a load of so many blocks fits one of the graphs."""
        return blocks <= self._sizes[-1]

    def table(self, move: Move) -> npt.NDArray[np.int32]:
        """What has to be uploaded for a load it takes: `int32[...]`, to be given to `submit` from device memory."""
        return self._table(self._sizes[bisect_left(self._sizes, move.count)], move.block_ids, move.pool_pages())

    def _table(
        self, blocks: int, block_ids: npt.NDArray[np.int64], pool_pages: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32]:
        count = block_ids.size
        places = np.zeros(blocks, dtype=np.int64)
        places[:count] = self._addresses.pages(0, pool_pages) - self._addresses.base
        ids = np.full(blocks, -1, dtype=np.int32)
        ids[:count] = block_ids
        left = count - np.arange(0, blocks, self._slice)
        return np.concatenate([places.view(np.int32), ids, np.clip(left, 0, self._slice).astype(np.int32)])

    def submit(self, move: Move, table: torch.Tensor, *, after: Event, begun: Event, done: Event) -> None:
        """Queue the load of every layer. `layer_done[i]` stands for layer i from here on.

        No byte of the KV cache is written before `after`, which also covers the upload of `table`. The tables of an
        earlier load are overwritten behind it, on the same stream.
        """
        captured = self._captured[bisect_left(self._sizes, move.count)]
        self._stream.wait(after)
        self._stream.copy(captured.memory, table.view(torch.uint8))
        self._stream.record(begun)
        self._stream.replay(captured.graph)
        self._stream.record(done)

    def _capture(self, blocks: int) -> _Captured:
        starts = range(0, blocks, self._slice)
        memory = self._device.empty(12 * blocks + 4 * len(starts))
        places = memory[: 8 * blocks].view(torch.int64)
        ids = memory[8 * blocks : 12 * blocks].view(torch.int32)
        counts = memory[12 * blocks :].view(torch.int32)
        base = self._pool.span(0, 0, 1)

        def queue() -> None:
            layer = 0
            for stack, layer_places in zip(self._cache.stacks, self._places, strict=True):
                for place in range(len(stack)):
                    for number, start in enumerate(starts):
                        self._stream.launch(
                            self._kernels.scatter_layers,
                            stack,
                            place,
                            1,
                            base,
                            ids[start : start + self._slice],
                            places=places[start : start + self._slice],
                            layer_places=layer_places,
                            count=counts[number : number + 1],
                            **self._options,
                        )
                    self._stream.record(self.layer_done[layer])
                    layer += 1

        nobody = np.empty(0, dtype=np.int64)
        # A run of it that moves nothing compiles every kernel.
        nothing, uploaded = self._device.table(self._table(blocks, nobody, nobody)), self._device.event()
        self._device.compute().record(uploaded)
        self._stream.wait(uploaded)
        self._stream.copy(memory, nothing.view(torch.uint8))
        queue()
        return _Captured(self._device.capture(self._stream, queue), memory)

    def _int64_table(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        return self._device.table(np.ascontiguousarray(values).view(np.int32)).view(torch.int64)


def _firsts(cache: PagedCache) -> list[int]:
    """The first layer of each stack."""
    lengths = [len(stack) for stack in cache.stacks]
    return [sum(lengths[:index]) for index in range(len(lengths))]
