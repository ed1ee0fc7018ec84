"""Pages to the canonical form and back, on the GPU (`layerstream.canonical`)."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from layerstream.canonical import ChunkForm, PageForm
from layerstream.errors import GeometryError
from layerstream.kernels.operands import DEFAULT_MAX_CTAS, HOST_MAX_CTAS
from layerstream.kernels.relayout_operands import check_relayout
from layerstream.kernels.segments import HOST_WORDS_PER_TILE, WORDS, WORDS_PER_TILE, WORDS_PER_WARP, Tiling
from layerstream.portions import Portion

_MAX_SEGMENTS = 2**30
"""Segments are numbered in 32 bits, and a thread block's last step may count past the end."""
_MAX_TOKENS = 2**31 - 1
"""Tokens of either side, which are 32-bit arguments."""

# Nothing that differs between portions or buffers may select another compiled kernel: it would be compiled while
# requests wait.
NOT_SPECIALIZED = ("heads", "tokens", "page_head", "page_token", "chunk_head", "chunk_token", "chunk_tokens")
NOT_SPECIALIZED_ON_ALIGNMENT = ("dst", "src")


def pages_to_canonical(
    dst: torch.Tensor,
    src: torch.Tensor,
    page_form: PageForm,
    chunk_form: ChunkForm,
    portion: Portion,
    *,
    max_ctas: int | None = None,
    pages_on_host: bool = False,
    chunk_on_host: bool = False,
) -> None:
    """Copy rows out of consecutive pages into a chunk in canonical form, on the current stream.

    Args:
        dst: `uint8[>= chunk_form.nbytes]`, the chunk.
        src: `uint8[>= n * page_form.page_bytes]`, the pages.
        page_form: of the pages.
        chunk_form: of the chunk.
        portion: the rows that move; all others in `dst` keep their bytes.
        max_ctas: most thread blocks to occupy. A copy that shares the GPU with the model can ask for fewer. None:
            `DEFAULT_MAX_CTAS`, or `HOST_MAX_CTAS` with a side in host memory.
        pages_on_host: `src` is a CPU tensor whose memory is registered with CUDA.
        chunk_on_host: `dst` is; not both.

    Raises:
        GeometryError: an operand does not fit; nothing was launched.
        ValueError: a side is host memory that CUDA does not know; nothing was launched.
    """
    check_relayout(
        pages=src,
        chunk=dst,
        page_form=page_form,
        chunk_form=chunk_form,
        portion=portion,
        max_ctas=max_ctas,
        pages_on_host=pages_on_host,
        chunk_on_host=chunk_on_host,
    )
    if portion.heads and portion.tokens:
        _launch(dst, src, page_form, chunk_form, portion, True, max_ctas, loads=pages_on_host, stores=chunk_on_host)


def canonical_to_pages(
    dst: torch.Tensor,
    src: torch.Tensor,
    page_form: PageForm,
    chunk_form: ChunkForm,
    portion: Portion,
    *,
    max_ctas: int | None = None,
    pages_on_host: bool = False,
    chunk_on_host: bool = False,
) -> None:
    """Copy rows of a chunk in canonical form into consecutive pages, on the current stream: the inverse of
    `pages_to_canonical`.

    Args:
        dst: `uint8[>= n * page_form.page_bytes]`, the pages.
        src: `uint8[>= chunk_form.nbytes]`, the chunk.
        page_form: of the pages.
        chunk_form: of the chunk.
        portion: the rows that move; all others in `dst` keep their bytes.
        max_ctas: see `pages_to_canonical`.
        pages_on_host: `dst` is a CPU tensor whose memory is registered with CUDA.
        chunk_on_host: `src` is; not both.

    Raises:
        GeometryError: an operand does not fit; nothing was launched.
        ValueError: a side is host memory that CUDA does not know; nothing was launched.
    """
    check_relayout(
        pages=dst,
        chunk=src,
        page_form=page_form,
        chunk_form=chunk_form,
        portion=portion,
        max_ctas=max_ctas,
        pages_on_host=pages_on_host,
        chunk_on_host=chunk_on_host,
    )
    if portion.heads and portion.tokens:
        _launch(dst, src, page_form, chunk_form, portion, False, max_ctas, loads=chunk_on_host, stores=pages_on_host)


