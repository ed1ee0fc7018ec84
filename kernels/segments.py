"""How a launch divides pages among thread blocks: into *segments*, equal stretches of runs.

A *word* is the widest access (16, 8, 4, 2 or 1 bytes) that every address of a copy allows. A run is cut into segments
of `columns` words; the segments of all pages of a layer, in packed order, are numbered from 0, and a *tile* is `rows`
of them, 1024 words in all (2048 with host memory), which one thread block copies at a time. A tile is of one layer, so
where that lies is found out once for all its rows; the tiles of a launch count through the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from layerstream.geometry import LayerPages
from layerstream.kernels.operands import run_stride

WORDS_PER_TILE = 1024
"""8 words for each of 128 threads, all loaded before the first is stored: 16 KiB in flight for one thread block, in
few enough registers that seven or more blocks fit a multiprocessor."""
HOST_WORDS_PER_TILE = 2 * WORDS_PER_TILE
"""As many words for each of 256 threads: 32 KiB in flight for each of the few blocks that reach host memory."""
WORDS_PER_WARP = 256
WORDS = (16, 8, 4, 2, 1)
"""Access widths in bytes, widest first; 16 is the widest that Triton emits."""
_WARP_WORDS = 32
"""One warp's instruction; a segment is shorter only where the run is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How one layout is cut: compile-time constants of its kernels."""

    word: int
    """Bytes of one access."""
    columns: int
    """Words in a segment, a power of two."""
    rows: int
    """Segments in a tile, a power of two."""
    segments: int
    """Segments in a run; the last may be cut short."""

    @classmethod
    def of(cls, run_bytes: int, word: int, words_per_tile: int = WORDS_PER_TILE) -> Tiling:
        """The longest segments that leave at most one lane in eight idle, else those that leave the fewest idle.

        Long segments need fewer ids and divisions; idle lanes cost the bytes they do not move.
        """
        run_words = run_bytes // word
        longest = min(words_per_tile, triton.next_power_of_2(run_words))
        lengths = [longest]
        while lengths[-1] > _WARP_WORDS:
            lengths.append(lengths[-1] // 2)
        idle = {columns: -run_words % columns for columns in lengths}
        fitting = [columns for columns in lengths if 8 * idle[columns] <= run_words + idle[columns]]
        columns = fitting[0] if fitting else min(lengths, key=idle.__getitem__)
        return cls(word=word, columns=columns, rows=words_per_tile // columns, segments=triton.cdiv(run_words, columns))


def kernel_constants(layer: LayerPages, tiling: Tiling, host: bool) -> dict[str, Any]:
    """The `constexpr` arguments of a kernel for `layer`."""
    return {
        "PAGE_STRIDE": layer.page_stride,
        "RUN_STRIDE": run_stride(layer) or 0,
        "RUN_BYTES": layer.run_bytes,
        "RUNS": len(layer.run_offsets),
        "SEGMENTS": tiling.segments,
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "WORD": tiling.word,
        "ELEMENT": getattr(tl, f"int{8 * min(tiling.word, 8)}"),
        "HOST": host,
    }


@triton.jit
def locate(
    tile: tl.tensor,
    tiles: tl.tensor,
    blocks: tl.tensor,
    run_table: tl.tensor,
    places: tl.tensor,
    layer_starts: tl.tensor,
    layer_places: tl.tensor,
    first_layer: tl.tensor,
    num_blocks: tl.tensor,
    pages: tl.tensor,
    num_pages: tl.tensor,
    offset_words: tl.tensor,
    PAGE_STRIDE: tl.constexpr,
    RUN_STRIDE: tl.constexpr,
    RUN_BYTES: tl.constexpr,
    RUNS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORD: tl.constexpr,
    ELEMENT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Where the elements of one tile lie: offsets on the paged and the packed side, and which of them to move.

    Example: pages of 2 runs of 3 words and COLUMNS = 2 give 2 segments a run and 4 a page. Segment 6 is page 1, run 1,
    words 0 and 1; segment 7 is page 1, run 1, word 2 and a masked word.

    Args:
        tile: of `tiles` in each layer.
        pages: in use, of `num_blocks` listed.

    Returns:
        paged, packed: `int64[ROWS, COLUMNS * WORD // size]` in elements of `size` bytes.
        mask: same shape; False past the end of a run or of the list, and for ids that are negative or too large.
    """
    # Strides and table entries are multiples of the word. Scaling by constants keeps that visible to the compiler,
    # which then joins the elements of a word into one access.
    SIZE: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    WIDTH: tl.constexpr = COLUMNS * WORD // SIZE
    if layer_starts is None:
        start = offset_words.to(tl.int64) * (WORD // SIZE)
    else:
        layer = tile // tiles
        tile -= layer * tiles
        start = tl.load(layer_starts + first_layer + layer) // WORD * (WORD // SIZE)
    # Unsigned, since that makes divisions by constants cheaper.
    segment = (tile * ROWS + tl.arange(0, ROWS)).to(tl.uint32)
    run_index = segment // SEGMENTS
    run = run_index % RUNS
    index = (run_index // RUNS).to(tl.int32)
    listed = index < pages
    page = tl.load(blocks + index, mask=listed, other=-1)
    moved = listed & (page >= 0) & (page < num_pages)
    start += page.to(tl.int64) * (PAGE_STRIDE // SIZE)
    if run_table is None:
        start += run.to(tl.int64) * (RUN_STRIDE // SIZE)
    else:
        start += tl.load(run_table + run) * (WORD // SIZE)
    if places is None:
        if layer_starts is not None:
            # A layer's packed pages leave room for the whole list, whatever the count.
            run_index += layer * num_blocks * RUNS
        place = run_index.to(tl.int64) * (RUN_BYTES // SIZE)
    else:
        place = tl.load(places + index, mask=listed, other=0) // WORD * (WORD // SIZE)
        place += run.to(tl.int64) * (RUN_BYTES // SIZE)
        if layer_places is not None:
            place += tl.load(layer_places + first_layer + layer) // WORD * (WORD // SIZE)
    element = (segment % SEGMENTS * WIDTH).to(tl.int32)[:, None] + tl.arange(0, WIDTH)[None, :]
    return start[:, None] + element, place[:, None] + element, moved[:, None] & (element < RUN_BYTES // SIZE)
