"""Paged to packed, on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layerstream.geometry import LayerPages
from layerstream.kernels.launch import NOT_SPECIALIZED, NOT_SPECIALIZED_ON_ALIGNMENT, launch, launch_bytes
from layerstream.kernels.operands import check_operands
from layerstream.kernels.segments import locate
from layerstream.kernels.stack import PageStack, check_layers


def gather_pages(
    dst: torch.Tensor,
    src: torch.Tensor,
    layer: LayerPages,
    blocks: torch.Tensor,
    *,
    places: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    max_ctas: int | None = None,
    packed_on_host: bool = False,
) -> None:
    """Copy pages out of a layer's storage, on the current stream.

    Args:
        dst: `uint8[>= n * layer.page_bytes]`; page `blocks[i]` goes to `i * layer.page_bytes`, or to `places[i]`.
        src: `uint8[>= layer.end]`, the layer's storage from its first byte.
        layer: where pages lie in `src`.
        blocks: `int32[n]` on the device. An id that is negative or not below `layer.num_pages` is skipped: its place
            in `dst` keeps its bytes. A repeated id is read again.
        places: `int64[n]` on the device, multiples of `layer.alignment`: bytes from the first byte of `dst` to each
            page's packed form. They may be negative or lie past the end of `dst`, which then is only the base and may
            have any length. So nothing can check them: a wrong one overwrites other memory.
        count: `int32[1]` on the device; only the first `count` ids are used. None: all.
        max_ctas: most thread blocks to occupy. A copy that shares the GPU with the model can ask for fewer. None:
            `DEFAULT_MAX_CTAS`, or `HOST_MAX_CTAS` to host memory.
        packed_on_host: `dst` is a CPU tensor whose memory is registered with CUDA, as is all that `places` reach, at
            addresses that host and device share. The kernel writes over the bus; pass at most
            `pages_per_launch(layer.page_bytes)` blocks at once.

    Raises:
        GeometryError: an operand does not fit; nothing was launched.
        ValueError: `dst` is host memory that CUDA does not know; nothing was launched.
    """
    check_operands(
        paged=src,
        packed=dst,
        layer=layer,
        blocks=blocks,
        count=count,
        max_ctas=max_ctas,
        places=places,
        packed_on_host=packed_on_host,
    )
    launch(gather_kernel, dst, src, layer, blocks, count=count, max_ctas=max_ctas, places=places, host=packed_on_host)


def gather_layers(
    dst: torch.Tensor,
    stack: PageStack,
    first: int,
    layers: int,
    blocks: torch.Tensor,
    *,
    places: torch.Tensor | None = None,
    layer_places: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    max_ctas: int | None = None,
    packed_on_host: bool = False,
) -> None:
    """Copy the same pages out of several layers' storages by one launch, on the current stream.

    Args:
        dst: `uint8[>= layers * n * stack.page_bytes]`; page `blocks[i]` of layer l goes to
            `((l - first) * n + i) * stack.page_bytes` whatever the count, or to `layer_places[l] + places[i]`.
        stack: the layers.
        first: the first one to copy.
        layers: how many, `first .. first + layers - 1`.
        blocks: `int32[n]`, see `gather_pages`.
        places: `int64[n]`, see `gather_pages`; multiples of `stack.alignment`, and given together with `layer_places`.
        layer_places: `int64[len(stack)]` on the device, multiples of `stack.alignment`: bytes from the first byte of
            `dst` to where each layer's `places` count from. Not checked, as `places`.
        count: see `gather_pages`.
        max_ctas: see `gather_pages`.
        packed_on_host: see `gather_pages`; pass at most `pages_per_launch(layers * stack.page_bytes)` blocks at once.

    Raises:
        GeometryError: an operand does not fit or a layer is not in the stack; nothing was launched.
        ValueError: `dst` is host memory that CUDA does not know; nothing was launched.
    """
    check_layers(
        stack=stack,
        first=first,
        layers=layers,
        packed=dst,
        blocks=blocks,
        count=count,
        max_ctas=max_ctas,
        places=places,
        layer_places=layer_places,
        packed_on_host=packed_on_host,
    )
    launch(
        gather_kernel,
        dst,
        stack.storages[0],
        stack.form,
        blocks,
        count=count,
        max_ctas=max_ctas,
        places=places,
        host=packed_on_host,
        stack=stack,
        first=first,
        layers=layers,
        layer_places=layer_places,
    )


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
    places: tl.tensor,
    layer_starts: tl.tensor,
    layer_places: tl.tensor,
    first_layer: tl.int32,
    num_layers: tl.int32,
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
    HOST: tl.constexpr,
) -> None:
    """Copy tiles `program_id, program_id + num_programs, ...` of the listed pages from `src` to `dst`."""
    pages = num_blocks
    if count is not None:
        pages = tl.minimum(pages, tl.load(count))
    packed_base = tl.multiple_of(dst.to(tl.pointer_type(ELEMENT)), WORD)
    paged_base = tl.multiple_of(src.to(tl.pointer_type(ELEMENT)), WORD)
    # Nobody on the GPU reads what goes to the host: it should be the first to leave the cache.
    CACHE: tl.constexpr = ".cs" if HOST else ""
    tiles = (pages * (RUNS * SEGMENTS) + ROWS - 1) // ROWS
    for tile in range(tl.program_id(0), num_layers * tiles, tl.num_programs(0)):
        paged, packed, mask = locate(
            tile,
            tiles,
            blocks,
            run_table,
            places,
            layer_starts,
            layer_places,
            first_layer,
            num_blocks,
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
        tl.store(packed_base + packed, tl.load(paged_base + paged, mask=mask), mask=mask, cache_modifier=CACHE)
