"""Paged to packed, on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layerstream.geometry import LayerPages
from layerstream.kernels.operands import DEFAULT_MAX_CTAS, check_operands
from layerstream.kernels.segments import (
    NOT_SPECIALIZED,
    NOT_SPECIALIZED_ON_ALIGNMENT,
    launch,
    launch_bytes,
    locate,
)


def gather_pages(
    dst: torch.Tensor,
    src: torch.Tensor,
    layer: LayerPages,
    blocks: torch.Tensor,
    *,
    count: torch.Tensor | None = None,
    max_ctas: int = DEFAULT_MAX_CTAS,
) -> None:
    """Copy pages out of a layer's storage, one behind another, on the current stream.

    Args:
        dst: `uint8[>= n * layer.page_bytes]`; page `blocks[i]` goes to `i * layer.page_bytes`.
        src: `uint8[>= layer.end]`, the layer's storage from its first byte.
        layer: where pages lie in `src`.
        blocks: `int32[n]` on the device. An id that is negative or not below `layer.num_pages` is skipped: its place
            in `dst` keeps its bytes. A repeated id is read again.
        count: `int32[1]` on the device; only the first `count` ids are used. None: all.
        max_ctas: most thread blocks to occupy. A copy that shares the GPU with the model can ask for fewer.

    Raises:
        GeometryError: an operand does not fit; nothing was launched.
    """
    check_operands(paged=src, packed=dst, layer=layer, blocks=blocks, count=count, max_ctas=max_ctas)
    launch(gather_kernel, dst, src, layer, blocks, count, max_ctas)


@triton.jit(
    do_not_specialize=NOT_SPECIALIZED,
    do_not_specialize_on_alignment=NOT_SPECIALIZED_ON_ALIGNMENT,
    launch_metadata=launch_bytes,
)
def gather_kernel(
    dst: tl.tensor,  # packed pages
    src: tl.tensor,  # paged storage
    blocks: tl.tensor,
    count: tl.tensor,
    run_table: tl.tensor,
    num_blocks: tl.int32,
    num_pages: tl.int32,
    offset_words: tl.int64,
    PAGE_STRIDE: tl.constexpr,
    RUN_STRIDE: tl.constexpr,
    RUN_BYTES: tl.constexpr,
    RUNS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORD: tl.constexpr,
    ELEMENT: tl.constexpr,
) -> None:
    """Copy tiles `program_id, program_id + num_programs, ...` of the listed pages from `src` to `dst`."""
    pages = num_blocks
    if count is not None:
        pages = tl.minimum(pages, tl.load(count))
    packed_base = tl.multiple_of(dst.to(tl.pointer_type(ELEMENT)), WORD)
    paged_base = tl.multiple_of(src.to(tl.pointer_type(ELEMENT)), WORD)
    for tile in range(tl.program_id(0), (pages * (RUNS * SEGMENTS) + ROWS - 1) // ROWS, tl.num_programs(0)):
        paged, packed, mask = locate(
            tile,
            blocks,
            run_table,
            pages,
            num_pages,
            offset_words,
            PAGE_STRIDE,
            RUN_STRIDE,
            RUN_BYTES,
            RUNS,
            SEGMENTS,
            ROWS,
            COLUMNS,
            WORD,
            ELEMENT,
        )
        tl.store(packed_base + packed, tl.load(paged_base + paged, mask=mask), mask=mask)
