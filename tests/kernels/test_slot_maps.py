"""Lists of blocks with padding, repeats and ids of no page, over buffers with guarded bytes on both sides."""

from __future__ import annotations

import itertools

import pytest
import torch

from layerstream.errors import GeometryError
from layerstream.geometry import LayerPages
from tests.kernels.conftest import Copies
from tests.kernels.pages import POISON, gathered, ids, noise, poisoned, positions, scattered

GUARD = 256
"""Guarded bytes before and after each buffer."""
PAGES = 5
LAYER = LayerPages(name="guarded", num_pages=PAGES, offset=32, page_stride=112, run_offsets=(0, 64), run_bytes=32)
PADDED = [
    [-1, -1, -1],
    [],
    [-1, 3],
    [3, -1],
    [-1, 2, -1, 0, -1],
    *map(list, itertools.permutations([4, -1, 0])),
    [-(2**31), 1],
    [-2, -1, 0],
]


def guarded(content: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(a buffer in the middle of guarded bytes, all of it)."""
    whole = torch.cat([poisoned(GUARD), content, poisoned(GUARD)])
    return whole[GUARD : GUARD + content.numel()], whole


def check_guards(*wholes: torch.Tensor) -> None:
    for whole in wholes:
        assert bool((whole[:GUARD] == POISON).all()) and bool((whole[-GUARD:] == POISON).all())


@pytest.mark.parametrize("blocks", PADDED, ids=str)
def test_padding_moves_nothing_wherever_it_stands(copies: Copies, blocks: list[int]) -> None:
    where = positions(LAYER)
    paged, paged_whole = guarded(noise(LAYER.end))
    packed, packed_whole = guarded(poisoned(len(blocks) * LAYER.page_bytes))
    before = paged.clone()
    copies.gather(packed, paged, LAYER, ids(blocks))
    assert torch.equal(packed, gathered(poisoned(packed.numel()), before, where, blocks))
    assert torch.equal(paged, before)
    source = noise(packed.numel())
    packed.copy_(source)
    paged.fill_(POISON)
    copies.scatter(paged, packed, LAYER, ids(blocks))
    assert torch.equal(paged, scattered(poisoned(paged.numel()), source, where, blocks))
    check_guards(paged_whole, packed_whole)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("wrong", [PAGES, PAGES + 1, 2**31 - 1])
def test_an_id_of_no_page_is_skipped_or_refused_before_a_byte_moves(copies: Copies, wrong: int, place: int) -> None:
    blocks, where = [4, 0, 2], positions(LAYER)
    blocks[place] = wrong
    paged, paged_whole = guarded(noise(LAYER.end))
    packed, packed_whole = guarded(poisoned(3 * LAYER.page_bytes))
    moved = [block if block < PAGES else -1 for block in blocks]
    if copies.refuses_large_ids:
        moved = [-1] * 3
        for copy, arguments in ((copies.gather, (packed, paged)), (copies.scatter, (paged, packed))):
            with pytest.raises(GeometryError, match=f"block id {wrong} in a cache of {PAGES} pages"):
                copy(*arguments, LAYER, ids(blocks))
    else:
        copies.gather(packed, paged, LAYER, ids(blocks))
    assert torch.equal(packed, gathered(poisoned(packed.numel()), noise(LAYER.end), where, moved))
    if not copies.refuses_large_ids:
        paged.fill_(POISON)
        packed.copy_(noise(packed.numel()))
        copies.scatter(paged, packed, LAYER, ids(blocks))
        assert torch.equal(paged, scattered(poisoned(paged.numel()), noise(packed.numel()), where, moved))
    check_guards(paged_whole, packed_whole)


@pytest.mark.parametrize("blocks", [[1, 1], [2, 0, 2, 2], [4] * 5], ids=str)
def test_a_repeated_id_reads_its_page_again_and_writes_it_from_its_own_sources(
    copies: Copies, blocks: list[int]
) -> None:
    where = positions(LAYER)
    paged, paged_whole = guarded(noise(LAYER.end))
    packed, packed_whole = guarded(poisoned(len(blocks) * LAYER.page_bytes))
    copies.gather(packed, paged, LAYER, ids(blocks))
    assert torch.equal(packed, gathered(packed.clone(), paged, where, blocks))
    sources = packed.view(len(blocks), -1)
    sources += torch.arange(len(blocks), dtype=torch.uint8)[:, None]
    copies.scatter(paged, packed, LAYER, ids(blocks))
    for block in set(blocks):
        mine = sources[[place for place, other in enumerate(blocks) if other == block]]
        assert bool((paged[where[block]] == mine).any(dim=0).all())
    check_guards(paged_whole, packed_whole)


@pytest.mark.parametrize("missing", [1, LAYER.page_bytes, 2 * LAYER.page_bytes])
def test_a_buffer_shorter_than_the_list_is_refused_though_padding_would_fit(copies: Copies, missing: int) -> None:
    blocks = [3, -1, 1]
    paged, paged_whole = guarded(noise(LAYER.end))
    packed, packed_whole = guarded(poisoned(3 * LAYER.page_bytes - missing))
    before = paged_whole.clone(), packed_whole.clone()
    for copy, arguments in ((copies.gather, (packed, paged)), (copies.scatter, (paged, packed))):
        with pytest.raises(GeometryError, match="packed pages has"):
            copy(*arguments, LAYER, ids(blocks))
    with pytest.raises(GeometryError, match="paged storage has"):
        copies.gather(poisoned(3 * LAYER.page_bytes), paged[:-missing], LAYER, ids(blocks))
    assert torch.equal(paged_whole, before[0]) and torch.equal(packed_whole, before[1])
