"""What a relayout is given, checked once on the host before any byte moves."""

from __future__ import annotations

import torch

from layerstream.canonical import ChunkForm, PageForm
from layerstream.errors import GeometryError
from layerstream.portions import Portion


def check_relayout(
    *,
    pages: torch.Tensor,
    chunk: torch.Tensor,
    page_form: PageForm,
    chunk_form: ChunkForm,
    portion: Portion,
    max_ctas: int | None,
    pages_on_host: bool,
    chunk_on_host: bool,
) -> None:
    """Refuse operands between which rows could not be moved safely. Reads sizes and types only.

    Args:
        pages: `uint8[>= n * page_form.page_bytes]`, consecutive pages.
        chunk: `uint8[>= chunk_form.nbytes]`.
        page_form: of the pages.
        chunk_form: of the chunk.
        portion: what moves.
        max_ctas: at least 1, or None for the default.
        pages_on_host: `pages` is CPU memory, wherever `chunk` is.
        chunk_on_host: the reverse; not both.

    Raises:
        GeometryError: a tensor has the wrong type, shape, size or device, or the portion is not inside both.
    """
    name = page_form.name
    for what, tensor in (("pages", pages), ("chunk", chunk)):
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise GeometryError(
                f"layer {name!r}: {what} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}; it must be contiguous, one-dimensional torch.uint8"
            )
    if pages_on_host and chunk_on_host:
        raise GeometryError(
            f"layer {name!r}: pages and chunk are both said to be on the host; use layerstream.relayout"
        )
    on_host = pages if pages_on_host else chunk
    if (pages_on_host or chunk_on_host) and on_host.device.type != "cpu":
        raise GeometryError(f"layer {name!r}: what is said to be on the host is on {on_host.device}")
    if not (pages_on_host or chunk_on_host) and pages.device != chunk.device:
        raise GeometryError(
            f"layer {name!r}: pages are on {pages.device} and the chunk is on {chunk.device}; both must be on one "
            "device, except for one side in host memory, which is asked for with pages_on_host or chunk_on_host"
        )
    if max_ctas is not None and max_ctas < 1:
        raise GeometryError(f"layer {name!r}: max_ctas is {max_ctas}; a launch needs at least 1 thread block")
    portion.check(page_form, chunk_form, pages_bytes=pages.numel(), chunk_bytes=chunk.numel())
