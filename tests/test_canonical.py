from __future__ import annotations

from typing import Any

import pytest
import torch

from layerstream.canonical import PLAIN_DTYPES, ChunkForm, PageForm, RowForm, page_form, row_form
from layerstream.errors import GeometryError
from layerstream.kernels import reference
from layerstream.kernels.relayout_reference import canonical_to_pages, pages_to_canonical
from layerstream.portions import Portion
from tests.kernels.pages import ids, poisoned
from tests.kernels.rows import BLOCKS, CASES, LAYOUTS, ROWS, Cache, Layout, content

ROW = RowForm(item_bytes=2, key_bytes=16, value_bytes=16)
PAGE: dict[str, Any] = {
    "name": "layer 7",
    "row": ROW,
    "heads": 3,
    "splits": 2,
    "split_tokens": 4,
    "parts": 1,
    "order": "snhk",
}
PLAIN: dict[str, Any] = {
    "name": "layer 7",
    "kv_cache_dtype": "auto",
    "isa": None,
    "item_bytes": 2,
    "key_elements": 128,
    "value_elements": 128,
    "content_bytes": 512,
    "kv_heads": 4,
    "head_slots": 4,
}
VIEW: dict[str, Any] = {
    "name": "layer 7",
    "row": ROW,
    "axes": "bhnc",
    "shape": (10, 3, 4, 16),
    "strides": (192, 64, 16, 1),
    "num_blocks": 5,
    "block_tokens": 8,
}


@pytest.mark.parametrize(("layout", "row"), CASES.values(), ids=CASES.keys())
def test_saved_pages_of_every_layout_become_the_same_canonical_bytes_and_back(layout: Layout, row: RowForm) -> None:
    for block_tokens in BLOCKS:
        heads = 1 if block_tokens == 4 else 3
        kv = content(heads, 2 * block_tokens, row)
        cache = Cache(layout, kv, row, block_tokens)
        form, chunk = cache.form, ChunkForm(row=row, heads=heads, tokens=2 * block_tokens)
        assert (form.page_bytes, form.tokens) == (cache.layer.page_bytes, block_tokens)
        everything = Portion(heads=heads, tokens=chunk.tokens)
        canonical = poisoned(chunk.nbytes)
        pages_to_canonical(canonical, cache.pages, form, chunk, everything)
        assert torch.equal(canonical, kv.flatten())
        pages = poisoned(cache.pages.numel())
        canonical_to_pages(pages, canonical, form, chunk, everything)
        assert torch.equal(pages, cache.pages)
        other = Cache(layout, torch.zeros_like(kv), row, block_tokens)
        reference.scatter_pages(other.storage, pages, other.layer, ids([0, 1]))
        assert torch.equal(other.read(), kv) and torch.equal(other.storage, cache.storage)


def test_one_canonical_form_joins_those_of_its_ranks() -> None:
    kv = content(4, 16, ROW)
    layout, chunk = LAYOUTS["tokens first"], ChunkForm(row=ROW, heads=2, tokens=16)
    ranks = []
    for first in (0, 2):
        cache = Cache(layout, kv[first : first + 2], ROW, 8)
        ranks.append(poisoned(chunk.nbytes))
        pages_to_canonical(ranks[-1], cache.pages, cache.form, chunk, Portion(heads=2, tokens=16))
    assert torch.equal(torch.cat(ranks), kv.flatten())


def test_strides_follow_the_order() -> None:
    assert PageForm(**PAGE).strides == {"s": 384, "n": 96, "h": 32, "k": 32}
    apart = PageForm(**PAGE | {"parts": 2, "order": "kshn"})
    assert apart.strides == {"k": 384, "s": 192, "h": 64, "n": 16}
    assert (apart.part_bytes, apart.page_bytes, apart.tokens) == (16, 768, 8)


@pytest.mark.parametrize(("axes", "memory", "order"), [("bhnc", "bnhc", "snh"), ("bhnc", "hbnc", "hsn")])
def test_the_order_is_that_of_the_strides(axes: str, memory: str, order: str) -> None:
    form = Cache(Layout(axes, memory, splits=2), content(3, 16, ROW), ROW, 8).form
    assert form.order.replace("k", "") == order


def test_plain_rows_are_taken() -> None:
    assert row_form(**PLAIN) == RowForm(item_bytes=2, key_bytes=256, value_bytes=256)
    latent = {"key_elements": 576, "value_elements": 0, "content_bytes": 1152, "kv_heads": 1, "head_slots": 1}
    assert row_form(**PLAIN | latent) == RowForm(item_bytes=2, key_bytes=1152, value_bytes=0)
    for dtype in PLAIN_DTYPES:
        assert row_form(**PLAIN | {"kv_cache_dtype": dtype}).nbytes == 512


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype 'int8_per_token_head' packs its elements"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype 'fp8_ds_mla' packs its elements"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype 'nvfp4' packs its elements"),
        ({"kv_cache_dtype": "of next year"}, "kv_cache_dtype 'of next year' packs its elements"),
        ({"isa": "amx"}, "pages are packed for the instruction set amx"),
        ({"content_bytes": 520}, "520 bytes hold 128 . 128 elements of 2"),
        ({"head_slots": 8}, "8 places hold 4 heads"),
        ({"tokens_per_state": 4}, "an entry covers 4 tokens"),
    ],
)
def test_packed_pages_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(GeometryError, match=f"layer 'layer 7': its KV is packed .*{reason}.* turn the option portable"):
        row_form(**PLAIN | changes)


