from __future__ import annotations

from typing import Any

import pytest

from layerstream.canonical import ChunkForm, PageForm, RowForm
from layerstream.errors import GeometryError
from layerstream.portions import Extent, Portion, rank_heads

ROW = RowForm(item_bytes=2, key_bytes=16, value_bytes=16)
PAGE = PageForm(name="layer 7", row=ROW, heads=3, split_tokens=8, order="snhk")
CHUNK = ChunkForm(row=ROW, heads=5, tokens=20)
FITTING: dict[str, Any] = {
    "heads": 2,
    "tokens": 13,
    "page_head": 1,
    "page_token": 3,
    "chunk_head": 3,
    "chunk_token": 7,
}


def check(page: PageForm = PAGE, chunk: ChunkForm = CHUNK, pages: int = 2, room: int = 0, **changes: int) -> None:
    Portion(**FITTING | changes).check(
        page, chunk, pages_bytes=pages * PAGE.page_bytes, chunk_bytes=CHUNK.nbytes + room
    )


def test_a_portion_may_touch_every_end() -> None:
    check()
    check(room=5)
    check(heads=0, page_head=3, chunk_head=5)
    check(tokens=0, page_token=16, chunk_token=20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_head": -1}, "2 heads of the pages from -1 on, and there are 3"),
        ({"page_head": 2}, "2 heads of the pages from 2 on, and there are 3"),
        ({"chunk_head": 4}, "2 heads of the chunk from 4 on, and there are 5"),
        ({"chunk_head": -1}, "2 heads of the chunk from -1 on, and there are 5"),
        ({"page_token": 4}, "13 tokens of 2 pages from 4 on, and there are 16"),
        ({"page_token": -1}, "13 tokens of 2 pages from -1 on, and there are 16"),
        ({"chunk_token": 8}, "13 tokens of the chunk from 8 on, and there are 20"),
        ({"chunk_token": -1}, "13 tokens of the chunk from -1 on, and there are 20"),
        ({"heads": -1}, "-1 heads of the pages from 1 on"),
        ({"tokens": -1}, "-1 tokens of 2 pages from 3 on"),
        ({"pages": 1}, "13 tokens of 1 pages from 3 on, and there are 8"),
        ({"room": -1}, "3199 bytes for a chunk of 3200; pass a longer buffer"),
    ],
)
def test_what_is_not_inside_both_sides_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GeometryError, match=f"layer 'layer 7': {message}"):
        check(**changes)


@pytest.mark.parametrize(("item", "key", "value"), [(1, 16, 16), (2, 18, 14), (2, 32, 0)])
def test_rows_that_differ_in_anything_are_refused(item: int, key: int, value: int) -> None:
    other = RowForm(item_bytes=item, key_bytes=key, value_bytes=value)
    with pytest.raises(GeometryError, match="rows must be equal"):
        check(chunk=ChunkForm(row=other, heads=5, tokens=20))


def test_the_common_portion_is_the_intersection() -> None:
    for pages in (Extent(first_head=h, heads=n, first_token=16, tokens=32) for h in range(4) for n in range(1, 4)):
        for first_token, tokens in ((0, 16), (0, 17), (20, 8), (40, 16), (47, 1), (48, 16), (0, 64)):
            chunk = Extent(first_head=2, heads=2, first_token=first_token, tokens=tokens)
            heads = {*range(pages.first_head, pages.first_head + pages.heads)} & {2, 3}
            both = {*range(16, 48)} & {*range(first_token, first_token + tokens)}
            portion = Portion.common(pages, chunk)
            if not heads or not both:
                assert portion is None
                continue
            assert portion == Portion(
                heads=len(heads),
                tokens=len(both),
                page_head=min(heads) - pages.first_head,
                page_token=min(both) - 16,
                chunk_head=min(heads) - 2,
                chunk_token=min(both) - first_token,
            )


@pytest.mark.parametrize(
    ("kv_heads", "tp_size", "dealt"),
    [
        (8, 1, [(0, 8)]),
        (8, 4, [(0, 2), (2, 2), (4, 2), (6, 2)]),
        (2, 4, [(0, 1), (0, 1), (1, 1), (1, 1)]),
        (1, 2, [(0, 1), (0, 1)]),
        (3, 3, [(0, 1), (1, 1), (2, 1)]),
    ],
)
def test_heads_are_dealt_as_vllm_deals_them(kv_heads: int, tp_size: int, dealt: list[tuple[int, int]]) -> None:
    assert [rank_heads(kv_heads, tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)] == dealt


@pytest.mark.parametrize(("kv_heads", "tp_rank", "tp_size"), [(8, 0, 3), (3, 0, 4), (0, 0, 1), (8, 2, 2), (8, -1, 2)])
def test_heads_that_do_not_divide_are_refused(kv_heads: int, tp_rank: int, tp_size: int) -> None:
    with pytest.raises(GeometryError, match="one number must divide the other"):
        rank_heads(kv_heads, tp_rank=tp_rank, tp_size=tp_size)
