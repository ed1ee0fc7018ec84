"""The rows of a batch: what is one copy, and where it goes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from layerstream.geometry import KVGeometry, LayerPages
from layerstream.host_pool import HostPool
from layerstream.pipeline.base import Move
from layerstream.pipeline.batch_dma import BatchDmaPath
from layerstream.pipeline.paged_cache import PagedCache
from layerstream.streams.cpu import CpuDevice

BLOCKS = 16


def planes(name: str, offset: int) -> LayerPages:
    """Pages of two runs of 64 bytes: one in each of two planes."""
    return LayerPages(
        name=name,
        num_pages=BLOCKS,
        offset=offset,
        page_stride=64,
        run_offsets=(0, BLOCKS * 64),
        run_bytes=64,
    )


def dense(name: str, offset: int) -> LayerPages:
    return LayerPages(name=name, num_pages=BLOCKS, offset=offset, page_stride=128, run_offsets=(0,), run_bytes=128)


class Rig:
    def __init__(self, *layers: LayerPages) -> None:
        self.storages = [torch.zeros(4096, dtype=torch.uint8) for _ in layers]
        self.pool = HostPool(page_bytes=[128] * len(layers), chunk_blocks=4, budget_bytes=1 << 16)
        geometry = KVGeometry(layers=layers, num_blocks=BLOCKS, block_tokens=1)
        self.device = CpuDevice()
        self.cache = PagedCache(geometry, self.storages)
        self.path = BatchDmaPath(device=self.device, cache=self.cache, pool=self.pool)

    def rows(self, layer: int, ids: list[int], *runs: tuple[int, int]) -> list[tuple[int, int, int]]:
        """(bytes into the storage, bytes into the layer's pages of the pool, length) of each row."""
        move = Move(ids, torch.tensor(ids, dtype=torch.int32), runs)
        rows: Any = self.path._rows(layer, move)
        cached = rows.cached.astype(np.int64) - self.storages[layer].data_ptr()
        pooled = rows.pooled.astype(np.int64) - self.pool.span(layer, 0, 1).data_ptr()
        return list(zip(cached.tolist(), pooled.tolist(), rows.nbytes.tolist(), strict=True))


def test_blocks_that_follow_each_other_on_both_sides_are_one_row() -> None:
    rig = Rig(dense("a", 0))
    assert rig.rows(0, [3, 4, 5], (8, 3)) == [(3 * 128, 8 * 128, 3 * 128)]
    assert rig.rows(0, [3, 4, 5], (8, 2), (11, 1)) == [(3 * 128, 8 * 128, 256), (5 * 128, 11 * 128, 128)]
    assert rig.rows(0, [5, 4, 3], (8, 3)) == [((5 - i) * 128, (8 + i) * 128, 128) for i in range(3)]


def test_a_page_of_several_runs_is_a_row_for_each() -> None:
    rig = Rig(planes("a", 0))
    assert rig.rows(0, [3, 4], (0, 2)) == [(192, 0, 64), (1216, 64, 64), (256, 128, 64), (1280, 192, 64)]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_alike_layers_share_rows_and_differ_by_where_they_lie(layer: int) -> None:
    rig = Rig(dense("a", 0), dense("b", 256), planes("c", 512))
    ids = torch.tensor([7, 2, 3], dtype=torch.int32)
    move = Move(ids.tolist(), ids, [(4, 3)])
    for index in (0, 1, 2):
        rig.path._rows(index, move)
    assert len(move.memo) == 2
    pages = rig.cache.layers[layer]
    rows: Any = rig.path._rows(layer, move)
    assert rows.cached[0] == rig.storages[layer].data_ptr() + pages.offset + 7 * pages.page_stride
    assert rows.pooled[0] == rig.pool.span(layer, 4, 1).data_ptr()
    assert rows.nbytes.sum() == 3 * 128


def test_rows_end_where_segments_of_the_pool_do_though_they_lie_side_by_side() -> None:
    page = 4096
    pages = LayerPages(name="a", num_pages=BLOCKS, offset=0, page_stride=page, run_offsets=(0,), run_bytes=page)
    memory = torch.zeros(8 * page, dtype=torch.uint8)
    segments = [memory[: 4 * page], memory[4 * page :]]
    with mock.patch.object(HostPool, "_map", return_value=segments):
        pool = HostPool(page_bytes=[page], chunk_blocks=4, budget_bytes=8 * page, segment_bytes=4 * page)
    assert pool.pages_per_segment == 4
    geometry = KVGeometry(layers=(pages,), num_blocks=BLOCKS, block_tokens=1)
    cache = PagedCache(geometry, [torch.zeros(BLOCKS * page, dtype=torch.uint8)])
    device = CpuDevice()
    path = BatchDmaPath(device=device, cache=cache, pool=pool)
    ids = torch.tensor([2, 3, 4, 5], dtype=torch.int32)
    rows: Any = path._rows(0, Move(ids.tolist(), ids, pool.split(2, 4)))
    assert rows.nbytes.tolist() == [2 * page, 2 * page], "a copy must not span two registrations"
    assert device.close(5.0)