def test_every_reason_is_named() -> None:
    with pytest.raises(GeometryError, match=r"nvfp4.*; .*amx.*; .*520"):
        row_form(**PLAIN | {"kv_cache_dtype": "nvfp4", "isa": "amx", "content_bytes": 520})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes": "bhn"}, "axes 'bhn' of a view"),
        ({"axes": "bhnn"}, "axes 'bhnn' of a view"),
        ({"axes": "hbnc"}, "axes 'hbnc' of a view"),
        ({"axes": "bkhnc"}, "axes 'bkhnc' of a view"),
        ({"axes": ""}, "axes '' of a view"),
        ({"shape": (10, 3, 4, 17), "strides": (204, 68, 17, 1)}, "dimension c must hold a whole row"),
        ({"strides": (192, 64, 1, 4)}, "dimension c must hold a whole row"),
        ({"axes": "bkhnc", "shape": (10, 2, 3, 4, 16), "strides": (384, 192, 64, 16, 1)}, "or with k a key or a value"),
        ({"axes": "bkhnc", "shape": (10, 4, 3, 4, 4), "strides": (192, 48, 16, 4, 1)}, "or with k a key or a value"),
        ({"axes": "bkhnc", "shape": (10, 1, 3, 4, 16), "strides": (192, 192, 64, 16, 1)}, "or with k a key or a value"),
        ({"block_tokens": 4}, "2 kernel blocks of 4 tokens do not make a block of 4"),
        ({"num_blocks": 3}, "not a multiple of the scheduler's 3 blocks"),
        ({"strides": (100, 64, 16, 1)}, "may overlap itself"),
    ],
)
def test_views_without_such_rows_are_refused(changes: dict[str, Any], message: str) -> None:
    assert page_form(**VIEW).order[0] == "s"
    with pytest.raises(GeometryError, match=f"layer 'layer 7'.*{message}"):
        page_form(**VIEW | changes)


def test_keys_and_values_of_two_lengths_cannot_be_apart() -> None:
    view = {"axes": "bkhnc", "shape": (10, 2, 3, 4, 8), "strides": (192, 96, 32, 8, 1)}
    assert page_form(**VIEW | view).parts == 2
    with pytest.raises(GeometryError, match="rows of 20 and 12 bytes in 2 parts"):
        page_form(**VIEW | view | {"row": RowForm(item_bytes=2, key_bytes=20, value_bytes=12)})


@pytest.mark.parametrize("order", ["snh", "snhh", "snhx", "snhkk"])
def test_orders_that_are_no_permutation_are_refused(order: str) -> None:
    with pytest.raises(GeometryError, match=f"order '{order}' is no permutation"):
        PageForm(**PAGE | {"order": order})


@pytest.mark.parametrize("axis", ["heads", "splits", "split_tokens"])
def test_empty_pages_are_refused(axis: str) -> None:
    with pytest.raises(GeometryError, match="all must be at least 1"):
        PageForm(**PAGE | {axis: 0})


@pytest.mark.parametrize(
    ("parts", "row"),
    [(0, ROW), (3, ROW), (2, RowForm(item_bytes=2, key_bytes=16, value_bytes=8)), (2, ROWS["latent"])],
)
def test_parts_that_are_not_equal_halves_are_refused(parts: int, row: RowForm) -> None:
    with pytest.raises(GeometryError, match="parts is 1, or 2"):
        PageForm(**PAGE | {"parts": parts, "row": row})


@pytest.mark.parametrize(("item", "key", "value"), [(3, 6, 6), (8, 8, 8), (2, 0, 2), (2, 2, -2), (2, 3, 2), (2, 2, 3)])
def test_rows_of_anything_but_whole_elements_are_refused(item: int, key: int, value: int) -> None:
    with pytest.raises(GeometryError, match=f"a row of {key} and {value} bytes in elements of {item}"):
        RowForm(item_bytes=item, key_bytes=key, value_bytes=value)


@pytest.mark.parametrize(("heads", "tokens"), [(0, 1), (1, 0)])
def test_empty_chunks_are_refused(heads: int, tokens: int) -> None:
    with pytest.raises(GeometryError, match="both must be at least 1"):
        ChunkForm(row=ROW, heads=heads, tokens=tokens)
