"""Pages against tables of real layouts, and against an oracle that looks up the address of every element."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from layerstream.errors import GeometryError
from layerstream.geometry import KVGeometry, LayerPages, layer_pages


def page_addresses(pages: LayerPages, page: int) -> list[int]:
    """Address of every byte of a page, in packed order."""
    start = pages.offset + page * pages.page_stride
    return [start + run + byte for run in pages.run_offsets for byte in range(pages.run_bytes)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A layout as an engine makes it, and its pages in numbers. Strides in elements, the rest in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    layer_offset: int
    """Elements from one layer to the next."""
    itemsize: int = 2
    num_blocks: int = 64
    page_stride: int
    run_bytes: int
    runs: tuple[int, int] = (1, 0)
    """(count, distance)"""


LLAMA = (64, 8, 16, 256)
TABLE = {
    "LBNHC": Row(shape=LLAMA, strides=(32768, 256, 2048, 1), layer_offset=2097152, page_stride=65536, run_bytes=65536),
    "LBHNC": Row(shape=LLAMA, strides=(32768, 4096, 256, 1), layer_offset=2097152, page_stride=65536, run_bytes=65536),
    "BLHNC": Row(shape=LLAMA, strides=(131072, 4096, 256, 1), layer_offset=32768, page_stride=262144, run_bytes=65536),
    "BLNHC": Row(shape=LLAMA, strides=(131072, 256, 2048, 1), layer_offset=32768, page_stride=262144, run_bytes=65536),
    "BHLNC": Row(
        shape=LLAMA,
        strides=(131072, 16384, 256, 1),
        layer_offset=4096,
        page_stride=262144,
        run_bytes=8192,
        runs=(8, 32768),
    ),
    "LHBNC": Row(
        shape=LLAMA,
        strides=(4096, 262144, 256, 1),
        layer_offset=2097152,
        page_stride=8192,
        run_bytes=8192,
        runs=(8, 524288),
    ),
    "four ranks": Row(
        shape=(64, 2, 16, 256), strides=(8192, 256, 512, 1), layer_offset=524288, page_stride=16384, run_bytes=16384
    ),
    "fp8": Row(
        shape=LLAMA,
        strides=(32768, 256, 2048, 1),
        layer_offset=2097152,
        itemsize=1,
        page_stride=32768,
        run_bytes=32768,
    ),
    "block of two kernel blocks": Row(
        shape=(128, 8, 16, 256),
        strides=(32768, 256, 2048, 1),
        layer_offset=4194304,
        page_stride=131072,
        run_bytes=131072,
    ),
    "latent": Row(
        shape=(64, 1, 64, 576), strides=(36864, 576, 576, 1), layer_offset=2359296, page_stride=73728, run_bytes=73728
    ),
    "latent fp8 with scales": Row(
        shape=(64, 1, 64, 656),
        strides=(41984, 656, 656, 1),
        layer_offset=2686976,
        itemsize=1,
        page_stride=41984,
        run_bytes=41984,
    ),
    "CPU": Row(
        shape=(1024, 4, 128, 128),
        strides=(65536, 16384, 128, 1),
        layer_offset=67108864,
        num_blocks=1024,
        page_stride=131072,
        run_bytes=131072,
    ),
    "keys and values apart, blocks moved first": Row(
        shape=(64, 2, 16, 8, 128),
        strides=(16384, 1048576, 1024, 128, 1),
        layer_offset=2097152,
        page_stride=32768,
        run_bytes=32768,
        runs=(2, 2097152),
    ),
}


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
@pytest.mark.parametrize("layer", [0, 3])
def test_known_layouts_in_numbers(row: Row, layer: int) -> None:
    pages = layer_pages(
        name=f"layers.{layer}",
        shape=row.shape,
        strides=row.strides,
        itemsize=row.itemsize,
        storage_offset=layer * row.layer_offset,
        num_blocks=row.num_blocks,
    )
    count, distance = row.runs
    assert pages == LayerPages(
        name=f"layers.{layer}",
        num_pages=row.num_blocks,
        offset=layer * row.layer_offset * row.itemsize,
        page_stride=row.page_stride,
        run_offsets=tuple(run * distance for run in range(count)),
        run_bytes=row.run_bytes,
    )
    assert pages.page_bytes == math.prod(row.shape) // row.num_blocks * row.itemsize
    assert pages.alignment == 16


DIMS = "LBKHNC"
"""Layers, kernel blocks, keys and values where they are apart, heads, tokens, content."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """One buffer for all layers, as a permutation of its dimensions, outermost first. `B` counts whole blocks."""

    order: tuple[str, ...]
    extents: dict[str, int]
    split: int = 1
    """Kernel blocks in one block."""
    itemsize: int = 1
    storage_offset: int = 0
    """Elements before the buffer."""
    padding: int = 0
    """Unused elements after each row of content, as in a view of rows of unequal width."""

    def allocated(self) -> dict[str, int]:
        return {
            **self.extents,
            "B": self.extents["B"] * self.split,
            "C": self.extents["C"] + self.padding,
        }

    def strides(self) -> dict[str, int]:
        """In elements."""
        allocated, step, strides = self.allocated(), 1, {}
        for dim in reversed(self.order):
            strides[dim] = step
            step *= allocated[dim]
        return strides

    def shape(self) -> tuple[int, ...]:
        """Of one layer's view, kernel blocks first."""
        return tuple({**self.allocated(), "C": self.extents["C"]}[dim] for dim in "BKHNC")

    def pages(self, layer: int) -> LayerPages:
        strides = self.strides()
        return layer_pages(
            name=f"layers.{layer}",
            shape=self.shape(),
            strides=tuple(strides[dim] for dim in "BKHNC"),
            itemsize=self.itemsize,
            storage_offset=self.storage_offset + layer * strides["L"],
            num_blocks=self.extents["B"],
        )

    def addresses(self, layer: int, block: int) -> list[int]:
        """Address of every byte of every element of a block, by looking each up in a buffer of addresses."""
        size = self.storage_offset + math.prod(self.allocated().values())
        buffer = np.arange(size * self.itemsize, dtype=np.int64).reshape(size, self.itemsize)
        strides, word = self.strides(), buffer.itemsize
        view = as_strided(
            buffer[self.storage_offset + layer * strides["L"] :],
            shape=(*self.shape(), self.itemsize),
            strides=(*(strides[dim] * self.itemsize * word for dim in "BKHNC"), word),
        )
        return [int(address) for address in view[block * self.split : (block + 1) * self.split].ravel()]


