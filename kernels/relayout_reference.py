"""The relayout on the CPU, token by token in plain torch: the oracle of the Triton kernel and of
`layerstream.relayout`.

`max_ctas`, `pages_on_host` and `chunk_on_host` are accepted for the kernel's sake and change nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from einops import rearrange

from layerstream.canonical import ChunkForm, PageForm
from layerstream.errors import GeometryError
from layerstream.kernels.relayout_operands import check_relayout
from layerstream.portions import Portion


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
    for there, here in _rows(src, dst, page_form, chunk_form, portion):
        here.copy_(there)


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
    for there, here in _rows(dst, src, page_form, chunk_form, portion):
        there.copy_(here)


def _rows(
    pages: torch.Tensor, chunk: torch.Tensor, page_form: PageForm, chunk_form: ChunkForm, portion: Portion
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each token's rows in the pages and in the chunk, as views `[heads, parts, bytes]`."""
    if pages.device.type != "cpu":
        raise GeometryError(
            f"layer {page_form.name!r}: the reference moves CPU memory, not {pages.device}; use "
            "layerstream.kernels.relayout there"
        )
    whole = pages[: pages.numel() // page_form.page_bytes * page_form.page_bytes]
    axes = " ".join(page_form.order)
    held = rearrange(whole, f"(page {axes} byte) -> page s n h k byte", byte=page_form.part_bytes, **page_form.extents)
    kept = rearrange(
        chunk[: chunk_form.nbytes],
        "(h token k byte) -> token h k byte",
        h=chunk_form.heads,
        k=page_form.parts,
        byte=page_form.part_bytes,
    )
    for index in range(portion.tokens):
        page, inside = divmod(portion.page_token + index, page_form.tokens)
        split, token = divmod(inside, page_form.split_tokens)
        yield (
            held[page, split, token].narrow(0, portion.page_head, portion.heads),
            kept[portion.chunk_token + index].narrow(0, portion.chunk_head, portion.heads),
        )
