"""Page copies on the CPU: the oracle of the Triton kernels, and the path of the CPU device.

Copies run on threads beside a busy model thread. Hence numpy: its copies release the GIL for their whole length and run
on the calling thread alone, while torch's own would start, and fight over, the model's intra-op threads.

Two arguments are accepted for the kernels' sake and change nothing here: `max_ctas`, since a CPU copy runs on the
calling thread, and `packed_on_host`, since all memory is the host's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from layerstream.errors import GeometryError
from layerstream.geometry import LayerPages
from layerstream.kernels.operands import check_operands
from layerstream.kernels.stack import PageStack, check_layers
from layerstream.kernels.views import Bytes, Ids, dense_rows, is_dense, placed, stretches


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
    """Copy pages out of a layer's storage.

    Args:
        dst: `uint8[>= n * layer.page_bytes]`; page `blocks[i]` goes to `i * layer.page_bytes`, or to `places[i]`.
        src: `uint8[>= layer.end]`, the layer's storage from its first byte.
        layer: where pages lie in `src`.
        blocks: `int32[n]`. A negative id is skipped: its place in `dst` keeps its bytes. A repeated id is read again.
        places: `int64[n]`: bytes from the first byte of `dst` to each page's packed form. They may be negative or lie
            past the end of `dst`, which then is only the base and may have any length. So nothing can check them: a
            wrong one overwrites other memory.
        count: `int32[1]`; only the first `count` ids are used. None: all.

    Raises:
        GeometryError: an operand does not fit, or an id is not below `layer.num_pages`; nothing was written.
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
    ids = _ids(blocks, count, layer)
    _gather(src, layer, _parts(dst, layer, ids, places))


def scatter_pages(
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
    """Copy packed pages into a layer's storage: the inverse of `gather_pages`.

    Args:
        dst: `uint8[>= layer.end]`, the layer's storage from its first byte.
        src: `uint8[>= n * layer.page_bytes]`; the page at `i * layer.page_bytes`, or at `places[i]`, goes to page
            `blocks[i]`.
        layer: where pages lie in `dst`.
        blocks: `int32[n]`. A negative id is skipped. Of a repeated id the last page stays.
        places: `int64[n]`: bytes from the first byte of `src` to each page's packed form. They may be negative or lie
            past the end of `src`, which then is only the base and may have any length. So nothing can check them: a
            wrong one reads other memory, or faults.
        count: `int32[1]`; only the first `count` ids are used. None: all.

    Raises:
        GeometryError: an operand does not fit, or an id is not below `layer.num_pages`; nothing was written.
    """
    check_operands(
        paged=dst,
        packed=src,
        layer=layer,
        blocks=blocks,
        count=count,
        max_ctas=max_ctas,
        places=places,
        packed_on_host=packed_on_host,
    )
    ids = _ids(blocks, count, layer)
    _scatter(dst, layer, _parts(src, layer, ids, places))


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
    """Copy the same pages out of several layers' storages.

    Arguments and the packed form are those of `layerstream.kernels.gather.gather_layers`, on the CPU.

    Raises:
        GeometryError: an operand does not fit, a layer is not in the stack, or an id is not below the layers'
            `num_pages`; nothing was written.
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
    ids = _ids(blocks, count, stack.form)
    for storage, layer, parts in _layers(stack, first, layers, dst, blocks, ids, places, layer_places):
        _gather(storage, layer, parts)


def scatter_layers(
    stack: PageStack,
    first: int,
    layers: int,
    src: torch.Tensor,
    blocks: torch.Tensor,
    *,
    places: torch.Tensor | None = None,
    layer_places: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    max_ctas: int | None = None,
    packed_on_host: bool = False,
) -> None:
    """Copy packed pages into several layers' storages: the inverse of `gather_layers`.

    Arguments and the packed form are those of `layerstream.kernels.scatter.scatter_layers`, on the CPU.

    Raises:
        GeometryError: an operand does not fit, a layer is not in the stack, or an id is not below the layers'
            `num_pages`; nothing was written.
    """
    check_layers(
        stack=stack,
        first=first,
        layers=layers,
        packed=src,
        blocks=blocks,
        count=count,
        max_ctas=max_ctas,
        places=places,
        layer_places=layer_places,
        packed_on_host=packed_on_host,
    )
    ids = _ids(blocks, count, stack.form)
    for storage, layer, parts in _layers(stack, first, layers, src, blocks, ids, places, layer_places):
        _scatter(storage, layer, parts)


def _gather(src: torch.Tensor, layer: LayerPages, parts: Iterable[tuple[Ids, Bytes]]) -> None:
    storage = src.numpy()
    for ids, packed in parts:
        if is_dense(layer, ids):
            rows, pages = dense_rows(storage, packed, layer)
            # The ids were checked; numpy's default mode would gather into a second buffer first.
            np.take(rows, ids, axis=0, out=pages, mode="clip")
            continue
        for there, here in stretches(storage, packed, layer, ids):
            np.copyto(here, there)


def _scatter(dst: torch.Tensor, layer: LayerPages, parts: Iterable[tuple[Ids, Bytes]]) -> None:
    storage = dst.numpy()
    for ids, packed in parts:
        if is_dense(layer, ids):
            rows, pages = dense_rows(storage, packed, layer)
            rows[ids] = pages
            continue
        for there, here in stretches(storage, packed, layer, ids):
            np.copyto(there, here)


def _layers(
    stack: PageStack,
    first: int,
    layers: int,
    packed: torch.Tensor,
    blocks: torch.Tensor,
    ids: Ids,
    places: torch.Tensor | None,
    layer_places: torch.Tensor | None,
) -> Iterator[tuple[torch.Tensor, LayerPages, Iterable[tuple[Ids, Bytes]]]]:
    """Storage, pages and `_parts` of each layer."""
    for index in range(first, first + layers):
        if layer_places is None:
            start = (index - first) * blocks.numel() * stack.page_bytes
        else:
            start = int(layer_places.numpy()[index])
        yield stack.storages[index], stack.layers[index], _parts(packed, stack.form, ids, places, start)


def _parts(
    packed: torch.Tensor, layer: LayerPages, ids: Ids, places: torch.Tensor | None, start: int = 0
) -> Iterable[tuple[Ids, Bytes]]:
    """Ids and the memory of their packed form: one part from byte `start` on, or where `places` say, from there."""
    if ids.size == 0:
        return ()
    if places is None:
        return ((ids, packed.numpy()[start : start + ids.size * layer.page_bytes]),)
    return placed(packed.data_ptr() + start, ids, places.numpy()[: ids.size], layer.page_bytes)


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
