"""Where the bytes of the KV cache lie: a page is one block of one layer, described as equal runs of bytes.

Nothing is guessed from a shape: callers say which dimension counts blocks, and everything else follows from strides.
Sizes and offsets are in bytes, tensors' own shapes and strides in elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from layerstream.errors import GeometryError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPages:
    """The pages of one layer inside the storage that holds them.

    Run r of page b starts at `offset + b * page_stride + run_offsets[r]` and is `run_bytes` long. Read in order, the
    runs of a page are its packed form, `page_bytes` long.
    """

    name: str
    """The layer's name in the engine."""
    num_pages: int
    offset: int
    """Bytes from the start of the storage to page 0."""
    page_stride: int
    """Bytes between the starts of consecutive pages."""
    run_offsets: tuple[int, ...]
    """Bytes from the start of a page to each of its runs."""
    run_bytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, packed."""
        return len(self.run_offsets) * self.run_bytes

    @property
    def end(self) -> int:
        """Bytes from the start of the storage to the end of the last page's last run."""
        return self.offset + (self.num_pages - 1) * self.page_stride + max(self.run_offsets) + self.run_bytes

    @property
    def alignment(self) -> int:
        """Largest power of two up to 16 that divides every address and length relative to the storage."""
        together = self.offset | self.page_stride | self.run_bytes
        for run in self.run_offsets:
            together |= run
        return min(16, together & -together)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """All layers of one rank, in the order the model runs them."""

    layers: tuple[LayerPages, ...]
    num_blocks: int
    block_tokens: int
    """Tokens in one block, as the scheduler counts them."""
    cache_groups: tuple[int, ...] = ()
    """KV cache group of each layer: its layers share block ids. Empty if there is one group."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise GeometryError("no KV layers to move; register at least one attention layer")
        if self.cache_groups and len(self.cache_groups) != len(self.layers):
            raise GeometryError(f"{len(self.layers)} layers and the KV cache groups of {len(self.cache_groups)}")
        for layer in self.layers:
            if layer.num_pages != self.num_blocks:
                raise GeometryError(
                    f"layer {layer.name!r} has {layer.num_pages} pages and the scheduler {self.num_blocks} blocks; "
                    "they must be equal"
                )

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each KV cache group."""
        of = self.cache_groups or (0,) * len(self.layers)
        return tuple(tuple(layer for layer, its in enumerate(of) if its == group) for group in range(max(of) + 1))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of this rank."""
        return sum(layer.page_bytes for layer in self.layers)


def layer_pages(
    *,
    name: str,
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    storage_offset: int,
    num_blocks: int,
) -> LayerPages:
    """Derive the pages of one layer from a tensor view whose first dimension counts blocks.

    Args:
        name: the layer, for messages.
        shape: `[num_blocks * split, ...]`; `split` > 1 when one scheduler block is several consecutive kernel blocks.
        strides: in elements, like `shape`.
        itemsize: bytes of one element.
        storage_offset: elements from the start of the storage.
        num_blocks: blocks as the scheduler counts them.

    Raises:
        GeometryError: the first dimension is not a multiple of `num_blocks`, the view overlaps itself, or strides are
            not positive.
    """
    if len(shape) != len(strides) or len(shape) < 2:
        raise GeometryError(f"layer {name!r}: shape {tuple(shape)} and strides {tuple(strides)} do not describe blocks")
    if num_blocks < 1 or shape[0] % num_blocks or shape[0] == 0:
        raise GeometryError(
            f"layer {name!r}: its first dimension is {shape[0]}, which is not a multiple of the scheduler's "
            f"{num_blocks} blocks; layouts must count blocks in the first dimension"
        )
    if any(extent < 1 for extent in shape) or any(s < 1 for s, n in zip(strides, shape, strict=True) if n > 1):
        raise GeometryError(
            f"layer {name!r}: shape {tuple(shape)} with strides {tuple(strides)} has an empty or backward dimension"
        )
    dims = [(extent, stride * itemsize) for extent, stride in zip(shape, strides, strict=True) if extent > 1]
    if _may_overlap(dims, itemsize):
        raise GeometryError(
            f"layer {name!r}: shape {tuple(shape)} with strides {tuple(strides)} may overlap itself; only layouts in "
            "which every block owns its bytes can be moved"
        )
    split = shape[0] // num_blocks
    inner = dims[1:] if shape[0] > 1 else dims
    if split > 1:
        inner.append((split, strides[0] * itemsize))
    run_bytes = itemsize
    outer: list[tuple[int, int]] = []
    for extent, stride in sorted(inner, key=lambda dim: dim[1]):
        if stride == run_bytes:
            run_bytes *= extent
        else:
            outer.append((extent, stride))
    # Bytes keep the order of memory within a run and of strides between runs: any order is right as long as saving
    # and loading agree, and this one gives the fewest, longest runs.
    outer.reverse()
    run_offsets = tuple(
        sum(index * stride for index, (_, stride) in zip(indices, outer, strict=True))
        for indices in itertools.product(*(range(extent) for extent, _ in outer))
    )
    return LayerPages(
        name=name,
        num_pages=num_blocks,
        offset=storage_offset * itemsize,
        page_stride=strides[0] * itemsize * split,
        run_offsets=run_offsets,
        run_bytes=run_bytes,
    )


def _may_overlap(dims: Sequence[tuple[int, int]], itemsize: int) -> bool:
    """Whether two elements of a view can share a byte, given (extent, stride in bytes) of its dimensions.

    Every dimension must step over all that the finer ones span. Each permutation of a dense buffer's dimensions does,
    also padded or sliced; the few disjoint views that do not are no cache layout, and refusing them costs nothing.
    """
    span = itemsize
    for extent, stride in sorted(dims, key=lambda dim: dim[1]):
        if stride < span:
            return True
        span += (extent - 1) * stride
    return False
