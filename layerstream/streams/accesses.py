"""Which bytes a piece of device work reads and writes: for finding races, and for what work costs in virtual time.

Ranges are `int64[n, 2]`: address of the first byte, and of the byte behind the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from layerstream.geometry import LayerPages
    from layerstream.streams.base import CopyBatch

Ranges: TypeAlias = npt.NDArray[np.int64]
Ids: TypeAlias = Callable[["torch.Tensor"], npt.NDArray[Any]]
"""Gives what a device tensor of ids holds for work that is queued at this moment, without reading the device."""


class Accesses(NamedTuple):
    """What one operation touches."""

    reads: Ranges
    writes: Ranges

    @property
    def nbytes(self) -> int:
        """Bytes read plus bytes written."""
        return sum(int((ranges[:, 1] - ranges[:, 0]).sum()) for ranges in self)


AccessFunction: TypeAlias = Callable[..., Accesses]
"""`(ids, *args, **kwargs) -> Accesses` of a kernel launched with these arguments; `ids` is an `Ids`."""


def ranges(pairs: Iterable[tuple[int, int]] | Ranges) -> Ranges:
    """Ascending ranges without overlap that cover the same bytes; those that touch become one."""
    given = pairs if isinstance(pairs, np.ndarray) else list(pairs)
    unsorted: Ranges = np.asarray(given, dtype=np.int64).reshape(-1, 2)
    unsorted = unsorted[unsorted[:, 0] < unsorted[:, 1]]
    if len(unsorted) < 2:
        return unsorted
    ordered = unsorted[np.argsort(unsorted[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ordered[:, 1])
    first = np.flatnonzero(np.concatenate([[True], ordered[1:, 0] > reach[:-1]]))
    last = np.append(first[1:], len(ordered)) - 1
    return np.stack([ordered[first, 0], reach[last]], axis=1)


def spans(*tensors: torch.Tensor) -> Ranges:
    """The bytes of contiguous tensors."""
    return ranges([(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors])


def copy_accesses(dst: torch.Tensor, src: torch.Tensor) -> Accesses:
    """Of `Stream.copy`."""
    return Accesses(spans(src), spans(dst))


def batch_accesses(batch: CopyBatch) -> Accesses:
    """Of `Stream.copy_batch`."""
    nbytes = batch.nbytes.astype(np.int64)
    sources, targets = batch.sources.astype(np.int64), batch.targets.astype(np.int64)
    return Accesses(ranges(_runs(sources, nbytes)), ranges(_runs(targets, nbytes)))


def overlaps(batch: CopyBatch) -> Ranges:
    """Bytes that one row of a batch writes and another reads or writes, which a batch must not have."""
    nbytes = batch.nbytes.astype(np.int64)
    written = _runs(batch.targets.astype(np.int64), nbytes)
    written = written[np.argsort(written[:, 0], kind="stable")]
    reach = np.maximum.accumulate(written[:, 1])[:-1]
    twice = np.stack([written[1:, 0], np.minimum(reach, written[1:, 1])], axis=1)
    reads, writes = batch_accesses(batch)
    following = np.searchsorted(reads[:, 1], writes[:, 0], side="right")
    writes, following = writes[following < len(reads)], following[following < len(reads)]
    both = np.stack([np.maximum(writes[:, 0], reads[following, 0]), np.minimum(writes[:, 1], reads[following, 1])], 1)
    return ranges(np.concatenate([twice, both]))


def declared(
    kernel: Callable[..., None], accesses: Mapping[Callable[..., None], AccessFunction]
) -> AccessFunction | None:
    """What is declared for a kernel, also where decorators (`functools.wraps`) lie around it; None if nothing is."""
    found: Any = kernel
    while found is not None and found not in accesses:
        found = getattr(found, "__wrapped__", None)
    return None if found is None else accesses[found]


def page_accesses(
    gather_pages: Callable[..., None],
    scatter_pages: Callable[..., None],
    gather_layers: Callable[..., None],
    scatter_layers: Callable[..., None],
) -> Mapping[Callable[..., None], AccessFunction]:
    """What a device's page kernels touch (`layerstream.kernels.gather`, `.scatter`, or their twins)."""
    return {
        gather_pages: _gather_pages,
        scatter_pages: _scatter_pages,
        gather_layers: _gather_layers,
        scatter_layers: _scatter_layers,
    }


