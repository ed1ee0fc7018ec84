from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerstream.errors import GeometryError
from layerstream.geometry import LayerPages, layer_pages
from layerstream.kernels.stack import PageStack
from tests.kernels.conftest import Copies
from tests.kernels.pages import (
    BLOCKS,
    LAYOUTS,
    Strewn,
    dense,
    far,
    gathered,
    ids,
    noise,
    offsets,
    poisoned,
    positions,
    scattered,
    stacked,
    virtual,
)


def check(copies: Copies, layer: LayerPages, blocks: list[int], *, count: int | None = None, max_ctas: int = 3) -> None:
    """Scatter into poisoned storage, gaps and tail included, and compare every byte of it."""
    src = noise(len(blocks) * layer.page_bytes + 64)
    dst = poisoned(layer.end + 5)
    used = blocks if count is None else blocks[: max(0, count)]
    expected = scattered(dst, src, positions(layer), used)
    counted = None if count is None else ids([count])
    copies.scatter(dst, src, layer, ids(blocks), count=counted, max_ctas=max_ctas)
    assert torch.equal(dst, expected)


def check_strewn(copies: Copies, layer: LayerPages, blocks: list[int], *, gap: int = 1, host: bool = False) -> None:
    """Scatter from places in three allocations into poisoned storage and compare every byte of it."""
    dst, where = poisoned(layer.end + 5), positions(layer)
    packed = Strewn(layer, blocks, len(blocks), gap=gap, fill=noise)
    expected = dst.clone()
    for index, block in enumerate(blocks):
        if block >= 0:
            expected[where[block]] = packed.page(packed.memory, index, None)
    copies.scatter(dst, packed.base, layer, ids(blocks), places=packed.places, packed_on_host=host)
    assert torch.equal(dst, expected)


def check_layers(
    copies: Copies,
    layer: LayerPages,
    blocks: list[int],
    span: tuple[int, int, int],
    *,
    placed: bool,
    count: int | None = None,
    shared: bool = False,
    host: bool = False,
) -> None:
    """Scatter into `span`, (first layer, layers, layers of the stack), and compare every byte of all layers."""
    (first, layers, depth), used = span, blocks if count is None else blocks[: max(0, count)]
    stack = stacked(layer, depth, shared=shared, fill=poisoned)
    packed = noise(layers * len(blocks) * layer.page_bytes)
    strewn = Strewn(layer, used, len(blocks), layers=depth, gap=1, fill=noise)
    expected = [poisoned(storage.numel()) for storage in stack.storages[: 1 if shared else depth]]
    for index in range(first, first + layers):
        storage, where = expected[0 if shared else index], positions(stack.layers[index])
        for page, block in enumerate(used):
            if block >= 0:
                start = ((index - first) * len(blocks) + page) * layer.page_bytes
                dense_page = packed[start : start + layer.page_bytes]
                storage[where[block]] = strewn.page(strewn.memory, page, index) if placed else dense_page
    copies.scatter_layers(
        *(stack, first, layers, strewn.base if placed else packed, ids(blocks)),
        places=strewn.places if placed else None,
        layer_places=strewn.layer_places if placed else None,
        count=None if count is None else ids([count]),
        packed_on_host=host,
        max_ctas=3,
    )
    assert all(map(torch.equal, stack.storages, expected))


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


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS.keys())
@pytest.mark.parametrize("name", ["96 bytes", "unequal runs"])
def test_pages_come_from_their_places(copies: Copies, name: str, blocks: list[int], gap: int) -> None:
    check_strewn(copies, LAYOUTS[name], blocks, gap=gap)


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("layer", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_places_suit_every_layout(copies: Copies, layer: LayerPages, host: bool) -> None:
    check_strewn(copies, layer, [4, -1, 0, 1, 2], host=host)


@pytest.mark.parametrize("placed", [False, True], ids=["dense", "placed"])
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "one storage"])
@pytest.mark.parametrize("layer", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_several_layers_are_filled_by_one_call(copies: Copies, layer: LayerPages, shared: bool, placed: bool) -> None:
    check_layers(copies, layer, [3, -1, 0, 1], (1, 2, 3), shared=shared, placed=placed, host=shared)


@pytest.mark.parametrize("placed", [False, True], ids=["dense", "placed"])
@pytest.mark.parametrize("count", [None, -1, 0, 1, 3, 99])
@pytest.mark.parametrize("span", [(0, 1, 1), (4, 1, 5), (0, 5, 5), (1, 3, 5)], ids=str)
def test_any_span_of_a_stack_and_any_count(
    copies: Copies, span: tuple[int, int, int], count: int | None, placed: bool
) -> None:
    check_layers(copies, LAYOUTS["heads outermost"], [4, 2, -1, 0], span, count=count, placed=placed)


def test_places_and_layers_pass_32_bits(copies: Copies) -> None:
    apart = 2**33 + 32
    layer, src, dst = dense(16), virtual(3 * apart), virtual(2 * apart)
    stack = PageStack([dst, dst], [layer, replace(layer, offset=apart)])
    src[:16], src[apart : apart + 16] = noise(16), noise(32)[16:]
    places, layer_places = offsets([-apart, 64]), offsets([0, apart])
    copies.scatter_layers(stack, 0, 2, src[apart : apart + 1], ids([2, 1]), places=places, layer_places=layer_places)
    assert torch.equal(dst[32:48], noise(16))
    assert torch.equal(dst[apart + 32 : apart + 48], noise(32)[16:])
    assert not dst[48:4096].any() and not dst[apart + 48 : apart + 4096].any()


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


@settings(max_examples=80, deadline=None)
@given(drawn=tensors(), data=st.data())
def test_round_trip_of_layers_of_any_strided_tensor(
    copies: Copies, drawn: tuple[LayerPages, torch.Tensor, int], data: st.DataObject
) -> None:
    layer, where, _ = drawn
    depth = data.draw(st.integers(1, 5))
    first = data.draw(st.integers(0, depth - 1))
    layers = data.draw(st.integers(1, depth - first))
    blocks = data.draw(st.permutations(range(layer.num_pages)))[: data.draw(st.integers(1, layer.num_pages))]
    blocks = [data.draw(st.sampled_from([block, block, block, -1])) for block in blocks]
    counted = data.draw(st.one_of(st.none(), st.integers(0, len(blocks))))
    used = blocks[:counted]
    how = {"count": None if counted is None else ids([counted]), "packed_on_host": data.draw(st.booleans())}
    stack = stacked(layer, depth, shared=data.draw(st.booleans()), fill=noise)
    restored = PageStack([poisoned(storage.numel()) for storage in stack.storages], stack.layers)
    span, strewn = (first, layers), Strewn(layer, used, len(blocks), layers=depth, gap=1, fill=poisoned)
    if data.draw(st.booleans()):
        packed, how = strewn.base, how | {"places": strewn.places, "layer_places": strewn.layer_places}
    else:
        packed = poisoned(layers * len(blocks) * layer.page_bytes)
    copies.gather_layers(packed, stack, *span, ids(blocks), **how)
    copies.scatter_layers(restored, *span, packed, ids(blocks), **how)
    kept = [block for block in used if block >= 0]
    for index in range(depth):
        expected = poisoned(stack.storages[index].numel())
        if first <= index < first + layers:
            moved = where[kept] + stack.layers[index].offset - layer.offset
            expected[moved] = stack.storages[index][moved]
        assert torch.equal(restored.storages[index], expected)
