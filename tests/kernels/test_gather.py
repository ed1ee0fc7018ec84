from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl

from layerstream.errors import GeometryError
from layerstream.geometry import LayerPages
from layerstream.kernels import gather
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
    stacked,
    virtual,
)


def check(copies: Copies, layer: LayerPages, blocks: list[int], *, count: int | None = None, max_ctas: int = 3) -> None:
    """Gather into a poisoned buffer with room to spare and compare every byte of it."""
    src = noise(layer.end + 5)
    dst = poisoned(len(blocks) * layer.page_bytes + 64)
    used = blocks if count is None else blocks[: max(0, count)]
    expected = gathered(dst, src, positions(layer), used)
    counted = None if count is None else ids([count])
    copies.gather(dst, src, layer, ids(blocks), count=counted, max_ctas=max_ctas)
    assert torch.equal(dst, expected)
    assert torch.equal(src, noise(layer.end + 5))


def check_strewn(
    copies: Copies, layer: LayerPages, blocks: list[int], *, count: int | None = None, gap: int = 1, host: bool = False
) -> None:
    """Gather to places in three poisoned allocations and compare every byte of them."""
    src, where = noise(layer.end + 5), positions(layer)
    used = blocks if count is None else blocks[: max(0, count)]
    packed = Strewn(layer, used, len(blocks), gap=gap, fill=poisoned)
    expected = packed.copies()
    for index, block in enumerate(used):
        if block >= 0:
            packed.page(expected, index, None)[:] = src[where[block]]
    counted = None if count is None else ids([count])
    copies.gather(packed.base, src, layer, ids(blocks), places=packed.places, count=counted, packed_on_host=host)
    assert all(map(torch.equal, packed.memory, expected))