def _gather_pages(
    ids: Ids,
    dst: torch.Tensor,
    src: torch.Tensor,
    layer: LayerPages,
    blocks: torch.Tensor,
    **options: torch.Tensor | None,
) -> Accesses:
    touched = _touched(ids, dst, [(src, layer, 0)], blocks, **options)
    return Accesses(ranges(np.concatenate([touched.paged, touched.tables])), ranges(touched.packed))


def _scatter_pages(
    ids: Ids,
    dst: torch.Tensor,
    src: torch.Tensor,
    layer: LayerPages,
    blocks: torch.Tensor,
    **options: torch.Tensor | None,
) -> Accesses:
    touched = _touched(ids, src, [(dst, layer, 0)], blocks, **options)
    return Accesses(ranges(np.concatenate([touched.packed, touched.tables])), ranges(touched.paged))


def _gather_layers(
    ids: Ids,
    dst: torch.Tensor,
    stack: _Stack,
    first: int,
    layers: int,
    blocks: torch.Tensor,
    **options: torch.Tensor | None,
) -> Accesses:
    touched = _touched(ids, dst, _sides(ids, stack, first, layers, blocks, **options), blocks, **options)
    return Accesses(ranges(np.concatenate([touched.paged, touched.tables])), ranges(touched.packed))


def _scatter_layers(
    ids: Ids,
    stack: _Stack,
    first: int,
    layers: int,
    src: torch.Tensor,
    blocks: torch.Tensor,
    **options: torch.Tensor | None,
) -> Accesses:
    touched = _touched(ids, src, _sides(ids, stack, first, layers, blocks, **options), blocks, **options)
    return Accesses(ranges(np.concatenate([touched.packed, touched.tables])), ranges(touched.paged))


class _Stack(Protocol):
    """What is used of `layerstream.kernels.stack.PageStack`."""

    storages: Sequence[torch.Tensor]
    layers: Sequence[LayerPages]


class _Touched(NamedTuple):
    """Unordered ranges on the paged side, on the packed side, and of the tables that the kernel reads."""

    paged: Ranges
    packed: Ranges
    tables: Ranges


def _sides(
    ids: Ids,
    stack: _Stack,
    first: int,
    layers: int,
    blocks: torch.Tensor,
    *,
    layer_places: torch.Tensor | None = None,
    **_others: object,
) -> list[tuple[torch.Tensor, LayerPages, int]]:
    """For each layer its storage, its pages, and where its part of the packed form starts."""
    part = blocks.numel() * stack.layers[first].page_bytes
    starts = [layer * part for layer in range(layers)]
    if layer_places is not None:
        starts = [int(start) for start in ids(layer_places)[first : first + layers]]
    chosen = slice(first, first + layers)
    return list(zip(stack.storages[chosen], stack.layers[chosen], starts, strict=True))


def _touched(
    ids: Ids,
    packed: torch.Tensor,
    sides: Sequence[tuple[torch.Tensor, LayerPages, int]],
    blocks: torch.Tensor,
    *,
    places: torch.Tensor | None = None,
    layer_places: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    **_others: object,
) -> _Touched:
    listed = ids(blocks).astype(np.int64)
    if count is not None:
        listed = listed[: max(0, int(ids(count)[0]))]
    _, like, _ = sides[0]
    # An id that is no page is skipped on both sides.
    index = np.flatnonzero((listed >= 0) & (listed < like.num_pages))
    pages = listed[index]
    offsets = index * like.page_bytes if places is None else ids(places)[index]
    paged_runs = [
        (storage.data_ptr() + layer.offset + pages[:, None] * layer.page_stride + np.array(layer.run_offsets)).ravel()
        for storage, layer, _ in sides
    ]
    packed_runs = [packed.data_ptr() + start + offsets for _, _, start in sides]
    tables = [table for table in (blocks, places, layer_places, count) if table is not None]
    return _Touched(
        _runs(np.concatenate(paged_runs), like.run_bytes),
        _runs(np.concatenate(packed_runs), like.page_bytes),
        spans(*tables),
    )


def _runs(starts: Ranges, nbytes: int | npt.NDArray[np.int64]) -> Ranges:
    """Ranges of `nbytes` from each address of `int64[n]` on."""
    return np.stack([starts, starts + nbytes], axis=1)