def warm_up(
    pages: torch.Tensor,
    chunk: torch.Tensor,
    page_form: PageForm,
    *,
    pages_on_host: bool = False,
    chunk_on_host: bool = False,
) -> None:
    """Compile both directions for buffers like these, by launches that move nothing.

    Args:
        pages: `uint8[n]` with the alignment that the pages will have.
        chunk: likewise for chunks.
        page_form: of the pages.
        pages_on_host: see `pages_to_canonical`.
        chunk_on_host: see `pages_to_canonical`.
    """
    chunk_form = ChunkForm(row=page_form.row, heads=1, tokens=1)
    nothing = Portion(heads=0, tokens=0)
    _launch(chunk, pages, page_form, chunk_form, nothing, True, 1, loads=pages_on_host, stores=chunk_on_host)
    _launch(pages, chunk, page_form, chunk_form, nothing, False, 1, loads=chunk_on_host, stores=pages_on_host)


def relayout_constants(
    page_form: PageForm, word: int, *, to_chunk: bool, loads: bool = False, stores: bool = False
) -> tuple[Tiling, dict[str, Any]]:
    """How rows are cut, and the `constexpr` arguments of the kernel.

    Args:
        page_form: of the pages.
        word: bytes of one access; it divides every address and length.
        to_chunk: the direction.
        loads: what is read is host memory.
        stores: what is written is.
    """
    tiling = Tiling.of(page_form.part_bytes, word, HOST_WORDS_PER_TILE if loads or stores else WORDS_PER_TILE)
    strides = page_form.strides
    constants = {
        "PAGE_BYTES": page_form.page_bytes,
        "SPLIT_STRIDE": strides["s"],
        "HEAD_STRIDE": strides["h"],
        "TOKEN_STRIDE": strides["n"],
        "PART_STRIDE": strides["k"],
        "SPLITS": page_form.splits,
        "SPLIT_TOKENS": page_form.split_tokens,
        "PARTS": page_form.parts,
        "PART_BYTES": page_form.part_bytes,
        "SEGMENTS": tiling.segments,
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "WORD": word,
        "ELEMENT": getattr(tl, f"int{8 * min(word, 8)}"),
        "TO_CHUNK": to_chunk,
        "HOST_LOADS": loads,
        "HOST_STORES": stores,
    }
    return tiling, constants


def _launch(
    dst: torch.Tensor,
    src: torch.Tensor,
    page_form: PageForm,
    chunk_form: ChunkForm,
    portion: Portion,
    to_chunk: bool,
    max_ctas: int | None,
    *,
    loads: bool,
    stores: bool,
) -> None:
    """Start the kernel on the current stream, with no more thread blocks than there are tiles.

    The first launch for a form of pages, a direction and an access width on a device compiles it (`warm_up`).

    Raises:
        GeometryError: more segments or tokens than the kernel can number.
    """
    word = _widest_word(dst.data_ptr() | src.data_ptr() | page_form.part_bytes)
    tiling, constants = _plan(page_form, word, to_chunk, loads, stores)
    segments = portion.heads * portion.tokens * page_form.parts * tiling.segments
    most_tokens = max(portion.page_token + portion.tokens, chunk_form.tokens)
    if segments > _MAX_SEGMENTS or most_tokens > _MAX_TOKENS:
        raise GeometryError(
            f"layer {page_form.name!r}: {segments} segments and {most_tokens} tokens; one launch numbers "
            f"{_MAX_SEGMENTS} and {_MAX_TOKENS}; move it in several portions"
        )
    if max_ctas is None:
        max_ctas = HOST_MAX_CTAS if loads or stores else DEFAULT_MAX_CTAS
    grid = max(1, min(max_ctas, triton.cdiv(segments, tiling.rows)))
    relayout_kernel[(grid,)](
        dst,
        src,
        portion.heads,
        portion.tokens,
        portion.page_head,
        portion.page_token,
        portion.chunk_head,
        portion.chunk_token,
        chunk_form.tokens,
        **constants,
        num_warps=tiling.rows * tiling.columns // WORDS_PER_WARP,
    )


@functools.cache
def _plan(page_form: PageForm, word: int, to_chunk: bool, loads: bool, stores: bool) -> tuple[Tiling, dict[str, Any]]:
    return relayout_constants(page_form, word, to_chunk=to_chunk, loads=loads, stores=stores)


def _widest_word(together: int) -> int:
    """Largest access width that divides every one of several numbers, given or-ed together."""
    return min(WORDS[0], together & -together)


