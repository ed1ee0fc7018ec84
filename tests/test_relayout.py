from __future__ import annotations

import functools
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from layerstream import relayout
from layerstream.canonical import ChunkForm, PageForm, RowForm
from layerstream.errors import GeometryError
from layerstream.kernels import relayout_reference
from layerstream.portions import Extent, Portion, rank_heads
from layerstream.relayout import Bytes
from tests.kernels.pages import POISON, noise, poisoned
from tests.kernels.rows import BLOCKS, CASES, LAYOUTS, ROWS, Cache, Layout, content

ROW = ROWS["2 bytes"]
PAGE = PageForm(name="layer 7", row=ROW, heads=3, splits=2, split_tokens=4, order="snhk")
CHUNK = ChunkForm(row=ROW, heads=5, tokens=30)
PORTION = Portion(heads=2, tokens=13, page_head=1, page_token=3, chunk_head=2, chunk_token=7)


def moved(form: PageForm, chunk: ChunkForm, portion: Portion, pages: int) -> None:
    """Move both ways into the middle of poisoned memory, and compare all of it with the twin."""
    for name, dst_bytes, src_bytes in (
        ("pages_to_canonical", chunk.nbytes, pages * form.page_bytes),
        ("canonical_to_pages", pages * form.page_bytes, chunk.nbytes),
    ):
        src, memory = noise(src_bytes), poisoned(dst_bytes + 64)
        expected = memory.clone()
        getattr(relayout, name)(memory.numpy()[32:-32], src.numpy(), form, chunk, portion)
        getattr(relayout_reference, name)(expected[32:-32], src, form, chunk, portion)
        assert torch.equal(memory, expected)
        assert int((memory != POISON).sum()) == portion.heads * portion.tokens * form.row.nbytes
        assert torch.equal(src, noise(src_bytes))


@pytest.mark.parametrize(("layout", "row"), CASES.values(), ids=CASES.keys())
def test_bytes_are_those_of_the_twin(layout: Layout, row: RowForm) -> None:
    for block_tokens in BLOCKS:
        form = Cache(layout, content(4, block_tokens, row), row, block_tokens).form
        chunk = ChunkForm(row=row, heads=5, tokens=2 * block_tokens + 3)
        tokens = min(20, block_tokens + 1 + block_tokens // 2)
        inside = {"page_token": block_tokens - 1, "chunk_token": 2}
        moved(form, chunk, Portion(heads=2, tokens=tokens, page_head=2, chunk_head=1, **inside), 3)


@pytest.mark.parametrize("order", ["snhk", "nshk", "hsnk"])
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_any_stretch_of_tokens_moves(order: str, splits: int) -> None:
    row = ROWS["4 bytes"]
    form = PageForm(name="rows", row=row, heads=2, splits=splits, split_tokens=12 // splits, parts=2, order=order)
    chunk = ChunkForm(row=row, heads=2, tokens=36)
    for start, stop in product(range(13), range(0, 37, 3)):
        if start <= stop:
            moved(form, chunk, Portion(heads=2, tokens=stop - start, page_token=start, chunk_token=36 - stop), 3)


@pytest.mark.parametrize("portion", [Portion(heads=0, tokens=4), Portion(heads=3, tokens=0)])
def test_an_empty_portion_moves_nothing(portion: Portion) -> None:
    moved(PAGE, CHUNK, portion, 1)


HEADS, TOKENS, OBJECT = 4, 256, 64
KV = content(HEADS, TOKENS, ROW)


@functools.cache
def saved(layout: Layout, block_tokens: int, first: int, heads: int, start: int) -> tuple[PageForm, Bytes]:
    """Form and bytes of the pages that hold these heads of all tokens from `start` on."""
    cache = Cache(layout, KV[first : first + heads, start:], ROW, block_tokens)
    return cache.form, cache.pages.numpy()


def stored(layout: Layout, block_tokens: int, tp_size: int) -> list[tuple[Extent, ChunkForm, Bytes]]:
    """What the ranks of an engine write: objects of 64 tokens each."""
    objects: list[tuple[Extent, ChunkForm, Bytes]] = []
    for rank, start in product(range(tp_size), range(0, TOKENS, OBJECT)):
        first, heads = rank_heads(HEADS, tp_rank=rank, tp_size=tp_size)
        form, pages = saved(layout, block_tokens, first, heads, 0)
        chunk = ChunkForm(row=ROW, heads=heads, tokens=OBJECT)
        portion = Portion(heads=heads, tokens=OBJECT, page_token=start)
        objects.append(
            (
                Extent(first_head=first, heads=heads, first_token=start, tokens=OBJECT),
                chunk,
                np.full(chunk.nbytes, POISON, np.uint8),
            )
        )
        relayout.pages_to_canonical(objects[-1][-1], pages, form, chunk, portion)
        canonical = KV[first : first + heads, start : start + OBJECT]
        assert np.array_equal(objects[-1][-1], canonical.flatten().numpy())
    return objects


@pytest.mark.parametrize("tp", [(1, 2), (2, 1), (4, 8), (2, 4)], ids=str)
@pytest.mark.parametrize("blocks", list(product(BLOCKS, BLOCKS)), ids=str)
def test_chunks_of_one_engine_serve_another(blocks: tuple[int, int], tp: tuple[int, int]) -> None:
    """Of other layout, block size and tensor-parallel size."""
    # What is stored does not depend on the layout, so each layout needs to be written from once and read into once.
    for layout, other in zip(LAYOUTS.values(), [*LAYOUTS.values()][::-1], strict=True):
        objects = stored(layout, blocks[0], tp[0])
        # The reader has the first block already, and may read from inside an object on.
        start = blocks[1]
        first, heads = rank_heads(HEADS, tp_rank=tp[1] - 1, tp_size=tp[1])
        wanted = Extent(first_head=first, heads=heads, first_token=start, tokens=TOKENS - start)
        form, expected = saved(other, blocks[1], first, heads, start)
        pages = np.full(expected.size, POISON, np.uint8)
        for extent, chunk, memory in objects:
            if (portion := Portion.common(wanted, extent)) is not None:
                relayout.canonical_to_pages(pages, memory, form, chunk, portion)
        assert np.array_equal(pages, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pages": noise(2 * PAGE.page_bytes).view(torch.int16)}, "pages is int16"),
        ({"pages": noise(4 * PAGE.page_bytes)[::2]}, "pages is uint8 of shape .* and strides"),
        ({"chunk": noise(CHUNK.nbytes)[None]}, "chunk is uint8 of shape"),
        ({"chunk": noise(CHUNK.nbytes - 1)}, "7199 bytes for a chunk of 7200"),
        ({"pages": noise(2 * PAGE.page_bytes - 1)}, "13 tokens of 1 pages from 3 on"),
    ],
)
def test_operands_that_do_not_fit_are_refused_before_a_byte_moves(changes: dict[str, Any], message: str) -> None:
    given = {"pages": noise(2 * PAGE.page_bytes), "chunk": noise(CHUNK.nbytes)} | changes
    before = [each.clone() for each in given.values()]
    pages, chunk = (each.numpy() for each in given.values())
    with pytest.raises(GeometryError, match=f"layer 'layer 7': {message}"):
        relayout.pages_to_canonical(chunk, pages, PAGE, CHUNK, PORTION)
    with pytest.raises(GeometryError, match=f"layer 'layer 7': {message}"):
        relayout.canonical_to_pages(pages, chunk, PAGE, CHUNK, PORTION)
    assert all(map(torch.equal, before, given.values()))
