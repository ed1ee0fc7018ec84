"""Layouts, block lists and slow oracles for the page copies."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace
from random import Random

import torch

from layerstream.geometry import LayerPages, layer_pages
from layerstream.kernels.stack import PageStack

POISON = 0xA5


def dense(page_bytes: int, *, num_pages: int = 7, gap: int = 0, offset: int = 0) -> LayerPages:
    return LayerPages(
        name="dense",
        num_pages=num_pages,
        offset=offset,
        page_stride=page_bytes + gap,
        run_offsets=(0,),
        run_bytes=page_bytes,
    )


def _viewed(shape: tuple[int, ...], strides: tuple[int, ...], *, num_blocks: int = 5, offset: int = 0) -> LayerPages:
    return layer_pages(
        name="viewed", shape=shape, strides=strides, itemsize=2, storage_offset=offset, num_blocks=num_blocks
    )


LAYOUTS = {
    "96 bytes": dense(96),
    "656 bytes, gap, offset": dense(656, gap=32, offset=48),
    "8 bytes": dense(8),
    "6 bytes": dense(6, offset=2),
    "3 bytes": dense(3, gap=2, offset=1),
    "several tiles": dense(2 * 16384 + 656, num_pages=6),
    # [2, blocks, tokens, heads, size]: keys and values in two planes, blocks inside each.
    "planes": _viewed((5, 2, 4, 2, 8), (64, 320, 16, 8, 1)),
    # [heads, blocks, tokens, size]: pages interleave.
    "heads outermost": _viewed((5, 3, 4, 8), (32, 160, 8, 1)),
    # [blocks, layers, heads, tokens, size], the second of three layers.
    "cross-layer": _viewed((5, 2, 4, 8), (192, 32, 8, 1), offset=64),
    # Two kernel blocks make one block; [heads, kernel blocks, tokens, size].
    "split, heads outermost": _viewed((10, 3, 2, 8), (16, 160, 8, 1)),
    "unequal runs": LayerPages(
        name="unequal", num_pages=6, offset=16, page_stride=400, run_offsets=(0, 48, 144), run_bytes=32
    ),
    "late run": LayerPages(name="late", num_pages=6, offset=0, page_stride=40, run_offsets=(8,), run_bytes=24),
}

BLOCKS = {
    "consecutive": [1, 2, 3],
    "scattered": [4, 0, 3],
    "all": [0, 1, 2, 3, 4],
    "one": [2],
    "skip first": [-1, 4, 1],
    "skip middle": [3, -1, -7, 1],
    "skip last": [0, 1, -1],
    "up through zero": [-2, -1, 0, 1],
    "skip all": [-1, -1],
    "empty": [],
}


def positions(layer: LayerPages) -> torch.Tensor:
    """`int64[pages, page bytes]`: where each byte of each page lies in the storage."""
    rows = []
    for page in range(layer.num_pages):
        starts = [layer.offset + page * layer.page_stride + run for run in layer.run_offsets]
        rows.append(torch.cat([torch.arange(start, start + layer.run_bytes) for start in starts]))
    return torch.stack(rows)


def gathered(dst: torch.Tensor, src: torch.Tensor, where: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """What `dst` must hold after a gather, byte by byte."""
    dst, page_bytes = dst.clone(), where.shape[1]
    for index, block in enumerate(blocks):
        if block >= 0:
            dst[index * page_bytes : (index + 1) * page_bytes] = src[where[block]]
    return dst


def scattered(dst: torch.Tensor, src: torch.Tensor, where: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """What `dst` must hold after a scatter, byte by byte."""
    dst, page_bytes = dst.clone(), where.shape[1]
    for index, block in enumerate(blocks):
        if block >= 0:
            dst[where[block]] = src[index * page_bytes : (index + 1) * page_bytes]
    return dst


def ids(blocks: list[int]) -> torch.Tensor:
    return torch.tensor(blocks, dtype=torch.int32)


def offsets(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def noise(nbytes: int) -> torch.Tensor:
    """Bytes that repeat with a prime period, so that no shift by a power of two goes unseen; never `POISON`."""
    values = [251 if value == POISON else value for value in range(251)]
    return torch.tensor(values, dtype=torch.uint8).repeat(nbytes // 251 + 1)[:nbytes]


def poisoned(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), POISON, dtype=torch.uint8)


def virtual(nbytes: int) -> torch.Tensor:
    """Zeros that take memory only where they are written."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.12
    return torch.frombuffer(
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve), dtype=torch.uint8
    )


def far(word: int) -> LayerPages:
    """Page 4 starts `36 * word` bytes after 2**32 words: in 32 bits its offset would wrap to just that."""
    return LayerPages(
        name="far",
        num_pages=5,
        offset=word,
        page_stride=word * (2**30 + 9),
        run_offsets=(0, word * 2**29),
        run_bytes=16 * word,
    )


def stacked(layer: LayerPages, layers: int, *, shared: bool, fill: Callable[[int], torch.Tensor]) -> PageStack:
    """Layers like `layer`, in one storage or each in its own, later ones at lower addresses; with room after each."""
    step = -(-(layer.end + 5) // 16) * 16
    if shared:
        storage = fill(layers * step)
        moved = [
            replace(layer, name=f"layer {i}", offset=layer.offset + (layers - 1 - i) * step) for i in range(layers)
        ]
        return PageStack([storage] * layers, moved)
    storages = sorted((fill(step) for _ in range(layers)), key=torch.Tensor.data_ptr, reverse=True)
    return PageStack(storages, [replace(layer, name=f"layer {i}") for i in range(layers)])


class Strewn:
    """Packed pages of several layers in three allocations, in pairs and otherwise in no order. Each allocation holds
    all layers, as a segment of the host pool does. Pages that are not in use get places that no memory has."""

    def __init__(
        self,
        layer: LayerPages,
        used: list[int],
        listed: int,
        *,
        layers: int = 1,
        gap: int,
        fill: Callable[[int], torch.Tensor],
    ) -> None:
        self.page_bytes, self.layers = layer.page_bytes, layers
        random, unit, pairs = Random(listed), layer.alignment, listed // 2 + 1
        self._step = layer.page_bytes + gap * unit
        self._layer_step = 2 * pairs * self._step + 3 * unit
        self.memory = [fill(layers * self._layer_step + 7 * unit) for _ in range(3)]
        starts = random.sample([(memory, 2 * pair) for memory in range(3) for pair in range(pairs)], pairs)
        self._spots = [(memory, slot + second) for memory, slot in starts for second in range(2)][:listed]
        self._order = random.sample(range(layers), layers)
        middle = self.memory[1].numel() // 2 // unit * unit
        self.base = self.memory[1][middle : middle + 1]
        places = [
            self.memory[memory].data_ptr() + slot * self._step - self.base.data_ptr() for memory, slot in self._spots
        ]
        wanted = [index < len(used) and used[index] >= 0 for index in range(listed)]
        self.places = offsets([place if want else 2**61 for place, want in zip(places, wanted, strict=True)])
        self.layer_places = offsets([5 * unit + place * self._layer_step for place in self._order])

    def page(self, memory: list[torch.Tensor], index: int, layer: int | None) -> torch.Tensor:
        """The bytes in `memory` of page `index` of a layer of a stack, or of a layer alone."""
        where, slot = self._spots[index]
        start = slot * self._step
        if layer is not None:
            start += self._order[layer] * self._layer_step + int(self.layer_places.min())
        return memory[where][start : start + self.page_bytes]

    def copies(self) -> list[torch.Tensor]:
        return [memory.clone() for memory in self.memory]
