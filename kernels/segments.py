"""How a launch divides pages among thread blocks: into *segments*, equal stretches of runs.

A *word* is the widest access (16, 8, 4, 2 or 1 bytes) that every address of a copy allows. A run is cut into segments
of `columns` words; the segments of all pages, in packed order, are numbered from 0, and a *tile* is `rows` of them,
1024 words in all, which one thread block copies at a time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from layerstream.errors import GeometryError
from layerstream.geometry import LayerPages
from layerstream.kernels.operands import run_stride

WORDS_PER_TILE = 1024
"""8 words for each of 128 threads, all loaded before the first is stored: 16 KiB in flight for one thread block, in
few enough registers that seven or more blocks fit a multiprocessor."""
NUM_WARPS = 4
WORDS = (16, 8, 4, 2, 1)
"""Access widths in bytes, widest first; 16 is the widest that Triton emits."""
_WARP_WORDS = 32
"""One warp's instruction; a segment is shorter only where the run is."""
_MAX_SEGMENTS = 2**30
"""Segments are numbered in 32 bits, and a thread block's last step may count past the end."""

# Nothing that differs between steps, layers or buffers may select another compiled kernel: it would be compiled while
# requests wait. Kernels rely on the word instead, which the layout decides.
NOT_SPECIALIZED = ("num_blocks", "num_pages", "offset_words")
NOT_SPECIALIZED_ON_ALIGNMENT = ("dst", "src", "blocks", "count", "run_table")


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
    def of(cls, run_bytes: int, word: int) -> Tiling:
        """The longest segments that leave at most one lane in eight idle, else those that leave the fewest idle.

        Long segments need fewer ids and divisions; idle lanes cost the bytes they do not move.
        """
        run_words = run_bytes // word
        longest = min(WORDS_PER_TILE, triton.next_power_of_2(run_words))
        lengths = [longest]
        while lengths[-1] > _WARP_WORDS:
            lengths.append(lengths[-1] // 2)
        idle = {columns: -run_words % columns for columns in lengths}
        fitting = [columns for columns in lengths if 8 * idle[columns] <= run_words + idle[columns]]
        columns = fitting[0] if fitting else min(lengths, key=idle.__getitem__)
        return cls(word=word, columns=columns, rows=WORDS_PER_TILE // columns, segments=triton.cdiv(run_words, columns))


def kernel_constants(layer: LayerPages, tiling: Tiling) -> dict[str, Any]:
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
    }


def launch(
    kernel: Any,
    dst: torch.Tensor,
    src: torch.Tensor,
    layer: LayerPages,
    blocks: torch.Tensor,
    count: torch.Tensor | None,
    max_ctas: int,
) -> None:
    """Start a gather or scatter kernel on the current stream, with no more thread blocks than there are tiles.

    The first launch of a layout on a device compiles it and, for unequally spaced runs, uploads their offsets, which
    waits for the device; one launch with all ids negative does both and moves nothing.

    Raises:
        GeometryError: more than 2**30 segments in one launch.
    """
    listed = blocks.numel()
    if listed == 0:
        return
    tiling, constants, run_words = _plan(layer, _alignment(dst.data_ptr() | src.data_ptr()))
    segments = listed * constants["RUNS"] * tiling.segments
    if segments > _MAX_SEGMENTS:
        raise GeometryError(
            f"layer {layer.name!r}: {listed} blocks are {segments} segments and one launch numbers {_MAX_SEGMENTS}; "
            "pass the blocks in several launches"
        )
    kernel[(min(max_ctas, triton.cdiv(segments, tiling.rows)),)](
        dst,
        src,
        blocks,
        count,
        run_words and _run_table(run_words, dst.device),
        listed,
        layer.num_pages,
        layer.offset // tiling.word,
        **constants,
        num_warps=NUM_WARPS,
    )


def launch_bytes(grid: tuple[int, ...], kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """What a profiler shows for a launch: bytes read and written if every listed page moves."""
    return {"name": kernel.name, "bytes": 2 * args["num_blocks"] * args["RUNS"] * args["RUN_BYTES"]}


@triton.jit
def locate(
    tile: tl.tensor,
    blocks: tl.tensor,
    run_table: tl.tensor,
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

    Returns:
        paged, packed: `int64[ROWS, COLUMNS * WORD // size]` in elements of `size` bytes.
        mask: same shape; False past the end of a run or of the list, and for ids that are negative or too large.
    """
    # Strides are multiples of the word. Scaling by constants keeps that visible to the compiler, which then joins the
    # elements of a word into one access.
    SIZE: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    WIDTH: tl.constexpr = COLUMNS * WORD // SIZE
    segment = tile * ROWS + tl.arange(0, ROWS)
    run_index = segment // SEGMENTS
    index = run_index // RUNS
    listed = index < pages
    page = tl.load(blocks + index, mask=listed, other=-1)
    moved = listed & (page >= 0) & (page < num_pages)
    start = offset_words.to(tl.int64) * (WORD // SIZE) + page.to(tl.int64) * (PAGE_STRIDE // SIZE)
    if run_table is None:
        start += (run_index % RUNS).to(tl.int64) * (RUN_STRIDE // SIZE)
    else:
        start += tl.load(run_table + run_index % RUNS) * (WORD // SIZE)
    element = (segment % SEGMENTS * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    paged = start[:, None] + element
    packed = run_index.to(tl.int64)[:, None] * (RUN_BYTES // SIZE) + element
    return paged, packed, moved[:, None] & (element < RUN_BYTES // SIZE)


@functools.cache
def _plan(layer: LayerPages, pointer_alignment: int) -> tuple[Tiling, dict[str, Any], tuple[int, ...] | None]:
    """How to launch for `layer`; the offsets of its runs in words if they are not equally spaced."""
    tiling = Tiling.of(layer.run_bytes, min(layer.alignment, pointer_alignment))
    words = None if run_stride(layer) is not None else tuple(offset // tiling.word for offset in layer.run_offsets)
    return tiling, kernel_constants(layer, tiling), words


def _alignment(pointers: int) -> int:
    """Largest access width that divides every one of several pointers, given or-ed together."""
    return min(WORDS[0], pointers & -pointers)


@functools.cache
def _run_table(run_words: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """`int64[runs]`. Kept for good: a launch still queued may read it, and layouts are few."""
    return torch.tensor(run_words, dtype=torch.int64, device=device)