def same(order: str, extent: int, **options: int) -> Layout:
    return Layout(order=tuple(order), extents=dict.fromkeys(DIMS, extent), **options)


layouts = st.builds(
    Layout,
    order=st.permutations(DIMS).map(tuple),
    extents=st.fixed_dictionaries({dim: st.integers(1, 3) for dim in DIMS}),
    split=st.integers(1, 2),
    itemsize=st.sampled_from([1, 2, 4]),
    storage_offset=st.integers(0, 5),
    padding=st.integers(0, 2),
)


@given(layouts)
# All extents equal: nothing about the blocks can be read off the shape.
@example(same("LBKHNC", 2))
@example(same("LKBNHC", 2, split=2, itemsize=2))
@example(same("BLKHNC", 3, storage_offset=5))
@example(same("LKHBNC", 2, itemsize=2, padding=1))
@example(same("CNHKBL", 2))
def test_pages_hold_the_bytes_of_their_block(layout: Layout) -> None:
    seen: set[int] = set()
    for layer in range(layout.extents["L"]):
        pages = layout.pages(layer)
        packed = [page_addresses(pages, page) for page in range(pages.num_pages)]
        for block, addresses in enumerate(packed):
            assert sorted(addresses) == sorted(layout.addresses(layer, block))
            assert len(addresses) == pages.page_bytes
        everything = [address for addresses in packed for address in addresses]
        assert pages.end == max(everything) + 1
        assert len(set(everything)) == len(everything)
        assert seen.isdisjoint(everything)
        seen.update(everything)
    if not layout.padding:
        first = layout.storage_offset * layout.itemsize
        assert seen == set(range(first, first + math.prod(layout.allocated().values()) * layout.itemsize))


@given(layouts)
def test_runs_are_the_longest_in_ascending_order(layout: Layout) -> None:
    pages = layout.pages(0)
    addresses = sorted(layout.addresses(0, 0))
    breaks = sum(after - before != 1 for before, after in itertools.pairwise(addresses))
    assert len(pages.run_offsets) == breaks + 1
    assert pages.run_offsets[0] == 0
    assert all(before < after for before, after in itertools.pairwise(pages.run_offsets))


@given(layouts)
# Rows of 8 bytes, 12 apart, in pages of 24: only the rows' distance is not a multiple of 8.
@example(Layout(order=tuple(DIMS), extents={**dict.fromkeys(DIMS, 1), "B": 2, "N": 2, "C": 2}, itemsize=4, padding=1))
def test_alignment_is_the_largest_that_holds(layout: Layout) -> None:
    pages = layout.pages(layout.extents["L"] - 1)
    numbers = [pages.run_bytes] + [
        pages.offset + page * pages.page_stride + run for page in range(pages.num_pages) for run in pages.run_offsets
    ]
    assert pages.alignment in (1, 2, 4, 8, 16)
    assert all(number % pages.alignment == 0 for number in numbers)
    if pages.alignment < 16 and pages.num_pages > 1:
        assert any(number % (2 * pages.alignment) for number in numbers)


