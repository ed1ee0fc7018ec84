"""Pages to the canonical form and back in CPU memory, by few large strided copies (`layerstream.canonical`).

For threads that move objects between tiers and the host pool beside a busy model thread. Hence numpy: its copies
release the GIL for their whole length and run on the calling thread alone, and no GPU has to have time.

Put chunks on multiples of 4096, as the host pool puts layers: where what is written lies 16 bytes behind what is read,
modulo 4096, runs of 4 KiB and more were copied at 2.8 GB/s instead of 25 (numpy 2 on an AMD EPYC, buffers of 4 MiB).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from layerstream.canonical import ChunkForm, PageForm
from layerstream.errors import GeometryError
from layerstream.portions import Portion

Bytes: TypeAlias = NDArray[np.uint8]


def pages_to_canonical(dst: Bytes, src: Bytes, page_form: PageForm, chunk_form: ChunkForm, portion: Portion) -> None:
    """Copy rows out of consecutive pages into a chunk in canonical form.

    Args:
        dst: `uint8[>= chunk_form.nbytes]`, the chunk.
        src: `uint8[>= n * page_form.page_bytes]`, the pages.
        page_form: of the pages.
        chunk_form: of the chunk.
        portion: the rows that move; all others in `dst` keep their bytes.

    Raises:
        GeometryError: an operand does not fit; nothing was written.
    """
    for there, here in _pairs(src, dst, page_form, chunk_form, portion):
        np.copyto(here, there)


def canonical_to_pages(dst: Bytes, src: Bytes, page_form: PageForm, chunk_form: ChunkForm, portion: Portion) -> None:
    """Copy rows of a chunk in canonical form into consecutive pages: the inverse of `pages_to_canonical`.

    Args:
        dst: `uint8[>= n * page_form.page_bytes]`, the pages.
        src: `uint8[>= chunk_form.nbytes]`, the chunk.
        page_form: of the pages.
        chunk_form: of the chunk.
        portion: the rows that move; all others in `dst` keep their bytes.

    Raises:
        GeometryError: an operand does not fit; nothing was written.
    """
    for there, here in _pairs(dst, src, page_form, chunk_form, portion):
        np.copyto(there, here)


def _pairs(
    pages: Bytes, chunk: Bytes, page_form: PageForm, chunk_form: ChunkForm, portion: Portion
) -> Iterator[tuple[Bytes, Bytes]]:
    """Equally shaped views `[kernel blocks, tokens, heads, parts, bytes]` of both sides that together are the portion.

    All checks are done before the first pair.
    """
    for what, memory in (("pages", pages), ("chunk", chunk)):
        if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous:
            raise GeometryError(
                f"layer {page_form.name!r}: {what} is {memory.dtype} of shape {memory.shape} and strides "
                f"{memory.strides}; it must be contiguous, one-dimensional uint8"
            )
    portion.check(page_form, chunk_form, pages_bytes=pages.nbytes, chunk_bytes=chunk.nbytes)
    return _views(pages, chunk, page_form, chunk_form, portion) if portion.heads and portion.tokens else iter(())


def _views(
    pages: Bytes, chunk: Bytes, page_form: PageForm, chunk_form: ChunkForm, portion: Portion
) -> Iterator[tuple[Bytes, Bytes]]:
    strides, row, part = page_form.strides, page_form.row.nbytes, page_form.part_bytes
    size, splits, every = page_form.split_tokens, page_form.splits, page_form.page_bytes
    head_bytes = chunk_form.tokens * row
    if strides["s"] * splits == every:
        # Kernel blocks are equally far apart across pages too.
        splits, every = 1, strides["s"]
    page_start = portion.page_head * strides["h"]
    chunk_start = portion.chunk_head * head_bytes + (portion.chunk_token - portion.page_token) * row
    for first, count, low, high in _stretches(portion.page_token, portion.tokens, size, splits):
        in_pages = page_start + first // splits * every + first % splits * strides["s"] + low * strides["n"]
        in_chunk = chunk_start + (first * size + low) * row
        shape = (count, high - low, portion.heads, page_form.parts, part)
        page_strides = (every, strides["n"], strides["h"], strides["k"], 1)
        chunk_strides = (splits * size * row, row, head_bytes, part, 1)
        yield (
            np.ndarray(shape, np.uint8, buffer=pages, offset=in_pages, strides=page_strides),
            np.ndarray(shape, np.uint8, buffer=chunk, offset=in_chunk, strides=chunk_strides),
        )


def _stretches(start: int, tokens: int, size: int, splits: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut tokens `start .. start + tokens - 1` into the same tokens of every `splits`-th kernel block of `size` tokens.

    Yields:
        First kernel block, how many, and first and last token (exclusive) in each of them.
    """
    stop = start + tokens
    first, last = -(-start // size), stop // size
    if last < first:
        yield last, 1, start - last * size, stop - last * size
        return
    if start < first * size:
        yield first - 1, 1, start - (first - 1) * size, size
    for block in range(first, min(first + splits, last)):
        yield block, -(-(last - block) // splits), 0, size
    if last * size < stop:
        yield last, 1, 0, stop - last * size
