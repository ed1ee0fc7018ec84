from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerstream.errors import GeometryError
from layerstream.geometry import LayerPages, layer_pages
from tests.kernels.conftest import Copies
from tests.kernels.pages import BLOCKS, LAYOUTS, far, gathered, ids, noise, poisoned, positions, scattered, virtual


def check(copies: Copies, layer: LayerPages, blocks: list[int], *, count: int | None = None, max_ctas: int = 3) -> None:
    """Scatter into poisoned storage, gaps and tail included, and compare every byte of it."""
    src = noise(len(blocks) * layer.page_bytes + 64)
    dst = poisoned(layer.end + 5)
    used = blocks if count is None else blocks[: max(0, count)]
    expected = scattered(dst, src, positions(layer), used)
    counted = None if count is None else ids([count])
    copies.scatter(dst, src, layer, ids(blocks), count=counted, max_ctas=max_ctas)
    assert torch.equal(dst, expected)


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS.keys())
@pytest.mark.parametrize("layer", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_pages_arrive_and_nothing_else_changes(copies: Copies, layer: LayerPages, blocks: list[int]) -> None:
    check(copies, layer, blocks)


@pytest.mark.parametrize("count", [-1, 0, 1, 3, 4, 99])
@pytest.mark.parametrize("name", ["96 bytes", "several tiles", "unequal runs"])
def test_count_limits_the_list(copies: Copies, name: str, count: int) -> None:
    check(copies, LAYOUTS[name], [4, 2, -1, 0], count=count)


@pytest.mark.parametrize("name", ["96 bytes", "656 bytes, gap, offset", "heads outermost"])
def test_a_repeated_page_holds_bytes_of_its_sources_alone(copies: Copies, name: str) -> None:
    layer = LAYOUTS[name]
    src, dst, where = noise(3 * layer.page_bytes), poisoned(layer.end), positions(layer)
    copies.scatter(dst, src, layer, ids([2, 0, 2]))
    first, other, last = src.view(3, layer.page_bytes)
    twice = dst[where[2]]
    assert ((twice == first) | (twice == last)).all()
    dst[where[2]] = first
    assert torch.equal(dst, scattered(poisoned(layer.end), torch.cat([first, other]), where, [2, 0]))


@pytest.mark.parametrize("too_large", [7, 2**31 - 1])
def test_an_id_past_the_last_page_is_never_written(copies: Copies, too_large: int) -> None:
    layer = LAYOUTS["96 bytes"]
    src, dst = noise(3 * layer.page_bytes), poisoned(layer.end + layer.page_stride)
    expected = scattered(dst, src, positions(layer), [0, -1, 1])
    if copies.refuses_large_ids:
        with pytest.raises(GeometryError, match=f"block id {too_large} in a cache of 7 pages"):
            copies.scatter(dst, src, layer, ids([0, too_large, 1]))
        assert torch.equal(dst, poisoned(dst.numel()))
    else:
        copies.scatter(dst, src, layer, ids([0, too_large, 1]))
        assert torch.equal(dst, expected)


@pytest.mark.parametrize("word", [1, 8])
def test_paged_offsets_pass_32_bits(copies: Copies, word: int) -> None:
    layer = far(word)
    half = layer.run_bytes
    dst, src = virtual(layer.end), noise(2 * half)
    copies.scatter(dst, src, layer, ids([4]))
    last = word + 4 * layer.page_stride
    assert torch.equal(torch.cat([dst[last : last + half], dst[layer.end - half :]]), src)
    assert not dst[: 100 * word].any()


@st.composite
def tensors(draw: st.DrawFn) -> tuple[LayerPages, torch.Tensor, int]:
    """A layer cut out of a tensor with dimensions in any order of memory and gaps between them; where its bytes lie
    according to torch; the size of the storage."""
    split = draw(st.integers(1, 3))
    num_blocks = draw(st.integers(1, 5))
    shape = [num_blocks * split, *draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))]
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    strides = [0] * len(shape)
    step = draw(st.sampled_from([1, 1, 1, 2]))
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim] = step
        step = step * shape[dim] + draw(st.sampled_from([0, 0, 0, 1, 4, 16]))
    offset = draw(st.sampled_from([0, 1, 2, 16, 37]))
    elements = offset + step
    layer = layer_pages(
        name="drawn", shape=shape, strides=strides, itemsize=itemsize, storage_offset=offset, num_blocks=num_blocks
    )
    in_blocks = [num_blocks, split, *shape[1:]], [strides[0] * split, *strides]
    view = torch.as_strided(torch.arange(elements), *in_blocks, offset)
    by_memory = sorted(range(1, view.dim()), key=view.stride, reverse=True)
    where = view.permute(0, *by_memory).reshape(num_blocks, -1, 1) * itemsize + torch.arange(itemsize)
    return layer, where.flatten(1), elements * itemsize


@settings(max_examples=150, deadline=None)
@given(drawn=tensors(), data=st.data())
def test_round_trip_of_any_strided_tensor(
    copies: Copies, drawn: tuple[LayerPages, torch.Tensor, int], data: st.DataObject
) -> None:
    layer, where, nbytes = drawn
    blocks = data.draw(st.permutations(range(layer.num_pages)))[: data.draw(st.integers(1, layer.num_pages))]
    blocks = [data.draw(st.sampled_from([block, block, block, -1])) for block in blocks]
    counted = data.draw(st.one_of(st.none(), st.integers(0, len(blocks))))
    count = None if counted is None else ids([counted])
    used = blocks[:counted]
    storage, packed = noise(nbytes), poisoned(len(blocks) * layer.page_bytes + 16)
    expected = gathered(packed, storage, where, used)
    copies.gather(packed, storage, layer, ids(blocks), count=count, max_ctas=2)
    assert torch.equal(packed, expected)
    restored = poisoned(nbytes)
    copies.scatter(restored, packed, layer, ids(blocks), count=count, max_ctas=2)
    assert torch.equal(restored, scattered(poisoned(nbytes), packed, where, used))
    kept = [block for block in used if block >= 0]
    assert torch.equal(restored[where[kept]], storage[where[kept]])