def launch_bytes(grid: tuple[int, ...], kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """What a profiler shows for a launch: bytes read and written."""
    return {"name": kernel.name, "bytes": 2 * args["heads"] * args["tokens"] * args["PARTS"] * args["PART_BYTES"]}


@triton.jit(
    do_not_specialize=NOT_SPECIALIZED,
    do_not_specialize_on_alignment=NOT_SPECIALIZED_ON_ALIGNMENT,
    launch_metadata=launch_bytes,
)
def relayout_kernel(
    dst: tl.tensor,  # the chunk, or with TO_CHUNK False the pages
    src: tl.tensor,  # the other
    heads: tl.int32,
    tokens: tl.int32,
    page_head: tl.int32,
    page_token: tl.int32,
    chunk_head: tl.int32,
    chunk_token: tl.int32,
    chunk_tokens: tl.int32,
    PAGE_BYTES: tl.constexpr,
    SPLIT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    PART_STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_BYTES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORD: tl.constexpr,
    ELEMENT: tl.constexpr,
    TO_CHUNK: tl.constexpr,
    HOST_LOADS: tl.constexpr,
    HOST_STORES: tl.constexpr,
) -> None:
    """Copy tiles `program_id, program_id + num_programs, ...` of the portion's rows.

    Segments (`layerstream.kernels.segments`) are numbered in canonical order, so neighbours in the chunk are moved by
    one thread block. Example: 2 heads, 3 tokens and rows of one part and one segment give segments 0 .. 5; segment 4 is
    head 1, token 1.
    """
    # Strides are multiples of the word. Scaling by constants keeps that visible to the compiler, which then joins the
    # elements of a word into one access.
    SIZE: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    WIDTH: tl.constexpr = COLUMNS * WORD // SIZE
    # Host memory is read once, and nobody on the GPU reads what goes there: neither should push others out of a cache.
    LOAD_CACHE: tl.constexpr = ".cg" if HOST_LOADS else ""
    STORE_CACHE: tl.constexpr = ".cs" if HOST_STORES else ""
    dst_base = tl.multiple_of(dst.to(tl.pointer_type(ELEMENT)), WORD)
    src_base = tl.multiple_of(src.to(tl.pointer_type(ELEMENT)), WORD)
    tiles = (heads * tokens * (PARTS * SEGMENTS) + ROWS - 1) // ROWS
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        # Unsigned, since that makes divisions by constants cheaper.
        segment = (tile * ROWS + tl.arange(0, ROWS)).to(tl.uint32)
        part = segment // SEGMENTS % PARTS
        row = segment // (SEGMENTS * PARTS)
        head = row // tokens.to(tl.uint32)
        token = row - head * tokens.to(tl.uint32)
        moved = head < heads.to(tl.uint32)
        # Offsets in 64 bits: a page may be far in, and a chunk's head too.
        held = token + page_token.to(tl.uint32)
        in_pages = (held // (SPLITS * SPLIT_TOKENS)).to(tl.int64) * (PAGE_BYTES // SIZE)
        in_pages += (held // SPLIT_TOKENS % SPLITS).to(tl.int64) * (SPLIT_STRIDE // SIZE)
        in_pages += (held % SPLIT_TOKENS).to(tl.int64) * (TOKEN_STRIDE // SIZE)
        in_pages += (head + page_head.to(tl.uint32)).to(tl.int64) * (HEAD_STRIDE // SIZE)
        in_pages += part.to(tl.int64) * (PART_STRIDE // SIZE)
        in_chunk = (head + chunk_head.to(tl.uint32)).to(tl.int64) * chunk_tokens
        in_chunk = (in_chunk + token + chunk_token) * PARTS + part
        in_chunk = in_chunk * (PART_BYTES // SIZE)
        element = (segment % SEGMENTS * WIDTH).to(tl.int32)[:, None] + tl.arange(0, WIDTH)[None, :]
        mask = moved[:, None] & (element < PART_BYTES // SIZE)
        pages, chunk = in_pages[:, None] + element, in_chunk[:, None] + element
        if TO_CHUNK:
            values = tl.load(src_base + pages, mask=mask, cache_modifier=LOAD_CACHE)
            tl.store(dst_base + chunk, values, mask=mask, cache_modifier=STORE_CACHE)
        else:
            values = tl.load(src_base + chunk, mask=mask, cache_modifier=LOAD_CACHE)
            tl.store(dst_base + pages, values, mask=mask, cache_modifier=STORE_CACHE)
