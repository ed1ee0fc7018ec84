"""Page copies on the CPU: the oracle of the Triton kernels, and the path of the CPU device.

Copies run on threads beside a busy model thread. Hence numpy: its copies release the GIL for their whole length and run
on the calling thread alone, while torch's own would start, and fight over, the model's intra-op threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from einops import rearrange

from layerstream.errors import GeometryError
from layerstream.geometry import LayerPages
from layerstream.kernels.operands import DEFAULT_MAX_CTAS, check_operands, run_stride

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ids: TypeAlias = npt.NDArray[np.int32]


def gather_pages(
    dst: torch.Tensor,
    src: torch.Tensor,
    layer: LayerPages,
    blocks: torch.Tensor,
    *,
    count: torch.Tensor | None = None,
    max_ctas: int = DEFAULT_MAX_CTAS,
) -> None:
    """Copy pages out of a layer's storage, one behind another.

    Args:
        dst: `uint8[>= n * layer.page_bytes]`; page `blocks[i]` goes to `i * layer.page_bytes`.
        src: `uint8[>= layer.end]`, the layer's storage from its first byte.
        layer: where pages lie in `src`.
        blocks: `int32[n]`. A negative id is skipped: its place in `dst` keeps its bytes. A repeated id is read again.
        count: `int32[1]`; only the first `count` ids are used. None: all.
        max_ctas: accepted for the kernel's sake; a CPU copy runs on the calling thread.

    Raises:
        GeometryError: an operand does not fit, or an id is not below `layer.num_pages`; nothing was written.
    """
    check_operands(paged=src, packed=dst, layer=layer, blocks=blocks, count=count, max_ctas=max_ctas)
    ids = _ids(blocks, count, layer)
    if ids.size == 0:
        return
    storage, packed = src.numpy(), dst.numpy()[: ids.size * layer.page_bytes]
    if _is_dense(layer, ids):
        rows, pages = _dense_rows(storage, packed, layer)
        # The ids were checked; numpy's default mode would gather into a second buffer first.
        np.take(rows, ids, axis=0, out=pages, mode="clip")
        return
    for there, here in _stretches(storage, packed, layer, ids):
        np.copyto(here, there)


def scatter_pages(
    dst: torch.Tensor,
    src: torch.Tensor,
    layer: LayerPages,
    blocks: torch.Tensor,
    *,
    count: torch.Tensor | None = None,
    max_ctas: int = DEFAULT_MAX_CTAS,
) -> None:
    """Copy packed pages into a layer's storage: the inverse of `gather_pages`.

    Args:
        dst: `uint8[>= layer.end]`, the layer's storage from its first byte.
        src: `uint8[>= n * layer.page_bytes]`; the page at `i * layer.page_bytes` goes to page `blocks[i]`.
        layer: where pages lie in `dst`.
        blocks: `int32[n]`. A negative id is skipped. Of a repeated id the last page stays.
        count: `int32[1]`; only the first `count` ids are used. None: all.
        max_ctas: accepted for the kernel's sake; a CPU copy runs on the calling thread.

    Raises:
        GeometryError: an operand does not fit, or an id is not below `layer.num_pages`; nothing was written.
    """
    check_operands(paged=dst, packed=src, layer=layer, blocks=blocks, count=count, max_ctas=max_ctas)
    ids = _ids(blocks, count, layer)
    if ids.size == 0:
        return
    storage, packed = dst.numpy(), src.numpy()[: ids.size * layer.page_bytes]
    if _is_dense(layer, ids):
        rows, pages = _dense_rows(storage, packed, layer)
        rows[ids] = pages
        return
    for there, here in _stretches(storage, packed, layer, ids):
        np.copyto(there, here)


def _ids(blocks: torch.Tensor, count: torch.Tensor | None, layer: LayerPages) -> Ids:
    """The ids in use, all below `layer.num_pages`."""
    if blocks.device.type != "cpu":
        raise GeometryError(
            f"layer {layer.name!r}: the reference copies CPU memory, not {blocks.device}; use "
            "layerstream.kernels.gather and layerstream.kernels.scatter there"
        )
    ids: Ids = blocks.numpy()
    if count is not None:
        ids = ids[: max(0, int(count.numpy()[0]))]
    if ids.size and (highest := int(ids.max())) >= layer.num_pages:
        raise GeometryError(
            f"layer {layer.name!r}: block id {highest} in a cache of {layer.num_pages} pages; ids must be below "
            f"{layer.num_pages}, or negative to skip a page"
        )
    return ids


def _is_dense(layer: LayerPages, ids: Ids) -> bool:
    """Whether pages lie one behind another and none is skipped: then one call copies all, and the copy thread asks for
    the GIL once a layer instead of once a page."""
    return len(layer.run_offsets) == 1 and layer.page_stride == layer.run_bytes and int(ids.min()) >= 0


def _dense_rows(storage: Bytes, packed: Bytes, layer: LayerPages) -> tuple[Bytes, Bytes]:
    """Storage and packed pages of a dense layer, both as [page, byte]."""
    pages = storage[layer.offset + layer.run_offsets[0] : layer.end]
    return pages.reshape(-1, layer.run_bytes), packed.reshape(-1, layer.run_bytes)


def _stretches(storage: Bytes, packed: Bytes, layer: LayerPages, ids: Ids) -> Iterator[tuple[Bytes, Bytes]]:
    """Pairs of equally shaped views of the storage and of `packed`, one for each stretch of consecutive ids and each
    group of equally spaced runs: the fewest copies."""
    layout = "(page run byte) -> page run byte"
    pages = rearrange(packed, layout, run=len(layer.run_offsets), byte=layer.run_bytes)
    views = _run_views(storage, layer)
    breaks = (np.flatnonzero(np.diff(ids) != 1) + 1).tolist()
    for start, end in zip([0, *breaks], [*breaks, ids.size], strict=True):
        first = int(ids[start])
        # Ids can count up through zero: -2, -1, 0, 1 skips two pages and copies two.
        start, first = start + max(0, -first), max(0, first)
        if start < end:
            for runs, view in views:
                yield view[first : first + end - start], pages[start:end, runs]


def _run_views(storage: Bytes, layer: LayerPages) -> list[tuple[slice, Bytes]]:
    """The storage as [page, run, byte]: one view over equally spaced runs, else one for each run."""
    stride = run_stride(layer)
    if stride is None:
        groups = [(slice(run, run + 1), offset, 1) for run, offset in enumerate(layer.run_offsets)]
    else:
        groups = [(slice(None), 0, len(layer.run_offsets))]
    return [
        (
            runs,
            np.ndarray(
                (layer.num_pages, extent, layer.run_bytes),
                np.uint8,
                buffer=storage,
                offset=layer.offset + offset,
                strides=(layer.page_stride, stride or 0, 1),
            ),
        )
        for runs, offset, extent in groups
    ]
