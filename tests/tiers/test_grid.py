from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstream.identity import object_key
from layerstream.jobs import TierObject
from layerstream.tiers.grid import ObjectGrid

NAMESPACE = b"n" * 32


def hashes(count: int) -> list[bytes]:
    return [b"hash %d" % block for block in range(count)]


@given(size=st.integers(1, 5), blocks=st.integers(0, 23), more=st.integers(0, 7))
def test_whole_objects_cover_a_prefix_up_to_its_last_full_chunk(size: int, blocks: int, more: int) -> None:
    grid = ObjectGrid(namespace=NAMESPACE, chunk_blocks=size)
    its = hashes(blocks + more)
    objects = grid.whole(its, blocks)
    assert [(one.start, one.blocks) for one in objects] == [(i * size, size) for i in range(blocks // size)]
    assert [one.parent for one in objects] == [b"", *(one.key for one in objects)][: len(objects)]
    for one in objects:
        assert one.key == object_key(NAMESPACE, its[one.start + size - 1], one.start, size)


@given(size=st.integers(1, 5), steps=st.lists(st.integers(0, 6), max_size=6))
def test_extending_step_by_step_names_the_same_objects(size: int, steps: list[int]) -> None:
    grid = ObjectGrid(namespace=NAMESPACE, chunk_blocks=size)
    its, blocks = hashes(sum(steps)), 0
    objects: list[TierObject] = []
    for step in steps:
        blocks += step
        grid.extend(objects, its, blocks)
        assert objects == grid.whole(its, blocks)
        grid.extend(objects, its, blocks - size if blocks >= size else 0)
        assert objects == grid.whole(its, blocks)


@pytest.mark.parametrize(("known", "lengths"), [(4, []), (5, [1]), (6, [2, 1]), (7, [3, 2, 1]), (9, [3, 2, 1])])
def test_tails_are_all_that_may_start_there_the_longest_first(known: int, lengths: list[int]) -> None:
    grid = ObjectGrid(namespace=NAMESPACE, chunk_blocks=4)
    tails = grid.tails(hashes(known), 4, parent=b"before")
    assert [(one.start, one.blocks, one.parent) for one in tails] == [(4, blocks, b"before") for blocks in lengths]
    assert len({one.key for one in tails}) == len(tails)


def test_chunks_of_one_block_have_no_tails() -> None:
    assert ObjectGrid(namespace=NAMESPACE, chunk_blocks=1).tails(hashes(3), 1, parent=b"") == []


def test_engines_with_blocks_of_other_sizes_name_the_same_tokens_alike() -> None:
    its = hashes(24)
    short = ObjectGrid(namespace=NAMESPACE, chunk_blocks=8)
    long = ObjectGrid(namespace=NAMESPACE, chunk_blocks=2, block_hashes=4)
    ends = its[3::4]
    assert [each.key for each in long.whole(ends, 6)] == [each.key for each in short.whole(its, 24)]
    assert [each.start for each in long.whole(ends, 6)] == [0, 2, 4]
    assert long.object(ends, 2, 1, parent=b"").key == short.object(its, 8, 4, parent=b"").key
    assert long.object(ends, 2, 1, parent=b"").key != short.object(its, 2, 1, parent=b"").key


def test_names_tell_apart_engines_and_cuts() -> None:
    its = hashes(8)
    grids = [
        ObjectGrid(namespace=NAMESPACE, chunk_blocks=4),
        ObjectGrid(namespace=b"other" * 6, chunk_blocks=4),
        ObjectGrid(namespace=NAMESPACE, chunk_blocks=8),
    ]
    keys = [grid.object(its, start, blocks, parent=b"").key for grid in grids for start, blocks in ((4, 4), (0, 8))]
    assert len(set(keys)) == 4, "only the namespace, the end, the start and the length count"
