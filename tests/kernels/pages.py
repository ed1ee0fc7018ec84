"""Layouts, block lists and slow oracles for the page copies."""

from __future__ import annotations

import mmap

import torch

from layerstream.geometry import LayerPages, layer_pages

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
