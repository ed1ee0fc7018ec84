"""Pages in CPU memory as numpy views, in the fewest pieces that one copy call each can move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from einops import rearrange

from layerstream.geometry import LayerPages
from layerstream.kernels.operands import run_stride

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ids: TypeAlias = npt.NDArray[np.int32]
Places: TypeAlias = npt.NDArray[np.int64]


def placed(base: int, ids: Ids, places: Places, page_bytes: int) -> Iterator[tuple[Ids, Bytes]]:
    """The pages that are not skipped, in stretches that lie one behind another: ids, and the memory of their packed
    form.

    Args:
        base: the address that `places` count from, in bytes. Memory is reached by address, so places may lie in other
            allocations; nothing checks them.
    """
    kept = ids >= 0
    ids, places = ids[kept], places[kept]
    for start, end in _between(np.diff(places) != page_bytes, ids.size):
        yield ids[start:end], _memory(base + int(places[start]), (end - start) * page_bytes)


def is_dense(layer: LayerPages, ids: Ids) -> bool:
    """Whether pages lie one behind another and none is skipped: then one call copies all, and the copy thread asks for
    the GIL once a layer instead of once a page."""
    return len(layer.run_offsets) == 1 and layer.page_stride == layer.run_bytes and int(ids.min()) >= 0


def dense_rows(storage: Bytes, packed: Bytes, layer: LayerPages) -> tuple[Bytes, Bytes]:
    """Storage and packed pages of a dense layer, both as [page, byte]."""
    pages = storage[layer.offset + layer.run_offsets[0] : layer.end]
    return pages.reshape(-1, layer.run_bytes), packed.reshape(-1, layer.run_bytes)


def stretches(storage: Bytes, packed: Bytes, layer: LayerPages, ids: Ids) -> Iterator[tuple[Bytes, Bytes]]:
    """Pairs of equally shaped views of the storage and of `packed`, one for each stretch of consecutive ids and each
    group of equally spaced runs: the fewest copies."""
    layout = "(page run byte) -> page run byte"
    pages = rearrange(packed, layout, run=len(layer.run_offsets), byte=layer.run_bytes)
    views = _run_views(storage, layer)
    for start, end in _between(np.diff(ids) != 1, ids.size):
        first = int(ids[start])
        # Ids can count up through zero: -2, -1, 0, 1 skips two pages and copies two.
        start, first = start + max(0, -first), max(0, first)
        if start < end:
            for runs, view in views:
                yield view[first : first + end - start], pages[start:end, runs]


def _between(breaks: npt.NDArray[np.bool_], size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each stretch of `size` items; `breaks[i]` says that item i + 1 begins another."""
    starts = (np.flatnonzero(breaks) + 1).tolist()
    return zip([0, *starts], [*starts, size], strict=True) if size else iter(())


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


class _Address:
    """Memory as numpy's array interface (version 3, numpy reference manual) describes it."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _memory(address: int, nbytes: int) -> Bytes:
    """A view of memory that somebody else keeps alive."""
    view: Bytes = np.asarray(_Address(address, nbytes))
    return view
