from __future__ import annotations

from dataclasses import replace

import pytest

from layerstream.canonical import PageForm, RowForm
from layerstream.errors import GeometryError
from layerstream.head_groups import HeadGroups, LayerHeads
from layerstream.portions import Portion, rank_heads

ROW = RowForm(item_bytes=2, key_bytes=16, value_bytes=16)


def layer(total: int, *, tp_rank: int = 0, tp_size: int = 1, name: str = "0", tokens: int = 16) -> LayerHeads:
    first, heads = rank_heads(total, tp_rank=tp_rank, tp_size=tp_size)
    form = PageForm(name=name, row=ROW, heads=heads, split_tokens=tokens, order="snhk")
    return LayerHeads(form=form, first=first, total=total)


def groups(*totals: int, tp_rank: int = 0, tp_size: int = 1, stage: int = 0) -> HeadGroups:
    layers = [layer(total, tp_rank=tp_rank, tp_size=tp_size, name=str(n)) for n, total in enumerate(totals)]
    return HeadGroups(layers=tuple(layers), stage=stage)


@pytest.mark.parametrize("totals", [(8,), (8, 8), (8, 4), (6, 9, 12), (1, 1), (40,)], ids=str)
@pytest.mark.parametrize("tp_size", range(1, 13))
def test_ranks_hold_every_head_of_every_group_once(totals: tuple[int, ...], tp_size: int) -> None:
    if any(total % tp_size for total in totals):
        return
    ranks = [groups(*totals, tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)]
    assert [number for rank in ranks for number in rank.numbers] == list(range(ranks[0].count))
    for place, total in enumerate(totals):
        heads: list[int] = []
        for rank in ranks:
            for group in range(rank.held):
                portion = rank.portion(place, group, tokens=16, chunk_token=48)
                assert (portion.heads, portion.tokens, portion.page_token) == (rank.heads[place], 16, 0)
                assert (portion.chunk_head, portion.chunk_token) == (0, 48)
                start = rank.layers[place].first + portion.page_head
                heads += range(start, start + portion.heads)
        assert heads == list(range(total))
    assert len({rank.digest() for rank in ranks}) == 1, "whatever rank, the groups are the same"


def test_a_group_has_a_part_of_each_layer() -> None:
    its = groups(8, 4)
    assert (its.count, its.heads, its.token_bytes) == (4, (2, 1), (64, 32))
    assert (its.chunk(0, 48).nbytes, its.chunk(1, 48).nbytes) == (64 * 48, 32 * 48)
    assert its.portion(1, 3, tokens=32, chunk_token=0) == Portion(heads=1, tokens=32, page_head=3)


def test_ranks_with_the_same_head_hold_the_same_group() -> None:
    assert [groups(2, tp_rank=rank, tp_size=4).numbers for rank in range(4)] == [
        range(1),
        range(1),
        range(1, 2),
        range(1, 2),
    ]


def test_stages_have_numbers_of_their_own() -> None:
    assert groups(4, stage=2, tp_rank=1, tp_size=2).numbers == range(10, 12)


@pytest.mark.parametrize("totals", [(4, 1), (1, 4), (8, 3)], ids=str)
def test_layers_that_ranks_share_out_differently_are_refused(totals: tuple[int, ...]) -> None:
    layers = tuple(
        layer(total, tp_size=4 if total % 4 == 0 else 1, name=str(place)) for place, total in enumerate(totals)
    )
    with pytest.raises(GeometryError, match=r"layer '\d': this rank holds KV heads .* turn the option portable off"):
        HeadGroups(layers=layers)


def test_heads_behind_the_last_are_refused() -> None:
    with pytest.raises(GeometryError, match="holds KV heads 4 to 7 of 4"):
        HeadGroups(layers=(replace(layer(4), first=4),))


def test_blocks_of_several_sizes_are_refused() -> None:
    with pytest.raises(GeometryError, match=r"and these hold \[16, 32\]; turn the option portable off"):
        HeadGroups(layers=(layer(4), layer(4, name="1", tokens=32)))
    with pytest.raises(GeometryError, match=r"and these hold \[\]"):
        HeadGroups(layers=())


def test_what_groups_hold_has_a_name_and_where_pages_have_it_does_not_count() -> None:
    its = groups(8, 8)
    other_pages = PageForm(name="0", row=ROW, heads=8, splits=2, split_tokens=16, parts=2, order="khns")
    laid_out = LayerHeads(form=other_pages, first=0, total=8)
    same = HeadGroups(layers=(laid_out, replace(laid_out, form=replace(other_pages, name="1"))))
    assert same.digest() == its.digest()
    wider = replace(laid_out, form=replace(other_pages, row=RowForm(item_bytes=4, key_bytes=16, value_bytes=16)))
    assert len({its.digest(), groups(8).digest(), groups(8, 4).digest(), HeadGroups(layers=(wider,)).digest()}) == 4