@given(
    shape=st.lists(st.integers(1, 3), min_size=2, max_size=4),
    strides=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    itemsize=st.sampled_from([1, 2]),
)
@example(shape=[1, 2, 4], strides=[2, 2, 1, 0], itemsize=1)
@example(shape=[2, 3], strides=[2, 1, 0, 0], itemsize=2)
def test_nothing_accepted_shares_a_byte(shape: list[int], strides: list[int], itemsize: int) -> None:
    try:
        pages = layer_pages(
            name="x",
            shape=shape,
            strides=strides[: len(shape)],
            itemsize=itemsize,
            storage_offset=0,
            num_blocks=shape[0],
        )
    except GeometryError:
        return
    everything = [address for page in range(shape[0]) for address in page_addresses(pages, page)]
    assert len(set(everything)) == len(everything) == math.prod(shape) * itemsize


def refused(match: str, **changes: object) -> None:
    view: dict[str, object] = {"shape": (4, 2, 8), "strides": (16, 8, 1), "itemsize": 2, "num_blocks": 4}
    with pytest.raises(GeometryError, match=match) as caught:
        layer_pages(name="layers.7.attn", storage_offset=0, **{**view, **changes})  # type: ignore[arg-type]
    assert "'layers.7.attn'" in str(caught.value)


def test_overlaps_are_refused() -> None:
    refused("may overlap itself", strides=(8, 8, 1))
    refused("may overlap itself", strides=(15, 8, 1))
    refused("may overlap itself", strides=(16, 7, 1))
    refused("may overlap itself", strides=(16, 1, 1))
    refused("may overlap itself", shape=(1, 2, 4), strides=(2, 2, 1), num_blocks=1)
    refused("may overlap itself", shape=(4, 2, 8), strides=(1, 3, 8))


def test_blocks_must_divide_the_first_dimension() -> None:
    refused("first dimension is 4, which is not a multiple of the scheduler's 3 blocks", num_blocks=3)
    refused("not a multiple of the scheduler's 8 blocks", num_blocks=8)
    refused("not a multiple of the scheduler's 0 blocks", num_blocks=0)
    refused("first dimension is 0", shape=(0, 2, 8))
    # Keys and values outermost: a shape that must be permuted first, never guessed.
    refused("first dimension is 2", shape=(2, 64, 16, 8, 128), strides=(1048576, 16384, 1024, 128, 1), num_blocks=64)


def test_views_that_are_no_buffer_are_refused() -> None:
    refused("empty or backward", shape=(4, 0, 8))
    refused("empty or backward", strides=(16, 0, 1))
    refused("empty or backward", strides=(16, -8, 1))
    refused("do not describe blocks", strides=(16, 8))
    refused("do not describe blocks", shape=(4,), strides=(1,))


@pytest.mark.parametrize("stride", [0, -5, 3, 1 << 40])
def test_stride_of_a_dimension_of_one_means_nothing(stride: int) -> None:
    pages = layer_pages(
        name="x", shape=(1, 1, 8), strides=(stride, stride, 1), itemsize=2, storage_offset=3, num_blocks=1
    )
    assert page_addresses(pages, 0) == list(range(6, 22))
    assert pages.end == 22


def test_many_short_runs() -> None:
    """Content outermost: every element of a page is its own run."""
    pages = layer_pages(
        name="x", shape=(64, 8, 16, 256), strides=(1, 1024, 64, 8192), itemsize=2, storage_offset=0, num_blocks=64
    )
    assert pages.page_stride == pages.run_bytes == 2
    assert pages.run_offsets == tuple(range(0, 8 * 16 * 256 * 128, 128))


def dense(name: str, num_pages: int, page_bytes: int) -> LayerPages:
    return LayerPages(
        name=name, num_pages=num_pages, offset=0, page_stride=page_bytes, run_offsets=(0,), run_bytes=page_bytes
    )


def test_geometry_sums_its_layers() -> None:
    geometry = KVGeometry(layers=(dense("a", 4, 48), dense("b", 4, 16)), num_blocks=4, block_tokens=16)
    assert geometry.block_bytes == 64


def test_geometry_wants_layers_that_agree_on_blocks() -> None:
    with pytest.raises(GeometryError, match="layer 'b' has 5 pages and the scheduler 4 blocks"):
        KVGeometry(layers=(dense("a", 4, 48), dense("b", 5, 48)), num_blocks=4, block_tokens=16)
    with pytest.raises(GeometryError, match="no KV layers"):
        KVGeometry(layers=(), num_blocks=4, block_tokens=16)