def check_layers(
    copies: Copies,
    layer: LayerPages,
    blocks: list[int],
    span: tuple[int, int, int],
    *,
    count: int | None = None,
    shared: bool = False,
    host: bool = False,
    max_ctas: int = 3,
) -> None:
    """Gather `span`, (first layer, layers, layers of the stack), both ways and compare every byte of every buffer."""
    (first, layers, depth), used = span, blocks if count is None else blocks[: max(0, count)]
    stack = stacked(layer, depth, shared=shared, fill=noise)
    how = {"count": None if count is None else ids([count]), "packed_on_host": host, "max_ctas": max_ctas}
    packed = poisoned(layers * len(blocks) * layer.page_bytes + 64)
    strewn = Strewn(layer, used, len(blocks), layers=depth, gap=1, fill=poisoned)
    expected, strewn_expected = packed.clone(), strewn.copies()
    for index in range(first, first + layers):
        storage, where = stack.storages[index], positions(stack.layers[index])
        part = expected[(index - first) * len(blocks) * layer.page_bytes :]
        part[:] = gathered(part, storage, where, used)
        for page, block in enumerate(used):
            if block >= 0:
                strewn.page(strewn_expected, page, index)[:] = storage[where[block]]
    copies.gather_layers(packed, stack, first, layers, ids(blocks), **how)
    assert torch.equal(packed, expected)
    tables = {"places": strewn.places, "layer_places": strewn.layer_places}
    copies.gather_layers(strewn.base, stack, first, layers, ids(blocks), **tables, **how)
    assert all(map(torch.equal, strewn.memory, strewn_expected))
    assert all(torch.equal(storage, noise(storage.numel())) for storage in stack.storages)


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS.keys())
@pytest.mark.parametrize("layer", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_pages_arrive_in_list_order_and_nothing_else_changes(
    copies: Copies, layer: LayerPages, blocks: list[int]
) -> None:
    check(copies, layer, blocks)


@pytest.mark.parametrize("layer", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_repeated_page_is_read_again(copies: Copies, layer: LayerPages) -> None:
    check(copies, layer, [3, 3, 0, 3])


@pytest.mark.parametrize("count", [-1, 0, 1, 3, 4, 99])
@pytest.mark.parametrize("name", ["96 bytes", "several tiles", "unequal runs"])
def test_count_limits_the_list(copies: Copies, name: str, count: int) -> None:
    check(copies, LAYOUTS[name], [4, 2, -1, 0], count=count)


@pytest.mark.parametrize("max_ctas", [1, 2, 512])
def test_any_number_of_thread_blocks_copies_the_same(copies: Copies, max_ctas: int) -> None:
    check(copies, LAYOUTS["several tiles"], [5, 0, 3], max_ctas=max_ctas)


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_buffers_may_start_anywhere(copies: Copies, shift: int) -> None:
    layer = LAYOUTS["96 bytes"]
    src = noise(layer.end + shift)
    dst = poisoned(2 * layer.page_bytes + shift)
    expected = gathered(dst[shift:], src[shift:], positions(layer), [3, 1])
    copies.gather(dst[shift:], src[shift:], layer, ids([3, 1]))
    assert torch.equal(dst[shift:], expected)
    assert torch.equal(dst[:shift], poisoned(shift))


@pytest.mark.parametrize("too_large", [7, 2**31 - 1])
def test_an_id_past_the_last_page_is_never_read(copies: Copies, too_large: int) -> None:
    layer = LAYOUTS["96 bytes"]
    src, dst = noise(layer.end), poisoned(3 * layer.page_bytes)
    if copies.refuses_large_ids:
        with pytest.raises(GeometryError, match=f"block id {too_large} in a cache of 7 pages"):
            copies.gather(dst, src, layer, ids([0, too_large, 1]))
        assert torch.equal(dst, poisoned(dst.numel()))
    else:
        copies.gather(dst, src, layer, ids([0, too_large, 1]))
        assert torch.equal(dst, gathered(poisoned(dst.numel()), src, positions(layer), [0, -1, 1]))


@pytest.mark.parametrize("word", [1, 8])
def test_paged_offsets_pass_32_bits(copies: Copies, word: int) -> None:
    layer = far(word)
    half = layer.run_bytes
    src, content = virtual(layer.end), noise(2 * half)
    last = word + 4 * layer.page_stride
    src[last : last + half], src[layer.end - half :] = content[:half], content[half:]
    dst = poisoned(2 * layer.page_bytes)
    copies.gather(dst, src, layer, ids([4, 0]))
    assert torch.equal(dst[: layer.page_bytes], content)
    assert not dst[layer.page_bytes :].any()


@pytest.fixture
def first_byte() -> dict[str, Any]:
    return {
        "PAGE_STRIDE": 1,
        "RUN_STRIDE": 0,
        "RUNS": 1,
        "SEGMENTS": 1,
        "ROWS": 8,
        "COLUMNS": 1,
        "WORD": 1,
        "ELEMENT": tl.int8,
        "HOST": False,
    }


@pytest.mark.usefixtures("interpreted")
def test_packed_offsets_pass_32_bits(first_byte: dict[str, Any]) -> None:
    # Only the first byte of each page, or the interpreter would have gigabytes to move.
    page_bytes = 2**30 + 9
    dst, src = virtual(4 * page_bytes + 1), noise(16)
    gather.gather_kernel[(1,)](
        *(dst, src, ids([-1, -1, -1, -1, 7]), *[None] * 5, 0, 1, 5, 16, 0),
        **(first_byte | {"RUN_BYTES": page_bytes}),
    )
    assert dst[4 * page_bytes] == src[7]
    assert not dst[:100].any()


@pytest.mark.usefixtures("interpreted")
def test_packed_offsets_of_later_layers_pass_32_bits(first_byte: dict[str, Any]) -> None:
    page_bytes = 2**29 + 9
    dst, src = virtual(6 * page_bytes + 1), noise(16)
    gather.gather_kernel[(1,)](
        *(dst, src, ids([-1, 7, 7]), ids([2]), None, None, offsets([0, 1, 5]), None, 1, 2, 3, 16, 0),
        **(first_byte | {"RUN_BYTES": page_bytes}),
    )
    assert [int(dst[page * page_bytes]) for page in range(6)] == [0, 8, 0, 0, 12, 0]


def test_an_empty_list_needs_no_packed_bytes(copies: Copies) -> None:
    layer = dense(16)
    copies.gather(torch.empty(0, dtype=torch.uint8), noise(layer.end), layer, ids([]))


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS.keys())
@pytest.mark.parametrize("name", ["96 bytes", "unequal runs"])
def test_pages_arrive_at_their_places(copies: Copies, name: str, blocks: list[int], gap: int) -> None:
    check_strewn(copies, LAYOUTS[name], blocks, gap=gap)


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("layer", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_places_suit_every_layout(copies: Copies, layer: LayerPages, host: bool) -> None:
    check_strewn(copies, layer, [4, -1, 0, 1, 2, 3], count=5, host=host)


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "one storage"])
@pytest.mark.parametrize("layer", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_several_layers_arrive_by_one_call(copies: Copies, layer: LayerPages, shared: bool, host: bool) -> None:
    check_layers(copies, layer, [3, -1, 0, 1], (1, 2, 3), shared=shared, host=host)


@pytest.mark.parametrize("count", [None, -1, 0, 1, 3, 99])
@pytest.mark.parametrize("span", [(0, 1, 1), (4, 1, 5), (0, 5, 5), (1, 3, 5)], ids=str)
def test_any_span_of_a_stack_and_any_count(copies: Copies, span: tuple[int, int, int], count: int | None) -> None:
    check_layers(copies, LAYOUTS["heads outermost"], [4, 2, -1, 0], span, count=count)


@pytest.mark.parametrize("max_ctas", [1, 2, 512])
def test_any_number_of_thread_blocks_copies_the_same_layers(copies: Copies, max_ctas: int) -> None:
    check_layers(copies, LAYOUTS["several tiles"], [5, 0, 3], (0, 3, 3), max_ctas=max_ctas)


def test_a_count_is_read_at_each_call(copies: Copies) -> None:
    layer, count = LAYOUTS["96 bytes"], ids([1])
    src, where = noise(layer.end), positions(layer)
    for used in (1, 2, 0):
        count[0] = used
        dst = poisoned(2 * layer.page_bytes)
        copies.gather(dst, src, layer, ids([3, 1]), count=count)
        assert torch.equal(dst, gathered(poisoned(dst.numel()), src, where, [3, 1][:used]))


def test_places_and_layers_pass_32_bits(copies: Copies) -> None:
    apart = 2**33 + 32
    layer, src, dst = dense(16), virtual(2 * apart), virtual(3 * apart)
    stack = PageStack([src, src], [layer, replace(layer, offset=apart)])
    src[32:48], src[apart + 32 : apart + 48] = noise(16), noise(32)[16:]
    places, layer_places = offsets([-apart, 64]), offsets([0, apart])
    copies.gather_layers(dst[apart : apart + 1], stack, 0, 2, ids([2, 1]), places=places, layer_places=layer_places)
    assert torch.equal(dst[:16], noise(16))
    assert torch.equal(dst[apart : apart + 16], noise(32)[16:])
    assert not dst[16:4096].any() and not dst[2 * apart : 2 * apart + 4096].any()
